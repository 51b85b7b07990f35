"""The policy ``cost``: the route with the smallest predicted harm to the latency of all requests that it concerns.

Harm is measured in seconds beyond the objectives: the request's TTFT, from its arrival on, and each of its later gaps,
and the same of the requests that its route delays. Without objectives every second counts.

Routes without harm are compared by strain. A time t strains an objective T by t / (T - t): hardly while it is far below
T, without bound where nothing of T is left. (A queue with utilisation t / T has so many requests on average.) A route's
strain is that of the request's TTFT and of its mean gap, and what the route adds to that of the others there. So a
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

from splitserve.protocol.placement.step_model import pairs
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
    alone,
    fitting_workers,
    least_loaded,
    of_role,
    pair,
    prefix_read,
    session_rank,
    why_not,
)

NUM_CANDIDATES = 4
"""Prefill and decode workers, the best of each, of which all pairs are compared."""
LAST_CHUNK_TOKENS = 1024
"""Tokens whose KV is still to be read when the first token is out; earlier chunks travel during prefill."""
MAX_UTILISATION = 0.9
WHY = "predicted latency"
WHY_SPARE = "spare time of a prefill worker"
SESSION_TRUST = 0.25
"""Share of a prompt's computing that its session's own worker is taken to save where no worker is known to have a
prefix: little, since a worker with a shorter queue is better than a wrong guess."""
RESIDUAL = 0.5
"""Share of a prompt's computing that is left, on average, when another one arrives meanwhile."""


class Prediction(NamedTuple):
    """Prediction for one route: compared by harm, by strain, then by delay; among equals prefill workers are kept for
    prompts, decode workers for outputs, and requests spread evenly."""

    harm_seconds: float
    strain: float  # infinite where an objective is lacking or used up
    delay_seconds: float  # the request's TTFT, and that which its computing adds to those of later ones
    decodes_on_prefill: bool
    is_local: bool
    is_away: bool  # the session decodes on another worker than its own
    num_placed: int
    names: tuple[str, ...]  # no two routes have the same
    ttft_seconds: float


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

    def late(self, seconds: float) -> float:
        return max(0.0, seconds - self.ttft)

    def slow(self, seconds: float) -> float:
        return seconds - self.gap if seconds > self.gap else 0.0


def _strain(seconds: float, objective: float) -> float:
    """Return the strain of a time that has an objective; infinite without one, or where nothing of it is left."""
    return seconds / (objective - seconds) if seconds < objective else math.inf


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


_PromptFields: TypeAlias = tuple[float, int, str, WorkerView, int, float, PrefixRead | None]
_DecodeFields: TypeAlias = tuple[float, float, int, str, WorkerView, float, float, float, float]


class _Route(NamedTuple):
    """A route that may be the best one; ``decode`` is None where the prompt's worker does both phases."""

    prediction: Prediction
    why: str
    prefill: _Prompt
    decode: _Decode | None

    def placed(self) -> Placed:
        ttft_seconds = self.prediction.ttft_seconds
        if self.decode is None:
            return alone(self.prefill.worker, self.why, ttft_seconds)
        return pair(self.prefill.worker, self.decode.worker, self.why, ttft_seconds, read=self.prefill.read)


def cost(snapshot: Snapshot, shape: RequestShape) -> Placement:
    """Place a request on the route with the smallest predicted harm; local on any worker, or disaggregated.

    While no worker has told a model of its steps, the least loaded ones take it.
    """
    if all(worker.step_model == NO_STEP_MODEL for worker in snapshot.workers):
        return least_loaded(snapshot, shape)
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
    )
    best = min(_routes(snapshot, fitting, request, shape), default=None)  # by the prediction
    return NoWorker(why_not(snapshot, fitting, shape)) if best is None else best.placed()


def _own_workers(workers: Iterable[WorkerView], shape: RequestShape) -> frozenset[Party]:
    workers = list(workers)
    if not shape.session or any(worker.prefix_match_tokens for worker in workers):
        return frozenset()
    of_roles = (of_role(workers, role) for role in Role)
    first = (min(each, key=lambda worker: session_rank(shape.session, worker), default=None) for each in of_roles)
    return frozenset(worker.party for worker in first if worker is not None)


