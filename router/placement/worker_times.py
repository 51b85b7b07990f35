"""Predictions for one worker: prompts beside outputs, what one more output does to them, waits for room. Pure.

A step that decodes has fewer prompt tokens than one that doesn't, and the outputs in it. So a prompt takes more steps
beside outputs, and each of them is longer.
"""

import math
from typing import NamedTuple

from splitserve.protocol.placement.chunk_bounds import sized_tokens
from splitserve.protocol.request import Role
from splitserve.router.placement.policies import DEFAULT_CHUNK_TOKENS, WorkerView
from splitserve.router.placement.strain import strain_of

LEAST_STEP_SECONDS = 1e-3
MAX_UTILISATION = 0.9
RESIDUAL = 0.5
"""Share of a prompt's computing that is left, on average, when another one arrives meanwhile."""
TAIL = 3.0
"""The waits of slow prompts, over the mean wait. By exponential waits, at most one prompt in twenty waits longer."""


def burden(utilisation: float) -> float:
    """Return what a second of computing adds to the waits of later prompts, in seconds."""
    held = utilisation if utilisation < MAX_UTILISATION else MAX_UTILISATION
    return RESIDUAL * held / (1.0 - held)


def step_beside(worker: WorkerView, usual_outputs: float, objective: float) -> float:
    """Return the seconds of a decode step of the outputs beside which a prompt is computed, half of each being out; 0.0
    for none. With an objective for gaps those count that begin to decode soon."""
    running = worker.num_decoding
    if not running:
        begin_soon = objective and worker.num_requests and worker.role is not Role.PREFILL
        return worker.step_model.base if begin_soon else 0.0
    return worker.step_model.decode_seconds(running, worker.decoding_tokens + int(running * usual_outputs / 2))


def shared_chunk(worker: WorkerView, objective: float, step: float, start: int) -> int:
    """Return the prompt tokens from ``start`` on that are computed beside outputs whose steps take ``step`` seconds.
    ``objective``: that of their gaps; 0.0: none."""
    fixed, model = worker.shared_chunk_tokens or worker.chunk_tokens or DEFAULT_CHUNK_TOKENS, worker.step_model
    if not objective or not model.per_token:
        return fixed
    return sized_tokens(model, step, start, objective, (fixed, worker.sized_chunk_tokens or fixed))


