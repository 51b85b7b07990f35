"""The policy ``cost``: the route with the smallest predicted harm to the latency of all requests that it concerns.

Harm is measured in seconds beyond the objectives: the request's TTFT and each of its later gaps, and the same of the
requests that its route delays. Where nothing exceeds an objective, the smallest predicted TTFT decides. Without
objectives every second counts.

A prompt's own computing keeps later prompts waiting, those that a cached prefix saves doesn't. By Pollaczek and
Khinchine, the wait of a queue with utilisation u is the mean residual work times u / (1 - u): a second of computing
counts u / (1 - u) / 2 seconds more than one in the queue. So the busier a worker is, the farther a prompt goes to spare
it; of idle workers without a prefix, the one with the lowest utilisation takes the prompt. The utilisation is the
worker's own: with the pool's mean, prompts would queue at the fast workers of a pool while the slow ones have time.

A conversation is known by the deepest match of its prompt with what was sent to a worker. Where nothing matches (its
first turn; this router is new; another one had the turns before), a session that the client names stands in for the
match: the conversation's own worker may have its KV, and counts for a share of the computing that it would save.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from splitserve.protocol.placement.step_model import StepWork, pairs
from splitserve.protocol.request import Party, Role
from splitserve.router.placement.policies import (
    DEFAULT_CHUNK_TOKENS,
    NO_STEP_MODEL,
    READ_SECONDS,
    USUAL_LINK_RATE,
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
    prefill_seconds,
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


@dataclass(frozen=True, slots=True, order=True)
class Prediction:
    """Prediction for one route: compared by harm, then by delay; among equals prefill workers are kept for prompts,
    decode workers for outputs, and requests spread evenly."""

    harm_seconds: float
    delay_seconds: float  # the request's TTFT, and that which its computing adds to those of later ones
    decodes_on_prefill: bool
    is_local: bool
    is_away: bool  # the session decodes on another worker than its own
    num_placed: int
    names: tuple[str, ...]
    ttft_seconds: float = field(compare=False)


@dataclass(frozen=True, slots=True)
class _Request:
    """The request's sizes, the objectives, and the workers' utilisation."""

    num_tokens: int  # to be in KV
    output_tokens: float  # expected
    ttft: float
    gap: float
    own_workers: frozenset[Party]  # of its session, one per role; none if a prefix tells more

    def late(self, seconds: float) -> float:
        return max(0.0, seconds - self.ttft)

    def slow(self, seconds: float) -> float:
        return max(0.0, seconds - self.gap)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The prompt on one worker: tokens that it has, and seconds."""

    worker: WorkerView
    matched: int
    own: float  # computing
    ttft: float  # queue, read of a prefix, and computing
    delay: float  # the same, and the later prompts' waits for it
    read: PrefixRead | None = None


@dataclass(frozen=True, slots=True)
class _Decode:
    """The output on one worker: seconds of wait for room, and harm."""

    worker: WorkerView
    room: float
    harm: float


_JudgedT = TypeVar("_JudgedT", _Prompt, _Decode)


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
        ttft=snapshot.objectives.ttft_seconds,
        gap=snapshot.objectives.tpot_seconds,
        own_workers=_own_workers(fitting, shape),
    )
    best = min(_routes(snapshot, fitting, request, shape), key=lambda route: route[0], default=None)
    return NoWorker(why_not(snapshot, fitting, shape)) if best is None else best[1]


def _own_workers(workers: Iterable[WorkerView], shape: RequestShape) -> frozenset[Party]:
    workers = list(workers)
    if not shape.session or any(worker.prefix_match_tokens for worker in workers):
        return frozenset()
    of_roles = (of_role(workers, role) for role in Role)
    first = (min(each, key=lambda worker: session_rank(shape.session, worker), default=None) for each in of_roles)
    return frozenset(worker.party for worker in first if worker is not None)


def _burden(worker: WorkerView) -> float:
    """Return the seconds that a second of computing adds to the waits of the worker's later prompts."""
    utilisation = min(MAX_UTILISATION, worker.prefill_busy)
    return RESIDUAL * utilisation / (1.0 - utilisation)


def _routes(
    snapshot: Snapshot, workers: Sequence[WorkerView], request: _Request, shape: RequestShape
) -> Iterator[tuple[Prediction, Placed]]:
    own = [_prompt(worker, request) for worker in of_role(workers, Role.PREFILL)]
    reads = [prefix_read(snapshot, prompt.worker, shape) for prompt in own]
    prompts = (
        prompt if read is None else _prompt(prompt.worker, request, read)
        for prompt, read in zip(own, reads, strict=True)
    )
    outputs = (_decode(worker, request) for worker in of_role(workers, Role.DECODE))
    prefills = _best(prompts, lambda prompt: prompt.delay)
    decodes = _best(outputs, lambda decode: decode.harm + decode.room)
    for prefill in prefills:
        for decode in decodes:
            prediction = _predict_pair(prefill, decode, request)
            yield prediction, pair(prefill.worker, decode.worker, WHY, prediction.ttft_seconds, read=prefill.read)
    mixed = [_decode(worker, request) for worker in of_role(workers, Role.MIXED)]
    for decode in (
        *mixed,
        *(decodes if of_role(snapshot.workers, Role.PREFILL) else ()),
    ):  # the router itself lets decode do without prefill
        prediction = _predict_local(_prompt(decode.worker, request), decode, request)
        yield prediction, alone(decode.worker, WHY, prediction.ttft_seconds)
    whole = shape.max_context_tokens
    # A route on one worker reads no prefix: the best are those that have one themselves, and may have a queue for it.
    for prompt in _best(own, lambda each: each.delay) if decodes else ():  # without decode, a cluster waits for one
        if prompt.worker.context_tokens_limit >= whole:
            prediction = _predict_local(prompt, _decode(prompt.worker, request), request)
            yield prediction, alone(prompt.worker, WHY_SPARE, prediction.ttft_seconds)


