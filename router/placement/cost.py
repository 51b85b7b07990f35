"""The policy ``cost``: the route with the smallest predicted harm to the latency of all requests that it concerns.

Harm is measured in seconds beyond the objectives: the request's TTFT, from its arrival on, and each of its later gaps,
and the same of the requests that its route delays. Without objectives every second of TTFT counts; a gap counts by its
ratio to a step, so that a few long gaps count more than as much time in short ones, which a stream hides.

Routes without harm are compared by strain. A time t strains an objective T by t / (T - t): hardly while it is far below
T, without bound where nothing of T is left. (A queue with utilisation t / T has so many requests on average.) A route's
strain is that of the request's TTFT and the mean of its gaps' strains, and what the route adds to those of the others.
A gap beside a chunk of a prompt counts by its own length: the mean gap would hide it, the 99th percentile doesn't. So a
prompt that has time for a prefill worker's queue leaves decode workers in peace, and they help before prompts come near
their objective. At the objective it would be too late: predictions are means, and later requests come on top.

A prompt's own computing keeps later prompts waiting, those that a cached prefix saves doesn't. By Pollaczek and
Khinchine, the wait of a queue with utilisation u is the mean residual work times u / (1 - u): a second of computing
counts u / (1 - u) / 2 seconds more than one in the queue. So the busier a worker is, the farther a prompt goes to spare
it; of idle workers without a prefix, the one with the lowest utilisation takes the prompt. The utilisation is the
worker's own: with the pool's mean, prompts would queue at the fast workers of a pool while the slow ones have time.

A conversation is known by the deepest match of its prompt with what was sent to a worker. Where nothing matches (its
first turn; this router is new; another one had the turns before), a session that the client names stands in for the
match: the conversation's own worker may have its KV, and counts for a share of the computing that it would save.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from splitserve.protocol.request import Party, Role
from splitserve.router.placement.policies import (
    DEFAULT_CHUNK_TOKENS,
    NO_STEP_MODEL,
    READ_SECONDS,
    NoWorker,
    Placed,
    Placement,
    PrefixRead,
    RequestShape,
    Snapshot,
    WorkerView,
    aggregated,
    alone,
    fitting_workers,
    least_loaded,
    of_role,
    pair,
    prefix_read,
    session_rank,
    why_not,
)
from splitserve.router.placement.strain import gap_strain, interrupted, strain_of
from splitserve.router.placement.worker_times import (
    LEAST_STEP_SECONDS,
    MAX_UTILISATION,
    RESIDUAL,
    beside,
    burden,
    chunk_seconds,
    interruptions,
    later_prompts,
    room_seconds,
    shared_chunk,
    step_beside,
    stretch,
    usual_prompt_tokens,
)

NUM_CANDIDATES = 4
"""Prefill and decode workers, the best of each, of which all pairs are compared."""
LAST_CHUNK_TOKENS = 1024
"""Tokens whose KV is still to be read when the first token is out; earlier chunks travel during prefill."""
WHY = "predicted latency"
WHY_SPARE = "spare time of a prefill worker"
SESSION_TRUST = 0.25
"""Share of a prompt's computing that its session's own worker is taken to save where no worker is known to have a
prefix: little, since a worker with a shorter queue is better than a wrong guess."""
SPARE_MARGIN = 0.1
"""Share of the strain that a prefill worker's spare time must save: an output there keeps later prompts in chunks for
seconds, and those of a load that has just begun aren't foreseen."""
FULL = 1.0 + burden(1.0)
"""What a second of wait for room counts: later requests wait for it, too, as for computing on a busy worker."""


