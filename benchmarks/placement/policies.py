"""Policies to compare with: unweighted predicted milliseconds; fixed thresholds, always and never disaggregated."""

import math

from splitserve.protocol.request import Role
from splitserve.router.placement.policies import (
    Placement,
    Policy,
    RequestShape,
    Snapshot,
    WorkerView,
    alone,
    decode_load,
    of_role,
    pair,
    prefix_read,
)

ALWAYS, NEVER = 0, math.inf
"""Thresholds."""


def unweighted(snapshot: Snapshot, shape: RequestShape) -> Placement:
    """Place prefill where queue and missed part together take the least time, decode by load."""
    prefill = min(of_role(snapshot.workers, Role.PREFILL), key=lambda worker: _delay(worker, shape))
    decode = min(of_role(snapshot.workers, Role.DECODE), key=decode_load)
    return pair(prefill, decode, "unweighted", read=prefix_read(snapshot, prefill, shape))


def fixed_threshold(tokens: float) -> Policy:
    """Return the policy that disaggregates prompts of which the decode worker lacks more than ``tokens``.

    Both workers are chosen as well as without a threshold: decode by its load and what it has of the prompt.
    """

    def policy(snapshot: Snapshot, shape: RequestShape) -> Placement:
        decode = min(of_role(snapshot.workers, Role.DECODE), key=decode_load)
        if shape.num_prompt_tokens - decode.prefix_match_tokens <= tokens:
            return alone(decode, "below the threshold")
        prefill = min(of_role(snapshot.workers, Role.PREFILL), key=lambda worker: _delay(worker, shape))
        return pair(prefill, decode, "above the threshold", read=prefix_read(snapshot, prefill, shape))

    return policy


def _delay(worker: WorkerView, shape: RequestShape) -> tuple[float, int, str]:
    matched = min(worker.prefix_match_tokens, shape.num_prompt_tokens - 1)
    chunk = worker.chunk_tokens or shape.num_prompt_tokens
    own = worker.step_model.prefill_seconds(matched, shape.num_prompt_tokens - matched, chunk)
    return worker.queue_seconds + own, worker.num_placed, worker.party.engine_id
