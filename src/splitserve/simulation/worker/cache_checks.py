"""Checks of a simulated worker's cache in all its groups: what steps write, generations, what the index finds."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from splitserve.kvconnector.blocks.pool import BlockPool
from splitserve.protocol.step import StepPlan
from splitserve.simulation.model import BLOCK_SIZE, tail_kv

if TYPE_CHECKING:
    from splitserve.simulation.worker.driver import SimWorker

_MOST_TAKEN = 2**32  # times that a block can be taken between two looks: more is a generation that went back


def check_written(plan: StepPlan, pools: Sequence[BlockPool]) -> None:
    """Check that a step writes to no block that the index finds, and to none for two of its sequences."""
    for group, pool in enumerate(pools):
        written: list[int] = []
        for chunk in plan.chunks:
            table, end = chunk.table(group), chunk.start + len(chunk.token_ids)
            first, stop = chunk.start // BLOCK_SIZE, -(-end // BLOCK_SIZE)
            written += table.block_ids[first - table.first_number : stop - table.first_number]
        found = [block_id for block_id in written if block_id in pool._hash_of_block]
        assert not found, f"a step writes to blocks {found} of group {group}, which the index finds"
        assert len(set(written)) == len(written), f"a step writes twice to a block of group {group}: {written}"


class Generations:
    """Generations of all groups as they were last looked at: each grows when its block is taken, and never falls."""

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        self._pools = pools
        self._seen = [self._look(pool) for pool in pools]

    @staticmethod
    def _look(pool: BlockPool) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
        return pool._generations.copy(), pool._is_free.copy()

    def check(self) -> None:
        """Check the generations since the last look."""
        for group, pool in enumerate(self._pools):
            generations, is_free = self._look(pool)
            seen, was_free = self._seen[group]
            growth = generations - seen  # wraps around, as generations do
            kept = np.flatnonzero(was_free & ~is_free & (growth == 0)).tolist()
            assert not kept, f"blocks {kept} of group {group} were taken, and keep their generations"
            fallen = np.flatnonzero(growth > _MOST_TAKEN).tolist()
            assert not fallen, f"generations of blocks {fallen} of group {group} went back"
            self._seen[group] = generations, is_free


def check_index(workers: Iterable["SimWorker"]) -> None:
    """Check that blocks which indices find by one hash have one content on all workers, and that the window group has
    the tags of the full group's content."""
    contents: dict[bytes, list[int]] = {}
    others: list[tuple[bytes, list[int]]] = []
    for worker in workers:
        first, *rest = worker.core.state.blocks.pools
        for block_hash, block_id in first._block_of_hash.items():
            content = worker.memory[block_id]
            same = contents.setdefault(block_hash, content) == content
            assert same, f"{worker.party}: block {block_id} has another content than its hash names"
        for group, pool in enumerate(rest, start=1):
            others += [(name, worker.memories[group][block]) for name, block in pool._block_of_hash.items()]
    for block_hash, content in others:
        expected = contents.get(block_hash)
        assert expected is None or content == list(map(tail_kv, expected)), (
            "a window's block has the content of another prefix than its hash names"
        )
