"""The policy ``cost``: the route with the smallest predicted harm to the latency of all requests that it concerns.

Harm is measured in seconds beyond the objectives: the request's TTFT and each of its later gaps, and the same of the
requests that its route delays. Where nothing exceeds an objective, the smallest predicted TTFT decides. Without
objectives every second counts.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from splitserve.protocol.placement.step_model import StepWork, pairs
from splitserve.protocol.request import Role
from splitserve.router.placement.policies import (
    NoWorker,
    Placed,
    Placement,
    RequestShape,
    Snapshot,
    WorkerView,
    alone,
    fits,
    of_role,
    pair,
    why_not,
)

NUM_CANDIDATES = 4
"""Prefill and decode workers, the best of each, of which all pairs are compared."""
HANDOVER_SECONDS = 0.003
"""Time of a hand-over beside its bytes."""
LAST_CHUNK_TOKENS = 1024
"""Tokens whose KV is still to be read when the first token is out; earlier chunks travel during prefill."""
USUAL_LINK_RATE = 1e9
DEFAULT_CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True, order=True)
class Prediction:
    """Prediction for one route: compared by harm, then by TTFT; among equals prefill workers are kept for prompts,
    and requests spread evenly."""

    harm_seconds: float
    ttft_seconds: float
    decodes_on_prefill: bool
    num_placed: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Request:
    """The request's sizes and the objectives. ``num_tokens`` are to be in KV, ``output_tokens`` are expected."""

    num_tokens: int
    output_tokens: float
    ttft: float
    gap: float

    def late(self, seconds: float) -> float:
        return max(0.0, seconds - self.ttft)

    def slow(self, seconds: float) -> float:
        return max(0.0, seconds - self.gap)


def cost(snapshot: Snapshot, shape: RequestShape) -> Placement:
    """Place a request on the route with the smallest predicted harm; local on any worker, or disaggregated."""
    fitting = [worker for worker in snapshot.workers if fits(worker, shape)]
    request = _Request(
        num_tokens=shape.num_prompt_tokens + shape.num_output_tokens,
        output_tokens=max(1.0, min(shape.max_tokens, snapshot.output_tokens)),
        ttft=snapshot.objectives.ttft_seconds,
        gap=snapshot.objectives.tpot_seconds,
    )
    best = min(_routes(fitting, request, shape), key=lambda route: route[0], default=None)
    return NoWorker(why_not(snapshot, fitting, shape)) if best is None else best[1]


def _routes(
    workers: Iterable[WorkerView], request: _Request, shape: RequestShape
) -> Iterator[tuple[Prediction, Placed]]:
    workers = list(workers)
    prefills = _best(of_role(workers, Role.PREFILL), request, _prompt_seconds)
    decodes = _best(of_role(workers, Role.DECODE), request, _decode_harm)
    for prefill in prefills:
        for decode in decodes:
            yield _predict_pair(prefill, decode, request), pair(prefill, decode, "predicted latency")
    for worker in (*of_role(workers, Role.MIXED), *decodes):
        yield _predict_local(worker, request), alone(worker, "predicted latency")
    whole = shape.max_context_tokens
    for worker in prefills:
        if decodes and worker.context_tokens_limit >= whole:  # without a decode worker, a cluster waits for one
            yield _predict_local(worker, request), alone(worker, "spare time of a prefill worker")


def _prompt_seconds(worker: WorkerView, request: _Request) -> float:
    """Return the seconds until the worker has computed the prompt, after those that wait there."""
    matched = min(worker.prefix_match_tokens, request.num_tokens - 1)
    chunk = worker.chunk_tokens or DEFAULT_CHUNK_TOKENS
    own = worker.step_model.prefill_seconds(matched, request.num_tokens - matched, chunk)
    return worker.queue_seconds + own


