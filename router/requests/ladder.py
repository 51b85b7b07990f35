"""The failure ladder: the next attempt of a request after a failed one. Pure, like placement.

    1. another hand-over, without the workers that failed this request; decode stays on its worker if possible, since
       that worker holds the blocks that are verified already, and the prefix that it need not read
    2. prefill on a decode (or mixed) worker itself
    3. an error

The same function runs in the router and in the fault simulator.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from splitserve.protocol.request import Party, Role
from splitserve.router.placement.policies import (
    Disaggregated,
    Local,
    NoWorker,
    Placed,
    Policy,
    RequestShape,
    Snapshot,
    WorkerView,
    alone,
    decode_load,
    fits,
    prefill_load,
)
from splitserve.router.requests.state import FailedAttempt, FailureReason

MAX_HANDOVERS = 4
MAX_ATTEMPTS = 8
FIRST_BACKOFF_SECONDS = 0.05
MAX_BACKOFF_SECONDS = 1.0


class Rung(StrEnum):
    HANDOVER = "handover"
    LOCAL = "local"
    GAVE_UP = "gave_up"


@dataclass(frozen=True, slots=True)
class Step:
    """The next attempt and its rung."""

    rung: Rung
    placement: Placed | NoWorker  # NoWorker: no worker can continue *now*


def next_step(snapshot: Snapshot, shape: RequestShape, policy: Policy, history: Sequence[FailedAttempt]) -> Step:
    """Return the next step of a request whose attempts so far, at least one, all failed."""
    failures = history[-1].failure.message
    if len(history) >= MAX_ATTEMPTS:
        return Step(Rung.GAVE_UP, NoWorker(f"{len(history)} attempts failed; the last: {failures}"))
    # A worker that was lost and is back was frozen or cut off: it may serve the request again.
    culprits = {attempt.culprit for attempt in history if attempt.failure.reason is not FailureReason.WORKER_LOST}
    helpers = [worker for worker in snapshot.workers if worker.party not in culprits]
    previous = _previous_decode(history, helpers)
    source = (
        None if snapshot.prefix_source is None or snapshot.prefix_source.party in culprits else snapshot.prefix_source
    )
    num_handovers = sum(isinstance(attempt.placement, Disaggregated) for attempt in history)
    if num_handovers < MAX_HANDOVERS and not shape.is_prompt_only:
        others = [worker for worker in helpers if worker.role is not Role.DECODE or worker.party == previous]
        for candidates in (others, helpers):
            placement = policy(replace(snapshot, workers=tuple(candidates), prefix_source=source), shape)
            if isinstance(placement, Disaggregated):
                return Step(Rung.HANDOVER, placement)
    local = local_placement(helpers, shape, previous)
    if local is not None:
        return Step(Rung.LOCAL, local)
    return Step(Rung.GAVE_UP, NoWorker(f"no worker is left that could go on; the last attempt: {failures}"))


def local_placement(workers: Sequence[WorkerView], shape: RequestShape, preferred: Party | None = None) -> Local | None:
    """Place both phases on one decode or mixed worker, the ``preferred`` one if it can; None if none of them can.

    A request without anything to decode rather goes to a worker that isn't for decoding alone.
    """
    if shape.is_prompt_only:
        fitting = [worker for worker in workers if fits(worker, shape)]
        chosen = min(fitting, key=lambda worker: (worker.role is Role.DECODE, *prefill_load(worker)), default=None)
        return None if chosen is None else alone(chosen, "prompt only")
    able = [worker for worker in workers if worker.role is not Role.PREFILL and fits(worker, shape)]
    best = min(able, key=lambda worker: (worker.party != preferred, *decode_load(worker)), default=None)
    return None if best is None else alone(best, "no pair")


def may_wait(snapshot: Snapshot, history: Sequence[FailedAttempt]) -> bool:
    """Return whether waiting may help a request that no worker can continue now: a lost worker may come back or be
    replaced. Workers that are present and failed this request won't succeed later."""
    was_lost = history[-1].failure.reason is FailureReason.WORKER_LOST
    is_alone = all(worker.role is Role.PREFILL for worker in snapshot.workers)
    return len(history) < MAX_ATTEMPTS and (was_lost or is_alone)


def backoff_seconds(num_tries: int, chosen: random.Random) -> float:
    """Return the time to wait for workers before try ``num_tries`` (from 0), in seconds; it doubles, with jitter."""
    return chosen.uniform(0.5, 1.0) * min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(num_tries, 10))


def _previous_decode(history: Sequence[FailedAttempt], helpers: Sequence[WorkerView]) -> Party | None:
    """Return the last attempt's decode worker if it is among ``helpers``, the workers that didn't fail the request."""
    placement = history[-1].placement
    party = placement.decode if isinstance(placement, Disaggregated) else placement.worker
    return party if any(worker.party == party for worker in helpers) else None
