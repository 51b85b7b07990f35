"""Caches of a full and a window group under faults, and bugs planted in their rules that the checks find.

Every position has a tag in both groups: its KV, a hash of the tokens up to it. Groups of states are refused by name
(tests/engine/test_cache_groups.py), so no invariant of theirs is here. Which check holds each invariant, and which
planted bug shows that it can fail (those of one group are in test_planted_bugs.py):

| invariant | check | planted bugs |
|---|---|---|
| a step reads the tags of its own prefix only | Tail.check_content; tokens are hashes of all KV that is read | ids_of_other_group, windows_published_under_another_hash |
| what is offered or found isn't written any more; no block is in two tables that a step writes | check_written, BlockPool.quarantine | windows_published_while_written |
| generations of a group grow when blocks are taken, and only then | Generations.check; hand-overs succeed without faults | window_generations_kept, generations_of_group_0_for_all |
| complete: all groups are verified; what a failed read brought isn't published | SinkHandover.check_invariants, SimWorker.on_connector_event | complete_when_full_verified, window_generations_unchecked |
| what the index finds by a hash has the tags of that prefix | check_index, at the end | windows_published_under_another_hash |
| the tail has every token that the window reaches | Tail.check_table | tail_one_block_short |
| nothing is freed under a step or a read, in any pool | SimWorker.assert_kept | window_freed_at_launch, windows_without_quarantine |
| at the end the counts of every pool are back | Simulator.check_end, EngineCore.check_invariants | windows_kept_for_ever, blocks_kept_for_ever |
| a sequence that resumes draws the same tokens, and does resume | the router's check of tokens, GroupPool.hold_to_compute, hits of prefill workers | windows_looked_up_by_position, never_resumed |
| all groups or none: nothing is held while another group lacks room | EngineCore.check_invariants | held_by_one_group_alone |
"""  # noqa: E501

from collections.abc import Sequence as ListLike

import msgspec
import numpy as np
import pytest

from planted import CHANGED, HANDOVERS_FAILED, Plant, find
from schedules import SHORT_LEASES, Schedule, num_schedules, run_schedule, window_schedule
from splitserve.engine.block_manager import BlockManager
from splitserve.engine.cache_groups import GroupPool, Hold, Table, TableRule
from splitserve.engine.core import EngineCore
from splitserve.engine.sequence import Sequence
from splitserve.kvconnector.blocks.pool import BlockPool
from splitserve.prefill.source import SourcePart
from splitserve.protocol.handover.reads import ReadResult
from splitserve.protocol.handover.sink import SinkHandover
from splitserve.protocol.request import Role
from splitserve.protocol.step import StepPlan
from splitserve.simulation.faults import Faults, Shape
from splitserve.simulation.simulator import Simulator
from worker_plants import blocks_kept_for_ever

NUM_SCHEDULES = 200  # within which each planted bug must be found
WINDOW = 6
OTHER_WINDOW = "a step reads another prefix's window"
QUIET = Schedule(seed=0, shape=Shape(decode=2, window=WINDOW, num_blocks=16), num_requests=16)


@pytest.mark.parametrize("window", [1, 4, 5, 6, 9])
def test_every_invariant_holds_under_faults(window: int) -> None:
    num_run = num_handovers = 0
    while num_run < num_schedules(4) or (num_handovers <= 10 and num_run < 25):
        num_handovers += run_schedule(window_schedule(window * 1000 + num_run, window)).num_handovers
        num_run += 1
    assert num_handovers > 10


def test_hand_overs_succeed_and_prefixes_are_found_again_without_faults() -> None:
    sims = [run_schedule(Schedule(seed=seed, shape=QUIET.shape)) for seed in range(10)]
    assert sum(sim.num_handovers for sim in sims) > 40 and not any(sim.num_handover_failures for sim in sims)
    assert num_resumed(sims) > 0


def num_resumed(sims: ListLike[Simulator]) -> int:
    """Return the tokens that prefill workers found, where all groups had them."""
    workers = [worker for sim in sims for worker in sim.workers.values() if worker.role is Role.PREFILL]
    return sum(worker.core.state.counters.prefix_hit_tokens for worker in workers)