def _routes(
    snapshot: Snapshot, workers: Sequence[WorkerView], request: _Request, shape: RequestShape
) -> Iterator[_Route]:
    own = [_prompt(worker, request) for worker in of_role(workers, Role.PREFILL)]
    with_reads = own if snapshot.prefix_source is None else _with_reads(snapshot, own, request, shape)
    prefills = [_Prompt._make(each) for each in sorted(with_reads)[:NUM_CANDIDATES]]
    ranked = sorted([_decode(worker, request) for worker in of_role(workers, Role.DECODE)])
    decodes = [_Decode._make(each) for each in ranked[:NUM_CANDIDATES]]
    for prefill in prefills:
        for decode in decodes:
            yield _Route(_predict_pair(prefill, decode, request), WHY, prefill, decode)
    alone_on = [_Decode._make(_decode(worker, request)) for worker in of_role(workers, Role.MIXED)]
    if any(worker.role is Role.PREFILL for worker in snapshot.workers):
        alone_on += decodes  # else the router itself lets decode do without prefill
    for decode in alone_on:
        prompt = _Prompt._make(_prompt(decode.worker, request))
        yield _Route(_predict_local(prompt, decode, request), WHY, prompt, None)
    # A route on one worker reads no prefix: the best are those that have one themselves, and may have a queue for it.
    spare = sorted(own)[:NUM_CANDIDATES] if decodes else []  # without decode, a cluster waits for one
    for prompt in map(_Prompt._make, spare):
        if prompt.worker.context_tokens_limit >= shape.max_context_tokens:
            decode = _Decode._make(_decode(prompt.worker, request))
            yield _Route(_predict_local(prompt, decode, request), WHY_SPARE, prompt, None)


def _with_reads(
    snapshot: Snapshot, own: Iterable[_PromptFields], request: _Request, shape: RequestShape
) -> Iterator[_PromptFields]:
    """Yield the prompts, with a read of a prefix on those workers that save time by it."""
    for fields in own:
        worker = fields[3]
        read = prefix_read(snapshot, worker, shape)
        yield fields if read is None else _prompt(worker, request, read)


def _prompt(worker: WorkerView, request: _Request, read: PrefixRead | None = None) -> _PromptFields:
    """Return the fields of a :class:`_Prompt`: named tuples are made of the best ones alone, since to make one takes
    longer than to predict its seconds."""
    if read is None:
        num_tokens, matched = request.num_tokens, worker.prefix_match_tokens
        if matched >= num_tokens:
            matched = num_tokens - 1
        chunk = worker.chunk_tokens or DEFAULT_CHUNK_TOKENS
        own = worker.step_model.prefill_seconds(matched, num_tokens - matched, chunk)
        ttft = worker.queue_seconds + own
    else:
        matched, own = read.num_tokens, read.own_seconds
        ttft = worker.queue_seconds + own + read.read_seconds
    delay = ttft + _burden(worker) * own
    party = worker.party
    if request.own_workers and party in request.own_workers and worker.role is not Role.DECODE:
        delay -= SESSION_TRUST * own  # a guess makes no route local
    return delay, worker.num_placed, party.engine_id, worker, matched, ttft, read


def _burden(worker: WorkerView) -> float:
    """Return what a second of computing on a worker adds to the waits of later prompts, in seconds."""
    utilisation = worker.prefill_busy if worker.prefill_busy < MAX_UTILISATION else MAX_UTILISATION
    return RESIDUAL * utilisation / (1.0 - utilisation)


def _decode(worker: WorkerView, request: _Request) -> _DecodeFields:
    """Return the fields of a :class:`_Decode`. Harm and strain are those of the request's own gaps, and what it adds to
    those of the others."""
    running, model = worker.num_decoding, worker.step_model
    context = worker.context_tokens + int(running * request.usual_outputs / 2)  # half of their outputs is out
    num_tokens, num_outputs, half = request.num_tokens, request.output_tokens, request.output_tokens / 2
    before = model.decode_seconds(running, context) if running else 0.0
    after = model.decode_seconds(running + 1, context + num_tokens + int(half))
    slow = request.slow(after)
    harm = num_outputs * slow
    if running and slow:
        harm += running * half * (slow - request.slow(before))
    room, wanted = 0.0, context + num_tokens + num_outputs
    if worker.num_requests >= worker.max_num_seqs or wanted > worker.kv_capacity_tokens:
        room = _room_seconds(worker, request, wanted, before)
    strain = _gap_strain(worker, request, before, after) if request.strains else math.inf
    return harm + room, strain, worker.num_placed, worker.party.engine_id, worker, room, harm, before, after


def _gap_strain(worker: WorkerView, request: _Request, before: float, after: float, added: float = 0.0) -> float:
    """Return the strain of the request's mean gap on a worker, and that which it adds to the gaps of the others, whose
    steps take ``before`` seconds without it and ``after`` with it. ``added``: to the mean gap of each of the others, by
    the request's prompt."""
    gap, spared = request.gap, 1.0 - min(MAX_UTILISATION, worker.prefill_busy)  # prompts take the rest of the time
    own = _strain(after / spared, gap)
    if not worker.num_decoding or own == math.inf:
        return own
    others = _strain((before + after) / 2 / spared + added, gap) - _strain(before / spared, gap)
    return own + worker.num_decoding * others