@dataclass(slots=True)
class _Request:
    """The request's sizes, the objectives, and the workers of its session."""

    num_tokens: int  # to be in KV
    output_tokens: float  # expected
    usual_outputs: float  # of the other requests
    waited: float  # seconds since it arrived
    ttft: float
    gap: float
    own_workers: frozenset[Party]  # of its session, one per role; none if a prefix tells more
    strains: bool  # both objectives are there; else every strain is infinite
    is_alone: bool  # nothing else is in flight: a client that waits for its answers interrupts nothing
    spilled_share: float  # of a prefill worker's time, for prompts that decode workers computed

    def late(self, seconds: float) -> float:
        return seconds - self.ttft if seconds > self.ttft else 0.0

    def slow(self, seconds: float) -> float:
        return seconds - self.gap if seconds > self.gap else 0.0

    def prompt_share(self, worker: WorkerView) -> float:
        """Return the share of a worker's time that prompts will take."""
        share = worker.prompt_share
        if self.spilled_share and worker.role is Role.PREFILL:
            share += self.spilled_share
        return share if share < MAX_UTILISATION else MAX_UTILISATION

    def is_away(self, worker: WorkerView) -> bool:
        return bool(self.own_workers) and worker.party not in self.own_workers


class _Prompt(NamedTuple):
    """The prompt on one worker; the first three fields are its rank among the workers of a role."""

    delay: float  # seconds of ``ttft``, and of the later prompts' waits for it
    num_placed: int
    name: str
    worker: WorkerView
    matched: int  # tokens that it has
    ttft: float  # seconds of the queue, the read of a prefix, and computing
    read: PrefixRead | None


class _Decode(NamedTuple):
    """The output on one worker; the first four fields are its rank among the workers of a role."""

    seconds: float  # of wait for room, and of harm
    strain: float
    num_placed: int
    name: str
    worker: WorkerView
    room: float  # seconds of wait for it
    harm: float
    before: float  # seconds of a decode step without the request; 0.0 if nothing decodes
    after: float  # and with it, half of its output being out


class _Route(NamedTuple):
    """A route and its prediction: routes are compared by harm, by strain, then by delay; among equals prefill workers
    are kept for prompts, decode workers for outputs, and requests spread evenly."""

    harm_seconds: float
    strain: float  # infinite where an objective is lacking or used up
    delay_seconds: float  # the request's TTFT, and that which its computing adds to those of later ones
    decodes_on_prefill: bool
    is_local: bool
    is_away: bool  # the session decodes on another worker than its own
    num_placed: int
    names: tuple[str, ...]  # no two routes have the same: what follows is not compared
    ttft_seconds: float
    why: str
    prefill: _Prompt
    decode: _Decode | None  # None where the prompt's worker does both phases

    def placed(self) -> Placed:
        if self.decode is None:
            return alone(self.prefill.worker, self.why, self.ttft_seconds)
        read = self.prefill.read
        return pair(self.prefill.worker, self.decode.worker, self.why, self.ttft_seconds, read=read)


# Fields of these tuples: a named tuple takes longer to make than its predictions, and is made of the best ones alone.
_PromptFields: TypeAlias = tuple[float, int, str, WorkerView, int, float, PrefixRead | None]
_DecodeFields: TypeAlias = tuple[float, float, int, str, WorkerView, float, float, float, float]
_Prediction: TypeAlias = tuple[float, float, float, bool, bool, bool, int, tuple[str, ...], float]
_RouteFields: TypeAlias = tuple[
    float, float, float, bool, bool, bool, int, tuple[str, ...], float, str, _Prompt, _Decode | None
]


def cost(snapshot: Snapshot, shape: RequestShape) -> Placement:
    """Place a request on the route with the smallest predicted harm; local on any worker, or disaggregated. While no
    worker has told a model of its steps, the least loaded ones take it."""
    if all(worker.step_model == NO_STEP_MODEL for worker in snapshot.workers):
        return least_loaded(snapshot, shape)
    if snapshot.is_aggregated:
        snapshot = aggregated(snapshot)
    fitting = fitting_workers(snapshot, shape)
    request = _Request(
        num_tokens=shape.num_prompt_tokens + shape.num_output_tokens,
        output_tokens=max(1.0, min(shape.max_tokens, snapshot.output_tokens)),
        usual_outputs=max(1.0, snapshot.output_tokens),
        waited=shape.waited_seconds,
        ttft=snapshot.objectives.ttft_seconds,
        gap=snapshot.objectives.tpot_seconds,
        own_workers=_own_workers(fitting, shape),
        strains=min(snapshot.objectives.ttft_seconds, snapshot.objectives.tpot_seconds) > 0.0,
        is_alone=not any(worker.num_requests for worker in snapshot.workers),
        spilled_share=_spilled_share(snapshot.workers),
    )
    best = min(_routes(snapshot, fitting, request, shape), default=None)
    return NoWorker(why_not(snapshot, fitting, shape)) if best is None else _Route._make(best).placed()