def _best(judged: Iterable[_JudgedT], seconds: Callable[[_JudgedT], float]) -> list[_JudgedT]:
    ranked = sorted(judged, key=lambda each: (seconds(each), each.worker.num_placed, each.worker.party.engine_id))
    return ranked[:NUM_CANDIDATES]


def _prompt(worker: WorkerView, request: _Request, read: PrefixRead | None = None) -> _Prompt:
    matched = min(worker.prefix_match_tokens, request.num_tokens - 1) if read is None else read.num_tokens
    own = prefill_seconds(worker, matched, request.num_tokens) if read is None else read.own_seconds
    ttft = worker.queue_seconds + own + (0.0 if read is None else read.read_seconds)
    is_own = worker.party in request.own_workers and worker.role is not Role.DECODE  # a guess makes no route local
    guessed = SESSION_TRUST * own if is_own else 0.0
    return _Prompt(worker, matched, own, ttft, ttft + _burden(worker) * own - guessed, read)


def _decode(worker: WorkerView, request: _Request) -> _Decode:
    return _Decode(worker, _room_seconds(worker, request), _decode_harm(worker, request))


def _predict_pair(prefill: _Prompt, decode: _Decode, request: _Request) -> Prediction:
    last_tokens = min(request.num_tokens - prefill.matched, LAST_CHUNK_TOKENS)
    rate = decode.worker.link_rates.get(prefill.worker.party.engine_id) or USUAL_LINK_RATE
    handover = READ_SECONDS + last_tokens * decode.worker.token_bytes / rate
    delay = prefill.delay + decode.room
    harm = request.late(delay) + request.slow(handover) + decode.harm
    num_placed = prefill.worker.num_placed + decode.worker.num_placed
    names = (prefill.worker.party.engine_id, decode.worker.party.engine_id)
    is_away = bool(request.own_workers) and decode.worker.party not in request.own_workers
    return Prediction(harm, delay, False, False, is_away, num_placed, names, prefill.ttft + decode.room)


def _predict_local(prompt: _Prompt, decode: _Decode, request: _Request) -> Prediction:
    """Predict both phases on one worker, whose running requests see a gap for each chunk of the prompt."""
    worker, matched = prompt.worker, prompt.matched
    model, num_missed = worker.step_model, request.num_tokens - matched
    limit = worker.chunk_tokens or DEFAULT_CHUNK_TOKENS
    if worker.num_decoding or worker.role is Role.PREFILL:
        limit = worker.shared_chunk_tokens or limit
    chunk = min(limit, num_missed)
    num_chunks = -(-num_missed // chunk)
    alone_seconds = model.decode_seconds(worker.num_decoding, worker.context_tokens) if worker.num_decoding else 0.0
    gap = model.seconds(StepWork(worker.num_decoding, worker.context_tokens, chunk, pairs(matched, chunk)))
    others = num_chunks * worker.num_decoding * (request.slow(gap) - request.slow(alone_seconds))
    # More and smaller steps than alone, each with the decoding sequences in it.
    num_alone = -(-num_missed // (worker.chunk_tokens or DEFAULT_CHUNK_TOKENS))
    shared = num_chunks * alone_seconds + max(0, num_chunks - num_alone) * model.base
    delay = prompt.delay + shared + decode.room
    # Later prompts there interrupt this request, and its steps delay them.
    step = model.decode_seconds(worker.num_decoding + 1, worker.context_tokens + request.num_tokens)
    prompts = worker.prefill_busy * request.output_tokens
    interrupted = max(0.0, prompts * (request.slow(gap) - request.slow(step)))
    delayed = prompts * step if worker.role is Role.PREFILL else 0.0
    harm = request.late(delay) + others + interrupted + delayed + decode.harm
    is_prefill = worker.role is Role.PREFILL
    ttft = prompt.ttft + shared + decode.room
    is_away = bool(request.own_workers) and worker.party not in request.own_workers
    is_local, names = worker.role is not Role.MIXED, (worker.party.engine_id,)
    return Prediction(harm, delay, is_prefill, is_local, is_away, 2 * worker.num_placed, names, ttft)


def _decode_harm(worker: WorkerView, request: _Request) -> float:
    """Return the harm of decoding there: the request's own gaps, and what it adds to those of the others."""
    model, half = worker.step_model, request.output_tokens / 2
    before = model.decode_seconds(worker.num_decoding, worker.context_tokens) if worker.num_decoding else 0.0
    after = model.decode_seconds(worker.num_decoding + 1, worker.context_tokens + request.num_tokens + int(half))
    others = worker.num_decoding * half * (request.slow(after) - request.slow(before))
    return request.output_tokens * request.slow(after) + others


def _room_seconds(worker: WorkerView, request: _Request) -> float:
    """Return the predicted wait for room in the batch, and for KV memory: what is lacking, by what requests free."""
    lacking_slots = max(0, worker.num_requests + 1 - worker.max_num_seqs) / worker.max_num_seqs
    wanted = worker.context_tokens + request.num_tokens + request.output_tokens
    lacking_tokens = max(0.0, wanted - worker.kv_capacity_tokens) / max(1, worker.kv_capacity_tokens)
    lacking = max(lacking_slots, lacking_tokens)
    if not lacking:
        return 0.0
    step = worker.step_model.decode_seconds(worker.num_decoding, worker.context_tokens)
    return lacking * request.output_tokens * max(step, 1e-3)