def _predict_pair(prefill: _Prompt, decode: _Decode, request: _Request) -> Prediction:
    handover, rate = READ_SECONDS, decode.worker.link_rates.get(prefill.worker.party.engine_id)
    if rate:  # else the first hand-over tells it: one that was taken to be slow would never be tried
        last_tokens = min(request.num_tokens - prefill.matched, LAST_CHUNK_TOKENS)
        handover += last_tokens * decode.worker.token_bytes / rate
    delay = prefill.delay + decode.room
    harm = request.late(request.waited + delay) + request.slow(handover) + decode.harm
    strain = _strain(request.waited + delay, request.ttft) + decode.strain if request.strains else math.inf
    num_placed = prefill.worker.num_placed + decode.worker.num_placed
    names = (prefill.worker.party.engine_id, decode.worker.party.engine_id)
    is_away = bool(request.own_workers) and decode.worker.party not in request.own_workers
    return Prediction(harm, strain, delay, False, False, is_away, num_placed, names, prefill.ttft + decode.room)


def _predict_local(prompt: _Prompt, decode: _Decode, request: _Request) -> Prediction:
    """Predict both phases on one worker, whose running requests see a gap for each chunk of the prompt."""
    worker, matched = prompt.worker, prompt.matched
    model, num_missed = worker.step_model, request.num_tokens - matched
    full = worker.chunk_tokens or DEFAULT_CHUNK_TOKENS
    is_shared = worker.num_decoding or worker.role is Role.PREFILL
    chunk = min(worker.shared_chunk_tokens or full if is_shared else full, num_missed)
    num_chunks = -(-num_missed // chunk)
    before, running = decode.before, worker.num_decoding
    gap = (before or model.base) + model.per_token * chunk + model.per_pair * pairs(matched, chunk)
    others = num_chunks * running * (request.slow(gap) - request.slow(before))
    # More and smaller steps than alone, each with the decoding sequences in it.
    shared = num_chunks * before + max(0, num_chunks + num_missed // -full) * model.base
    delay = prompt.delay + shared + decode.room
    # Later prompts there interrupt this request, and its steps delay them.
    interrupted = worker.prefill_busy * request.output_tokens * (request.slow(gap) - request.slow(decode.after))
    harm = request.late(request.waited + delay) + others + max(0.0, interrupted) + decode.harm
    strain = _strain(request.waited + delay, request.ttft) if request.strains else math.inf
    if strain < math.inf:
        added = (model.prefill_seconds(matched, num_missed, num_missed) - model.base) / request.usual_outputs
        strain += _gap_strain(worker, request, before, decode.after, added)
    is_prefill = worker.role is Role.PREFILL
    if is_prefill:
        late, strained = _later_prompts(decode, request)
        harm, strain = harm + late, strain + strained
    ttft = prompt.ttft + shared + decode.room
    is_away = bool(request.own_workers) and worker.party not in request.own_workers
    is_local, names = worker.role is not Role.MIXED, (worker.party.engine_id,)
    return Prediction(harm, strain, delay, is_prefill, is_local, is_away, 2 * worker.num_placed, names, ttft)


def _later_prompts(decode: _Decode, request: _Request) -> tuple[float, float]:
    """Return the harm and the strain that a request, while it decodes on a prefill worker, adds to the prompts there.

    Their steps are longer, and more where a step that also decodes has fewer prompt tokens.
    """
    worker, burden = decode.worker, 1.0 + _burden(decode.worker)
    num_steps = worker.prompt_share * request.output_tokens  # in which prompts are computed beside the request
    full, base = worker.chunk_tokens or DEFAULT_CHUNK_TOKENS, worker.step_model.base
    more_steps = 1.0 - min(1.0, (worker.shared_chunk_tokens or full) / full)  # share of the steps, at most
    seconds = burden * num_steps * (decode.after - (decode.before or base) + more_steps * base)
    usual, num_prompts = burden * worker.prompt_seconds, 1.0
    if worker.prompt_seconds:
        num_prompts = max(1.0, num_steps * decode.after / worker.prompt_seconds)
    then = usual + seconds / num_prompts
    harm = num_prompts * (request.late(then) - request.late(usual))
    if then >= request.ttft:
        return harm, math.inf
    return harm, num_prompts * (_strain(then, request.ttft) - _strain(usual, request.ttft))


def _room_seconds(worker: WorkerView, request: _Request, wanted_tokens: float, step: float) -> float:
    """Return the predicted wait for room in the batch, and for KV memory: what is lacking, by what requests free."""
    lacking_slots = max(0, worker.num_requests + 1 - worker.max_num_seqs) / worker.max_num_seqs
    lacking_tokens = max(0.0, wanted_tokens - worker.kv_capacity_tokens) / max(1, worker.kv_capacity_tokens)
    return max(lacking_slots, lacking_tokens) * request.output_tokens * max(step, 1e-3)