def _spilled_share(workers: Sequence[WorkerView]) -> float:
    """Return the share of a prefill worker's time that the prompts which decode workers computed would have taken:
    those that come next may come to it."""
    num_prefill, spilled = 0, 0.0
    for worker in workers:
        num_prefill += worker.role is Role.PREFILL
        if worker.prompt_share and worker.role is Role.DECODE:
            spilled += worker.prompt_share
    return spilled / num_prefill if num_prefill else 0.0


def _own_workers(workers: Iterable[WorkerView], shape: RequestShape) -> frozenset[Party]:
    workers = list(workers)
    if not shape.session or any(worker.prefix_match_tokens for worker in workers):
        return frozenset()
    of_roles = (of_role(workers, role) for role in Role)
    first = (min(each, key=lambda worker: session_rank(shape.session, worker), default=None) for each in of_roles)
    return frozenset(worker.party for worker in first if worker is not None)


def _routes(
    snapshot: Snapshot, workers: Sequence[WorkerView], request: _Request, shape: RequestShape
) -> Iterator[_RouteFields]:
    """Yield the routes that may be the best one."""
    ranked = sorted(_prompts(of_role(workers, Role.PREFILL), request))
    ends = sorted(_decodes(of_role(workers, Role.DECODE), request))
    decodes = [_Decode._make(each) for each in ends[:NUM_CANDIDATES]]
    prefills = own = [_Prompt._make(each) for each in ranked[:NUM_CANDIDATES]]
    if snapshot.prefix_source is not None:
        with_reads = sorted(_with_reads(snapshot, ranked, request, shape))
        prefills = [_Prompt._make(each) for each in with_reads[:NUM_CANDIDATES]]
    yield from _pairs(prefills, decodes, request)
    alone_on = [_Decode._make(each) for each in _decodes(of_role(workers, Role.MIXED), request)]
    if any(worker.role is Role.PREFILL for worker in snapshot.workers):
        alone_on += decodes  # else the router itself lets decode do without prefill
    prompts = _prompts([decode.worker for decode in alone_on], request)
    for prompt, decode in zip(map(_Prompt._make, prompts), alone_on, strict=True):
        yield *_predict_local(prompt, decode, request), WHY, prompt, None
    # A route on one worker reads no prefix: the best are those that have one themselves, and may have a queue for it.
    spare = own if decodes else []  # without decode, a cluster waits for one
    spare = [prompt for prompt in spare if prompt.worker.context_tokens_limit >= shape.max_context_tokens]
    outputs = _decodes([prompt.worker for prompt in spare], request)
    for prompt, decode in zip(spare, map(_Decode._make, outputs), strict=True):
        yield *_predict_local(prompt, decode, request), WHY_SPARE, prompt, None


def _with_reads(
    snapshot: Snapshot, own: Iterable[_PromptFields], request: _Request, shape: RequestShape
) -> Iterator[_PromptFields]:
    """Yield the prompts, with a read of a prefix on those workers that save time by it."""
    for fields in own:
        worker = fields[3]
        read = prefix_read(snapshot, worker, shape)
        if read is None:
            yield fields
        else:
            queue, computing = _computing(worker, request, request.num_tokens - read.num_tokens, read.own_seconds)
            ttft = queue + computing + read.read_seconds
            delay = _delay(worker, request, ttft, computing)
            yield delay, worker.num_placed, worker.party.engine_id, worker, read.num_tokens, ttft, read