def test_the_count_of_resumed_tokens_shows_that_none_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug ``never_resumed``: no token is wrong then, so no other check finds it."""
    monkeypatch.setattr("splitserve.engine.block_manager.resume_point", lambda groups, hashes: 0)
    assert num_resumed([run_schedule(Schedule(seed=seed, shape=QUIET.shape)) for seed in range(3)]) == 0


# ---- planted bugs ----


def complete_when_full_verified(patch: pytest.MonkeyPatch) -> None:
    original = SinkHandover._is_group_verified
    patch.setattr(SinkHandover, "_is_group_verified", lambda self, group: original(self, 0))


def tail_one_block_short(patch: pytest.MonkeyPatch) -> None:
    original = TableRule.first_needed

    def later(self: TableRule, num_tokens: int) -> int:
        first = original(self, num_tokens)
        return first + 1 if first and self.window else first

    patch.setattr(TableRule, "first_needed", later)


def window_freed_at_launch(patch: pytest.MonkeyPatch) -> None:
    original = EngineCore.plan_step

    def free(self: EngineCore, now: float) -> StepPlan | None:
        plan = original(self, now)
        for sequence, chunk in self._steps[-1] if plan else ():
            for group, table in zip(self.state.blocks.others, sequence.other_tables, strict=True):
                group.trim(table, chunk.start + len(chunk.token_ids))
        return plan

    patch.setattr(EngineCore, "plan_step", free)


def generations_of_group_0_for_all(patch: pytest.MonkeyPatch) -> None:
    """The window's blocks are offered with the generations of the first group's blocks of the same ids."""
    digested, pools = SourcePart._digested, BlockManager.pools.fget
    assert pools is not None

    def first_pools(self: BlockManager) -> tuple[BlockPool, ...]:
        return tuple(self.pool for _ in pools(self))

    def with_first_generations(self: SourcePart, *arguments: object) -> object:
        with patch.context() as inner:
            inner.setattr(BlockManager, "pools", property(first_pools))
            return digested(self, *arguments)  # type: ignore[arg-type]

    patch.setattr(SourcePart, "_digested", with_first_generations)


def ids_of_other_group(patch: pytest.MonkeyPatch) -> None:
    """The window's blocks are offered by the ids that the first group has for the same tokens."""
    digested, tables = SourcePart._digested, BlockManager.tables

    def first_tables(self: BlockManager, sequence: object) -> list[Table]:
        return [tables(self, sequence)[0] for _ in self.pools]  # type: ignore[arg-type]

    def with_first_ids(self: SourcePart, *arguments: object) -> object:
        with patch.context() as inner:
            inner.setattr(BlockManager, "tables", first_tables)
            return digested(self, *arguments)  # type: ignore[arg-type]

    patch.setattr(SourcePart, "_digested", with_first_ids)


def windows_looked_up_by_position(patch: pytest.MonkeyPatch) -> None:
    """A prefix is resumed where the full group ends, whatever blocks the window group has."""

    def longest(groups: ListLike[GroupPool], hashes: ListLike[bytes]) -> int:
        del groups
        return len(hashes)

    patch.setattr("splitserve.engine.block_manager.resume_point", longest)


def held_by_one_group_alone(patch: pytest.MonkeyPatch) -> None:
    """The window group's blocks are taken before the first group's room is known."""
    original = BlockManager._num_missing

    def take_first(self: BlockManager, cached: ListLike[int], num_fresh: int, headroom: int) -> int:
        missing = original(self, cached, num_fresh, headroom)
        if missing > 0:
            self.others[0].pool.allocate(1)
        return missing

    patch.setattr(BlockManager, "_num_missing", take_first)


def windows_published_under_another_hash(patch: pytest.MonkeyPatch) -> None:
    """The window group's blocks are found by the hash of the prefix that is a block shorter."""
    original = GroupPool.publish
    patch.setattr(
        GroupPool,
        "publish",
        lambda self, table, hashes, end: original(self, table, [hashes[-1], *hashes[:-1]] if hashes else hashes, end),
    )