def _best(
    workers: list[WorkerView], request: _Request, seconds: Callable[[WorkerView, _Request], float]
) -> list[WorkerView]:
    ranked = sorted(workers, key=lambda worker: (seconds(worker, request), worker.num_placed, worker.party.engine_id))
    return ranked[:NUM_CANDIDATES]


def _predict_pair(prefill: WorkerView, decode: WorkerView, request: _Request) -> Prediction:
    matched = min(prefill.prefix_match_tokens, request.num_tokens - 1)
    last_tokens = min(request.num_tokens - matched, LAST_CHUNK_TOKENS)
    rate = decode.link_rates.get(prefill.party.engine_id) or USUAL_LINK_RATE
    handover = HANDOVER_SECONDS + last_tokens * decode.token_bytes / rate
    ttft = _prompt_seconds(prefill, request) + _room_seconds(decode, request)
    harm = request.late(ttft) + request.slow(handover) + _decode_harm(decode, request)
    names = (prefill.party.engine_id, decode.party.engine_id)
    return Prediction(harm, ttft, False, prefill.num_placed + decode.num_placed, names)


def _predict_local(worker: WorkerView, request: _Request) -> Prediction:
    """Predict both phases on one worker, whose running requests see a gap for each chunk of the prompt."""
    model, matched = worker.step_model, min(worker.prefix_match_tokens, request.num_tokens - 1)
    chunk = min(worker.chunk_tokens or DEFAULT_CHUNK_TOKENS, request.num_tokens - matched)
    num_chunks = -(-(request.num_tokens - matched) // chunk)
    alone_seconds = model.decode_seconds(worker.num_decoding, worker.context_tokens) if worker.num_decoding else 0.0
    work = StepWork(worker.num_decoding, worker.context_tokens, chunk, pairs(matched, chunk))
    gap = model.seconds(work)
    others = num_chunks * worker.num_decoding * (request.slow(gap) - request.slow(alone_seconds))
    ttft = _prompt_seconds(worker, request) + num_chunks * alone_seconds + _room_seconds(worker, request)
    # Later prompts there interrupt this request, and its steps delay them.
    step = model.decode_seconds(worker.num_decoding + 1, worker.context_tokens + request.num_tokens)
    prompts = worker.prefill_busy * request.output_tokens
    interrupted = prompts * (request.slow(gap) - request.slow(step)) if prompts else 0.0
    delayed = prompts * step if worker.role is Role.PREFILL else 0.0
    harm = request.late(ttft) + others + max(0.0, interrupted) + delayed + _decode_harm(worker, request)
    is_prefill = worker.role is Role.PREFILL
    return Prediction(harm, ttft, is_prefill, 2 * worker.num_placed, (worker.party.engine_id,))


def _decode_harm(worker: WorkerView, request: _Request) -> float:
    """Return the harm of decoding there: the request's own gaps, and what it adds to those of the others."""
    model, half = worker.step_model, request.output_tokens / 2
    before = model.decode_seconds(worker.num_decoding, worker.context_tokens) if worker.num_decoding else 0.0
    after = model.decode_seconds(worker.num_decoding + 1, worker.context_tokens + request.num_tokens + int(half))
    others = worker.num_decoding * half * (request.slow(after) - request.slow(before))
    return request.output_tokens * request.slow(after) + others


def _room_seconds(worker: WorkerView, request: _Request) -> float:
    """Return the predicted wait for a place in the batch, and for KV memory: what is lacking, by what requests free."""
    lacking_slots = max(0, worker.num_requests + 1 - worker.max_num_seqs) / worker.max_num_seqs
    wanted = worker.context_tokens + request.num_tokens + request.output_tokens
    lacking_tokens = max(0.0, wanted - worker.kv_capacity_tokens) / max(1, worker.kv_capacity_tokens)
    lacking = max(lacking_slots, lacking_tokens)
    if not lacking:
        return 0.0
    step = worker.step_model.decode_seconds(worker.num_decoding, worker.context_tokens)
    return lacking * request.output_tokens * max(step, 1e-3)