def _prompts(workers: Iterable[WorkerView], request: _Request) -> list[_PromptFields]:
    """Return the prompt on each worker, which computes what it doesn't have."""
    prompts: list[_PromptFields] = []
    num_tokens = request.num_tokens
    for worker in workers:
        matched = worker.prefix_match_tokens
        if matched >= num_tokens:
            matched = num_tokens - 1
        chunk = worker.chunk_tokens or DEFAULT_CHUNK_TOKENS
        queue, own = worker.queue_seconds, worker.step_model.prefill_seconds(matched, num_tokens - matched, chunk)
        if worker.num_decoding or (worker.num_requests and worker.role is not Role.PREFILL):
            queue, own = _computing(worker, request, num_tokens - matched, own)
        ttft = queue + own
        delay = _delay(worker, request, ttft, own)
        prompts.append((delay, worker.num_placed, worker.party.engine_id, worker, matched, ttft, None))
    return prompts


def _computing(worker: WorkerView, request: _Request, num_tokens: int, alone: float) -> tuple[float, float]:
    """Return the seconds of a worker's queue, and those of a prompt of ``num_tokens`` which takes ``alone`` seconds
    where nothing decodes, both beside the outputs there."""
    step = step_beside(worker, request.usual_outputs, request.gap)
    if not step:
        return worker.queue_seconds, alone
    queue = RESIDUAL * step + worker.queue_seconds * stretch(worker, worker.prompt_seconds, step, request.gap)
    return queue, beside(worker, num_tokens, alone, step, request.gap)


def _delay(worker: WorkerView, request: _Request, ttft: float, own: float) -> float:
    delay = ttft + burden(worker.prefill_busy) * own
    if request.own_workers and worker.party in request.own_workers and worker.role is not Role.DECODE:
        delay -= SESSION_TRUST * own  # a guess makes no route local
    return delay


def _decodes(workers: Iterable[WorkerView], request: _Request) -> list[_DecodeFields]:
    """Return the output on each worker. Harm and strain are those of the request's own gaps, and what it adds to those
    of the others."""
    num_tokens, num_outputs, half = request.num_tokens, request.output_tokens, request.output_tokens / 2
    gap, usual_outputs, strains = request.gap, request.usual_outputs, request.strains
    decodes, room, strain = [], 0.0, math.inf
    for worker in workers:
        running, model = worker.num_decoding, worker.step_model
        outputs = int(running * usual_outputs / 2)  # half of them is out
        context = worker.decoding_tokens + outputs
        before = model.decode_seconds(running, context) if running else 0.0
        after = model.decode_seconds(running + 1, context + num_tokens + int(half))
        harm = room = 0.0
        if after > gap:
            harm = num_outputs * (after - gap)
            if running:
                harm += running * half * (after - gap - request.slow(before))
        if not gap and not request.is_alone and (share := request.prompt_share(worker)):
            harm += num_outputs * interruptions(worker, share)
        wanted = worker.context_tokens + outputs + num_tokens + num_outputs
        if worker.num_requests >= worker.max_num_seqs or wanted > worker.kv_capacity_tokens:
            room = room_seconds(worker, wanted, num_outputs, before)
        if strains:
            strain = _gap_strain(worker, request, before, after)
        rank = harm + room, strain, worker.num_placed, worker.party.engine_id
        decodes.append((*rank, worker, room, harm, before, after))
    return decodes


def _gap_strain(worker: WorkerView, request: _Request, before: float, after: float) -> float:
    share = request.prompt_share(worker)
    chunk = 0.0
    if share:
        chunk = chunk_seconds(worker, usual_prompt_tokens(worker) or request.num_tokens, after, request.gap)
    return gap_strain(worker.num_decoding, (before, after), share, chunk, request.gap)