def beside(worker: WorkerView, num_tokens: int, alone: float, step: float, objective: float) -> float:
    """Return the seconds of ``num_tokens`` prompt tokens beside outputs whose steps take ``step`` seconds. ``alone``:
    those of the same tokens where nothing decodes."""
    num_steps = -(-num_tokens // shared_chunk(worker, objective, step, num_tokens // 2))  # on average
    num_alone = -(-num_tokens // (worker.chunk_tokens or DEFAULT_CHUNK_TOKENS))
    model = worker.step_model
    saved = num_tokens * (model.per_token - model.per_token_beside)
    return alone - saved + num_steps * step - num_alone * model.base


def stretch(worker: WorkerView, alone: float, step: float, objective: float) -> float:
    """Return how many times as long a prompt takes beside outputs that takes ``alone`` seconds where nothing decodes.

    Its length is inferred from its time, as if its attention took none.
    """
    model = worker.step_model
    if not (alone and step and model.per_token):
        return 1.0
    return beside(worker, max(1, int((alone - model.base) / model.per_token)), alone, step, objective) / alone


def chunk_seconds(worker: WorkerView, num_tokens: int, step: float, objective: float) -> float:
    """Return what the last chunk of a prompt of ``num_tokens`` adds to a step of ``step`` seconds: the longest if their
    number is fixed."""
    model = worker.step_model
    chunk = min(shared_chunk(worker, objective, step, num_tokens), num_tokens)
    return model.chunk_seconds(num_tokens - chunk, chunk)


def usual_prompt_tokens(worker: WorkerView) -> int:
    """Return the length of a worker's usual prompt, inferred from its time alone on it; 0 if none came yet."""
    model, seconds = worker.step_model, worker.prompt_seconds - worker.step_model.base
    if seconds <= 0.0 or not model.per_token:
        return 0
    linear, quadratic = model.per_token, model.per_pair / 2
    return int(2 * seconds / (linear + math.sqrt(linear * linear + 4 * quadratic * seconds)))


def interruptions(worker: WorkerView, share: float) -> float:
    """Return the harm to a request's gaps, per output token, by the prompts that its worker computes meanwhile, for
    ``share`` of the time.

    For a second of decode steps they take u / (1 - u) seconds, for a share of u. Each makes a gap of one chunk, which
    counts by its ratio to a step.
    """
    model = worker.step_model
    chunk = model.base + model.per_token_beside * shared_chunk(worker, 0.0, 0.0, 0)
    return share / (1.0 - share) * min(chunk, worker.prompt_seconds or chunk)


class Prompts(NamedTuple):
    """Prompts on a worker: their mean seconds without waits, and how long they wait for each other on average."""

    seconds: float
    wait: float

    @property
    def slow_seconds(self) -> float:
        """Seconds of the slow ones, their wait included."""
        return self.seconds + TAIL * self.wait

    def late(self, objective: float) -> float:
        """Return the mean seconds beyond the objective for TTFT, 0.0 for none; waits are taken to be exponential. Where
        the slow prompts keep the objective, nothing counts: that all others do is what strain is for."""
        left = objective - self.seconds
        if left <= 0.0:
            return self.wait - left
        return self.wait * math.exp(-left / self.wait) if self.slow_seconds > objective else 0.0


class LaterPrompts(NamedTuple):
    """Prompts that a worker computes while an output is drawn there, without that and with it."""

    number: float
    before: Prompts
    after: Prompts

    def harm(self, objective: float) -> float:
        """Return the seconds that the output adds to what exceeds the objective for TTFT, of all prompts."""
        return self.number * (self.after.late(objective) - self.before.late(objective))

    def strain(self, objective: float) -> float:
        """Return what it adds to the strain of all prompts, by the slow ones; infinite where these are late."""
        if self.after.slow_seconds >= objective:
            return math.inf
        return self.number * (
            strain_of(self.after.slow_seconds, objective) - strain_of(self.before.slow_seconds, objective)
        )


def later_prompts(
    worker: WorkerView, alone: float, share: float, num_outputs: float, steps: tuple[float, float], *, objective: float
) -> LaterPrompts:
    """Predict the prompts that a worker computes beside an output of ``num_outputs`` tokens.

    ``alone``: seconds of a usual prompt where nothing decodes; ``share``: that of the time which prompts would take
    then; ``steps``: seconds of a decode step without the output, 0.0 for none, and with it; ``objective``: for gaps.

    The prompts take longer, so they fill more of the worker's time. Where they would fill more than all of it, a queue
    grows until the output has ended. With an objective they wait for each other as long as in a queue of that
    utilisation; without one that would keep outputs waiting for a full decode worker.
    """
    model, running, (before, after) = worker.step_model, worker.num_decoding, steps
    longer, long = stretch(worker, alone, after, objective), 1.0
    if running:  # of k outputs that began at any time the last one ends after k / (k + 1) of the usual time
        long += (stretch(worker, alone, before, objective) - 1.0) * running / (running + 1)
    mixed_step = after + model.per_token_beside * shared_chunk(worker, objective, after, 0)
    seconds = num_outputs * min(after / (1.0 - share), mixed_step)
    queue = max(0.0, share * longer - max(1.0, share * long)) * seconds / 2  # on average over that time
    busy, busier = (share * long, share * longer) if objective else (0.0, 0.0)
    now = Prompts(RESIDUAL * before + alone * long, alone * long * _waits(worker, busy))
    then = Prompts(RESIDUAL * after + alone * longer + queue, alone * longer * _waits(worker, busier))
    return LaterPrompts(max(1.0, seconds * share / alone), now, then)


def _waits(worker: WorkerView, share: float) -> float:
    """Return a prompt's mean wait for those before it, over its own time. These take ``share`` of the time, or as much
    as of late if that is more."""
    return burden(max(worker.prefill_busy, share))


def room_seconds(worker: WorkerView, wanted_tokens: float, num_outputs: float, step: float) -> float:
    """Return the predicted wait for room in the batch, and for KV memory: what is lacking, by what requests free."""
    lacking_slots = max(0, worker.num_requests + 1 - worker.max_num_seqs) / worker.max_num_seqs
    lacking_tokens = max(0.0, wanted_tokens - worker.kv_capacity_tokens) / max(1, worker.kv_capacity_tokens)
    return max(lacking_slots, lacking_tokens) * num_outputs * max(step, LEAST_STEP_SECONDS)
