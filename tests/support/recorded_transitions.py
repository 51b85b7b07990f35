"""Transitions of production state machines, recorded while the simulator runs them under faults."""

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from enum import Enum
from typing import Any
from unittest import mock

from schedules import SHORT_LEASES, Schedule, random_schedule, run_schedule
from splitserve.decode.peers import Peer, PeerState
from splitserve.engine.sequence import Sequence
from splitserve.engine.stage import Stage
from splitserve.kvconnector.blocks.pool import BlockPool, BlockState
from splitserve.protocol.cluster_report import WorkerState
from splitserve.protocol.handover.sink import SinkHandover, SinkState
from splitserve.protocol.handover.source import SourceHandover, SourceState
from splitserve.router.links.worker_record import WorkerRecord
from splitserve.router.requests.state import RequestPhase, RequestState
from splitserve.simulation.faults import Faults, Shape

Transitions = dict[str, set[tuple[str, str]]]
MACHINES: tuple[type[Enum], ...] = (RequestPhase, SourceState, SinkState, PeerState, WorkerState, BlockState, Stage)
OWNERS = (
    (RequestState, "phase"),
    (SourceHandover, "state"),
    (SinkHandover, "state"),
    (Peer, "state"),
    (WorkerRecord, "state"),
    (Sequence, "stage"),
)
POOL_METHODS = ("allocate", "reference", "release", "quarantine", "lift_quarantine", "publish", "clear_prefix_index")
LATE_COPIES = Faults(copy_late=0.4, copy_seconds=0.4)
TIERED = Shape(prefill=0, decode=0, mixed=2, num_blocks=12, tier_slots=40)
RARE = (68, 133, 95, 148, 27, 79, 101, 0, 2, 5, 9, 17, 31)  # seeds of random schedules with rare transitions
NUM_AT_LEAST = 36
# All checks of the simulator hold in them, too; ``scripts/long-tests schedules`` runs a million of the random ones.
SCHEDULES: ListLike[Schedule] = (
    *(random_schedule(seed) for seed in RARE),
    *(Schedule(seed=seed, faults=LATE_COPIES, shape=TIERED, num_requests=20) for seed in range(10)),
    *(Schedule(seed=seed, faults=Faults(step_error=0.5)) for seed in range(10)),
    *(Schedule(seed=seed, faults=Faults(damage=0.1)) for seed in range(5)),
    *(Schedule(seed=seed, shape=Shape(num_blocks=16), num_requests=24) for seed in range(4)),
    *(Schedule(seed=seed, faults=Faults(partitions=2, read_seconds=1.0), protocol=SHORT_LEASES) for seed in range(20)),
    *(random_schedule(seed) for seed in range(200) if seed not in RARE),
)


def record_transitions(expected: Transitions | None = None) -> Transitions:
    """Return each machine's transitions, as (state before, state after): of all schedules, or of so many that all
    ``expected`` ones were seen, and of :data:`NUM_AT_LEAST`."""
    seen: Transitions = {machine.__name__: set() for machine in MACHINES}
    with mock.patch.multiple(BlockPool, **{name: recording(getattr(BlockPool, name), seen) for name in POOL_METHODS}):
        for owner, attribute in OWNERS:
            watch(owner, attribute, seen)
        try:
            for number, schedule in enumerate(SCHEDULES):
                if number >= NUM_AT_LEAST and expected is not None and has_all(seen, expected):
                    break
                run_schedule(schedule)
        finally:
            for owner, _ in OWNERS:
                del owner.__setattr__
    return seen


def has_all(seen: Transitions, expected: Transitions) -> bool:
    return all(transitions <= seen[machine] for machine, transitions in expected.items())


def watch(owner: type, attribute: str, seen: Transitions) -> None:
    def set_attribute(self: Any, name: str, value: Any) -> None:
        if name == attribute:
            before = getattr(self, name, value)
            if before is not value:
                seen[type(value).__name__].add((before.value, value.value))
        object.__setattr__(self, name, value)

    owner.__setattr__ = set_attribute  # type: ignore[method-assign,assignment]


def recording(method: Callable[..., Any], seen: Transitions) -> Callable[..., Any]:
    """A method of the pool that notes which state each block was in before and after it."""

    def run(self: BlockPool, *arguments: Any, **options: Any) -> Any:
        before = [self.state(block_id) for block_id in range(self.num_blocks)]
        result = method(self, *arguments, **options)
        for block_id, was in enumerate(before):
            if self.state(block_id) is not was:
                seen["BlockState"].add((was.value, self.state(block_id).value))
        return result

    return run