def windows_published_while_written(patch: pytest.MonkeyPatch) -> None:
    """The window group's block that a step is yet to fill is found by others."""
    original = GroupPool.publish
    patch.setattr(
        GroupPool,
        "publish",
        lambda self, table, hashes, end: original(self, table, hashes, min(end + 1, len(hashes), table.end)),
    )


def window_generations_kept(patch: pytest.MonkeyPatch) -> None:
    original = GroupPool.take

    def take(self: GroupPool, hold: Hold) -> Table:
        table = original(self, hold)
        self.pool._generations[table.block_ids[len(hold.cached) :]] -= np.uint64(1)
        return table

    patch.setattr(GroupPool, "take", take)


def window_generations_unchecked(patch: pytest.MonkeyPatch) -> None:
    original = SinkHandover.on_read_result

    def believe(self: SinkHandover, result: ReadResult, now: float) -> None:
        read = self.reads_in_flight.get(result.read_id)
        if read is not None and read.group and result.error is None:
            result = msgspec.structs.replace(result, generations=[block.generation for block in read.remote])
        original(self, result, now)

    patch.setattr(SinkHandover, "on_read_result", believe)


def windows_without_quarantine(patch: pytest.MonkeyPatch) -> None:
    """The window group's blocks are free while a read may still write to them."""
    windows: set[int] = set()
    quarantine, lift, taken = BlockPool.quarantine, BlockPool.lift_quarantine, GroupPool.take

    def take(self: GroupPool, hold: Hold) -> Table:
        windows.add(id(self.pool))
        return taken(self, hold)

    patch.setattr(GroupPool, "take", take)
    patch.setattr(
        BlockPool,
        "quarantine",
        lambda self, block_ids: self.release(block_ids) if id(self) in windows else quarantine(self, block_ids),
    )
    patch.setattr(BlockPool, "lift_quarantine", lambda self, ids: None if id(self) in windows else lift(self, ids))


def windows_kept_for_ever(patch: pytest.MonkeyPatch) -> None:
    """The first group's blocks are given back, those of the window group aren't."""
    original = BlockManager.give_back

    def give_back(self: BlockManager, sequence: Sequence) -> None:
        sequence.other_tables = []
        original(self, sequence)

    patch.setattr(BlockManager, "give_back", give_back)


PLANTS: dict[Plant, str] = {
    complete_when_full_verified: "the reads in flight aren't those of the hand-overs",
    tail_one_block_short: "a step lacks blocks of its window",
    window_freed_at_launch: "was freed under a step",
    generations_of_group_0_for_all: HANDOVERS_FAILED,
    ids_of_other_group: OTHER_WINDOW,
    windows_looked_up_by_position: "a sequence resumes where a group lacks blocks",
    held_by_one_group_alone: "blocks of group 1 have no holder",
    windows_published_under_another_hash: OTHER_WINDOW,
    windows_published_while_written: "of group 1, which the index finds",
    window_generations_kept: "of group 1 were taken, and keep their generations",
    windows_kept_for_ever: "blocks of group 1 have no holder",
}
LITTLE = Shape(decode=2, window=WINDOW, num_blocks=16)
OTHER_PLANTS: dict[Plant, tuple[Schedule, str]] = {
    blocks_kept_for_ever: (Schedule(seed=0, shape=Shape(window=WINDOW, num_blocks=200)), "blocks are still referenced"),
    window_generations_unchecked: (
        Schedule(
            seed=0,
            shape=LITTLE,
            faults=Faults(partitions=2, read_seconds=1.0),
            protocol=SHORT_LEASES,
            num_requests=24,
        ),
        CHANGED,
    ),
    windows_without_quarantine: (
        Schedule(seed=0, shape=LITTLE, faults=Faults(read_error=0.2, read_stuck=0.1, disconnect_seconds=1.0)),
        "blocks that aren't quarantined",
    ),
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    find(
        [msgspec.structs.replace(QUIET, seed=seed) for seed in range(NUM_SCHEDULES)],
        PLANTS[plant],
        is_handover_sure=lambda _: True,
    )


@pytest.mark.parametrize("plant", OTHER_PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found_in_other_schedules(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    schedule, words = OTHER_PLANTS[plant]
    find([msgspec.structs.replace(schedule, seed=seed) for seed in range(NUM_SCHEDULES)], words)