def _pairs(prefills: Iterable[_Prompt], decodes: Sequence[_Decode], request: _Request) -> Iterator[_RouteFields]:
    """Yield the routes on two workers."""
    waited, ttft = request.waited, request.ttft
    aways = [request.is_away(decode.worker) for decode in decodes]
    for prefill in prefills:
        last_tokens = min(request.num_tokens - prefill.matched, LAST_CHUNK_TOKENS)
        for decode, is_away in zip(decodes, aways, strict=True):
            handover, rate = READ_SECONDS, decode.worker.link_rates.get(prefill.name)
            if rate:  # else the first hand-over tells it: one that was taken to be slow would never be tried
                handover += last_tokens * decode.worker.token_bytes / rate
            delay = prefill.delay + decode.room * FULL
            harm = request.late(waited + delay) + request.slow(handover) + decode.harm
            strain = strain_of(waited + delay, ttft) + decode.strain if request.strains else math.inf
            num_placed, names = prefill.num_placed + decode.num_placed, (prefill.name, decode.name)
            seconds = prefill.ttft + decode.room
            yield harm, strain, delay, False, False, is_away, num_placed, names, seconds, WHY, prefill, decode


def _predict_local(prompt: _Prompt, decode: _Decode, request: _Request) -> _Prediction:
    """Predict both phases on one worker, whose running requests see a gap for each chunk of the prompt. All
    count as the first one in harm, and as the last one, the longest, in strain."""
    worker, matched = prompt.worker, prompt.matched
    model, num_missed = worker.step_model, request.num_tokens - matched
    before, running = decode.before, worker.num_decoding
    chunk = worker.chunk_tokens or DEFAULT_CHUNK_TOKENS
    if step := step_beside(worker, request.usual_outputs, request.gap):
        chunk = shared_chunk(worker, request.gap, step, matched)
    chunk = min(chunk, num_missed)
    num_chunks = -(-num_missed // chunk)
    gap = (before or model.base) + model.chunk_seconds(matched, chunk, decodes=before > 0.0)
    delay = prompt.delay + decode.room * FULL
    harm = request.late(request.waited + delay)
    if not request.gap:
        step, is_awaited = max(before or decode.after, LEAST_STEP_SECONDS), worker.num_requests > running
        num_interrupted = running + (is_awaited and worker.role is not Role.PREFILL)
        harm += num_chunks * num_interrupted * max(0.0, gap - step) * gap / step
    elif slow := request.slow(gap):
        harm += num_chunks * running * (slow - request.slow(before))
    if request.gap:  # later prompts there interrupt this request
        later = decode.after + model.per_token_beside * shared_chunk(worker, request.gap, decode.after, 0)
        harm += worker.prefill_busy * request.output_tokens * (request.slow(later) - request.slow(decode.after))
    harm += decode.harm
    strain = strain_of(request.waited + delay, request.ttft) if request.strains else math.inf
    if strain < math.inf:
        strain += _gap_strain(worker, request, before, decode.after)
        long_share = min(1.0, num_chunks / request.usual_outputs)
        long = chunk_seconds(worker, request.num_tokens, before, request.gap)
        strain += running * interrupted(before, long, long_share, request.gap)
    is_prefill = worker.role is Role.PREFILL
    if is_prefill:
        late, strained = _later_prompts(prompt, decode, request)
        harm, strain = harm + late, (1.0 + SPARE_MARGIN) * (strain + strained)
    is_local, is_away, num_placed = worker.role is not Role.MIXED, request.is_away(worker), 2 * worker.num_placed
    return harm, strain, delay, is_prefill, is_local, is_away, num_placed, (prompt.name,), prompt.ttft + decode.room


def _later_prompts(prompt: _Prompt, decode: _Decode, request: _Request) -> tuple[float, float]:
    """Return the harm and the strain that an output on a prefill worker adds to the prompts there."""
    worker, share = decode.worker, request.prompt_share(decode.worker)
    alone = worker.prompt_seconds or prompt.ttft  # where none came yet, of a prompt like this one
    if not (share and alone):
        return 0.0, 0.0
    later = later_prompts(
        worker, alone, share, request.output_tokens, (decode.before, decode.after), objective=request.gap
    )
    return later.harm(request.ttft), later.strain(request.ttft) if request.strains else math.inf
