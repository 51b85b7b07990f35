"""The window group of a simulated worker's cache: what steps read of it, and write to it."""

from typing import TYPE_CHECKING

from splitserve.protocol.step import ScheduledChunk
from splitserve.simulation.model import BLOCK_SIZE, tail_kv

if TYPE_CHECKING:
    from splitserve.simulation.worker.driver import SimWorker


class Tail:
    """The window group of one worker, where its layout has one."""

    def __init__(self, worker: "SimWorker") -> None:
        self._worker = worker

    def check_table(self, chunk: ScheduledChunk) -> None:
        """Check that a chunk's table of the window group has every position that the step reads or writes."""
        if not self._worker.window:
            return
        table, end = chunk.table(1), chunk.start + len(chunk.token_ids)
        first, last = max(0, chunk.start - self._worker.window + 1) // BLOCK_SIZE, (end - 1) // BLOCK_SIZE
        stop = table.first_number + len(table.block_ids)
        assert table.first_number <= first and last < stop, (
            f"a step lacks blocks of its window: it needs {first} to {last}, and has {table.first_number} to {stop - 1}"
        )

    def write(self, chunk: ScheduledChunk, head: int, kv: list[int]) -> None:
        """Check what a chunk reads of a head's window, then write its own positions; ``kv`` is the full group's."""
        self.check_content(chunk, head, kv[: chunk.start])
        for position in range(chunk.start, len(kv)):
            block, index = self._slot(chunk, head, position)
            block[index] = tail_kv(kv[position])

    def check_content(self, chunk: ScheduledChunk, head: int, kv: list[int]) -> None:
        """Check that the window of the position after those of ``kv`` holds the KV of the same prefix."""
        for position in range(
            max(0, len(kv) + 1 - self._worker.window, chunk.start + 1 - self._worker.window), len(kv)
        ):
            block, index = self._slot(chunk, head, position)
            assert block[index] == tail_kv(kv[position]), f"a step reads another prefix's window at {position}"

    def _slot(self, chunk: ScheduledChunk, head: int, position: int) -> tuple[list[int], int]:
        """Return the block of the window group that has a position, and the slot in it."""
        table = chunk.table(1)
        block_id = table.block_ids[position // BLOCK_SIZE - table.first_number]
        return self._worker.memories[1][block_id], head * BLOCK_SIZE + position % BLOCK_SIZE
