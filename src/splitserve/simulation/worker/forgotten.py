"""Check that a reset of the prefix cache holds: no content from before it, or computed from such content, is found."""

from typing import TYPE_CHECKING

from splitserve.protocol.request import RequestKey
from splitserve.simulation.model import BLOCK_SIZE

if TYPE_CHECKING:
    from splitserve.simulation.worker.driver import SimWorker


class Forgotten:
    """Content of one worker that no request may find any more, by group, block and generation."""

    def __init__(self, worker: "SimWorker") -> None:
        self._worker = worker
        self._generations: list[list[int]] = []  # of each group's blocks at the last reset
        self._requests: set[RequestKey] = set()  # those that were here at a reset
        self._computed: set[tuple[int, int]] = set()  # block and generation of what these compute

    def note_reset(self) -> None:
        """Note the content and the requests at a reset."""
        self._generations = [generations.tolist() for generations in self._worker.all_generations]
        self._requests |= self._worker.core.state.sequences.keys()

    def on_launch(self) -> None:
        """Note the blocks that a launched step writes for requests from before a reset."""
        for sequence, chunk in self._worker.core.newest_step if self._requests else ():
            if sequence.key in self._requests:
                end = chunk.start + len(chunk.token_ids)
                for block_id in chunk.block_ids[chunk.start // BLOCK_SIZE : -(-end // BLOCK_SIZE)]:
                    self._computed.add((block_id, int(self._worker.generations[block_id])))

    def check(self) -> None:
        """Check the prefix index."""
        for group, before in enumerate(self._generations):
            pool, generations = self._worker.core.state.blocks.pools[group], self._worker.all_generations[group]
            for block_hash in pool.hashes():
                block_id = pool.find(block_hash)
                assert block_id is not None
                generation = int(generations[block_id])
                assert generation != before[block_id], f"block {block_id} is found after the reset that forgot it"
                is_tainted = group == 0 and (block_id, generation) in self._computed
                assert not is_tainted, f"block {block_id} is found, but computed from what was forgotten"
