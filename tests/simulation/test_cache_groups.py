"""Caches of a full and a window group under faults, and bugs planted in their rules that the checks find."""

from collections.abc import Sequence as ListLike

import msgspec
import pytest

from planted import HANDOVERS_FAILED, Plant, find
from schedules import Schedule, num_schedules, run_schedule, window_schedule
from splitserve.engine.block_manager import BlockManager
from splitserve.engine.cache_groups import GroupPool, Table, TableRule
from splitserve.engine.core import EngineCore
from splitserve.kvconnector.blocks.pool import BlockPool
from splitserve.prefill.source import SourcePart
from splitserve.protocol.handover.sink import SinkHandover
from splitserve.protocol.step import StepPlan
from splitserve.simulation.faults import Shape

NUM_SCHEDULES = 200  # within which each planted bug must be found
WINDOW = 6
OTHER_WINDOW = "a step reads another prefix's window"
QUIET = Schedule(seed=0, shape=Shape(decode=2, window=WINDOW, num_blocks=16), num_requests=16)


@pytest.mark.parametrize("window", [1, 4, 5, 6, 9])
def test_every_invariant_holds_under_faults(window: int) -> None:
    num_run = num_handovers = 0
    while num_run < num_schedules(10) or (num_handovers <= 10 and num_run < 25):
        num_handovers += run_schedule(window_schedule(window * 1000 + num_run, window)).num_handovers
        num_run += 1
    assert num_handovers > 10


def test_hand_overs_succeed_and_prefixes_are_found_again_without_faults() -> None:
    sims = [run_schedule(Schedule(seed=seed, shape=QUIET.shape)) for seed in range(10)]
    assert sum(sim.num_handovers for sim in sims) > 40 and not any(sim.num_handover_failures for sim in sims)
    workers = [worker for sim in sims for worker in sim.workers.values()]
    assert sum(worker.core.state.counters.prefix_hit_tokens for worker in workers) > 0


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


PLANTS: dict[Plant, str] = {
    complete_when_full_verified: "the reads in flight aren't those of the hand-overs",
    tail_one_block_short: "a step lacks blocks of its window",
    window_freed_at_launch: "was freed under a step",
    generations_of_group_0_for_all: HANDOVERS_FAILED,
    ids_of_other_group: OTHER_WINDOW,
    windows_looked_up_by_position: "a sequence resumes where a group lacks blocks",
    held_by_one_group_alone: "blocks of group 1 have no holder",
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    find(
        [msgspec.structs.replace(QUIET, seed=seed) for seed in range(NUM_SCHEDULES)],
        PLANTS[plant],
        is_handover_sure=lambda _: True,
    )
