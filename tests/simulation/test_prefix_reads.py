"""Conversations on pairs whose prefill workers read the turns before from other workers, under every fault."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planted import Plant, find
from schedules import SHORT_LEASES, Schedule, num_schedules, run_schedule
from splitserve.decode.part import SinkPart
from splitserve.decode.sink import SinkSide
from splitserve.engine.requests import Requests
from splitserve.engine.sequence import Sequence
from splitserve.engine.stage import Stage
from splitserve.prefill.source import SourcePart
from splitserve.protocol.handover.sink import SinkHandover
from splitserve.protocol.handover.source import SourceHandover
from splitserve.router.placement.placer import Placer
from splitserve.router.placement.policies import PrefixSource, Snapshot
from splitserve.simulation.faults import Faults, Shape
from splitserve.simulation.simulator import Simulator

SHAPES = [
    Shape(prefill=2, decode=2, num_blocks=40),
    Shape(prefill=2, decode=2, num_blocks=40, policy="cost"),
    Shape(prefill=1, decode=2, num_blocks=40),
    Shape(prefill=2, decode=2, num_blocks=26, tier_slots=30),
    Shape(prefill=2, decode=1, num_blocks=30, prefill_blocks=22),
]
FAULTS = {
    "quiet": Faults(),
    "lost messages": Faults(drop=0.2, duplicate=0.2, max_delay=0.3),
    "bad reads": Faults(read_error=0.3, read_stuck=0.1, post_error=0.1, read_late=0.1),
    "aborts": Faults(abort=0.5, max_delay=0.1, read_seconds=0.1),
    "leases": Faults(partitions=2, read_seconds=1.0),
    "deaths": Faults(kills=3, freezes=2, step_seconds=0.1, drains=1),
    "resets": Faults(resets=3, pauses=1, read_seconds=0.1),
    "late copies": Faults(copy_late=0.3, copy_error=0.2, copy_seconds=0.3),
}
seeds = st.integers(0, 2**32)
OFTEN = (21, 52)  # schedules of two shapes; those of the others run with SPLITSERVE_SLOW_TESTS


def schedule(seed: int, faults: Faults, shape: Shape, **options: Any) -> Schedule:
    return Schedule(seed=seed, faults=faults, shape=shape, num_requests=16, has_turns=True, **options)


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
@given(seed=seeds, shape=st.sampled_from(SHAPES), leases=st.sampled_from([{}, SHORT_LEASES]))
@settings(max_examples=num_schedules(4))
def test_tokens_and_counts_survive(faults: Faults, seed: int, shape: Shape, leases: dict[str, float]) -> None:
    run_schedule(schedule(seed, faults, shape, protocol=leases))


def counted(sim: Simulator, name: str) -> int:
    """Return a counter's sum over prefill workers."""
    workers = (worker for worker in sim.workers.values() if worker.party.engine_id.startswith("prefill"))
    return sum(getattr(worker.core.load(), name) for worker in workers)


@pytest.mark.parametrize(
    ("shape", "first"),
    [
        pytest.param(shape, first, marks=[] if first in OFTEN else pytest.mark.slow)
        for shape, first in zip(SHAPES, (21, 7, 52, 55, 28), strict=True)
    ],
)
def test_the_schedules_do_read_and_fail(shape: Shape, first: int) -> None:
    """Else the test above says nothing. The schedules from ``first`` on have all of it soon."""
    read = failed = missed = 0
    seed = first
    while min(read // 10, failed, missed) < 1:
        faults = (FAULTS["quiet"], FAULTS["bad reads"], FAULTS["resets"])[seed % 3]
        sim = run_schedule(schedule(seed, faults, shape))
        read += counted(sim, "peer_prefix_blocks")
        failed += counted(sim, "peer_prefix_failures")
        missed += counted(sim, "peer_prefix_misses")
        seed += 1
        assert seed < first + 60, f"{read} blocks were read, {failed} reads failed, {missed} prefixes were gone"


# ---- the checks bite ----


def ends_reach_the_first_part_alone(patch: pytest.MonkeyPatch) -> None:
    """The hand-over of a prompt whose prefix is being read ends, and the read doesn't."""

    def end(self: Requests, sequence: Sequence, reason: str, now: float, *, attempt_over: bool = True) -> None:
        owner = next(part for part in (*self.parts, None) if part is None or part.owns(sequence))
        sequence.enter(Stage.ENDED)
        self.scheduler.remove(sequence)
        if owner is not None:
            owner.on_end(sequence, reason, now, attempt_over=attempt_over)
        if owner is None or not owner.owns(sequence):
            self.forget(sequence, reason, now, attempt_over=attempt_over)

    patch.setattr(Requests, "end", end)


def reads_outlive_their_handover(patch: pytest.MonkeyPatch) -> None:
    """A lease that ends, or a Release, gives the blocks back at once."""

    def finish(self: SourcePart, handover: SourceHandover, now: float) -> None:
        del self._handovers[handover.key]
        self._stop_offering(handover.key)
        sequence = self._state.sequences[handover.key]
        self._scheduler.remove(sequence)
        self._requests.forget(sequence, handover.release_reason, now, attempt_over=handover.attempt_over)

    patch.setattr(SourcePart, "_finish", finish)


def prompts_stay_in_the_queue(patch: pytest.MonkeyPatch) -> None:
    original = SinkSide.read_prefix

    def read(self: SinkSide, sequence: Sequence, *arguments: Any) -> None:
        sequence.enter(Stage.QUEUED)
        original(self, sequence, *arguments)
        if sequence.stage is Stage.PULLING:
            sequence.stage = Stage.QUEUED

    patch.setattr(SinkSide, "read_prefix", read)


def failed_reads_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Nobody computes the prompt."""
    original = SinkPart._on_prefix_read

    def on_read(self: SinkPart, sequence: Sequence, now: float) -> None:
        if sequence.block_ids:
            original(self, sequence, now)

    patch.setattr(SinkPart, "_on_prefix_read", on_read)


def failed_reads_count(patch: pytest.MonkeyPatch) -> None:
    """A read of a prefix that ended with an error is trusted."""
    original = SinkHandover.on_read_result

    def on_result(self: SinkHandover, result: Any, now: float) -> None:
        if result.error is not None and self._pull.hashes:
            offered = [block.generation for block in self._reads[result.read_id].remote]
            result = msgspec.structs.replace(result, error=None, generations=offered)
        original(self, result, now)

    patch.setattr(SinkHandover, "on_read_result", on_result)


def any_worker_is_a_source(patch: pytest.MonkeyPatch) -> None:
    """One that was lost, too."""

    def snapshot(self: Placer, prompt: Any, now: float) -> Snapshot:
        found = original(self, prompt, now)
        matches = self._matches(prompt)
        best = max(matches, key=lambda party: matches[party].num_tokens, default=None)
        draining = [record.info.party for record in self._membership.records() if record.state != "ready"]
        party = next((each for each in draining if each in matches), best)
        return found if party is None else replace(found, prefix_source=PrefixSource(party, 40))

    original = Placer.snapshot
    patch.setattr(Placer, "snapshot", snapshot)


def resets_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    original = Placer._prefix_source

    def source(self: Placer, *arguments: Any) -> PrefixSource | None:
        kept, self.unreset = self.unreset, {}
        found = original(self, *arguments)
        self.unreset = kept
        return found

    patch.setattr(Placer, "_prefix_source", source)


PLANTS: dict[Plant, tuple[Faults, str]] = {
    ends_reach_the_first_part_alone: (FAULTS["aborts"], "Stage.RELEASED, not Stage.PULLING"),
    reads_outlive_their_handover: (Faults(kills=4, freezes=2, read_seconds=1.0), "goes from pulling to released"),
    prompts_stay_in_the_queue: (FAULTS["quiet"], "not Stage.PULLING"),
    failed_reads_are_forgotten: (FAULTS["bad reads"], "which is pulling, holds 0 blocks of"),
    failed_reads_count: (FAULTS["bad reads"], "wrong tokens"),
    any_worker_is_a_source: (FAULTS["deaths"], "is to read a prefix from"),
    resets_are_forgotten: (Faults(resets=3, freezes=3), "which may have content from before a reset"),
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    faults, words = PLANTS[plant]
    find(schedules(faults), words, plant=plant.__name__)


def schedules(faults: Faults) -> Iterator[Schedule]:
    for seed in range(150):
        yield schedule(seed, faults, SHAPES[seed % 3], protocol=SHORT_LEASES if faults.read_seconds == 1.0 else {})
