"""Tiers of a simulated worker: copies that take a while, fail in the middle, or end after their deadline. Some of
those that are cancelled then have not begun.

A failed copy has written garbage. Most loads announce that they near their end, at some moment before it; the device
can wait for the content that they move.
"""

import itertools
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from splitserve.kvconnector.tiers.commands import (
    AnyCommand,
    CancelCommand,
    ClearCommand,
    CopyCommand,
    CopyNearsEnd,
    CopyResult,
)
from splitserve.kvconnector.tiers.index import TierIndex
from splitserve.kvconnector.tiers.shared import ChainCopy, SharedTier, TierState
from splitserve.kvconnector.tiers.tier import Tier
from splitserve.protocol.block_hash import extend_hashes
from splitserve.simulation.model import BLOCK_SIZE

SHARED = "shared"
MAX_CHUNKS = 24

if TYPE_CHECKING:
    from splitserve.simulation.worker.driver import SimWorker


class SharedServer:
    """The tier that all workers share: a few chunks of ``chunk`` blocks each, by the hash of their last block.

    A block that is None was never completely written: its checksum is wrong.
    """

    def __init__(self, chosen: random.Random, chunk: int) -> None:
        self.chunk = chunk
        self.chunks: dict[bytes, list[list[int] | None]] = {}
        self._chosen = chosen

    def keep(self, copy: ChainCopy, contents: list[list[int] | None]) -> None:
        """Store the chunks that are not there yet."""
        assert copy.first_block % self.chunk == 0 and len(contents) % self.chunk == 0, "a piece of a chunk"
        num_tokens = (copy.first_block + len(contents)) * BLOCK_SIZE
        assert len(copy.token_ids) == num_tokens, f"{len(copy.token_ids)} tokens for the content of {num_tokens}"
        for start in range(0, len(contents), self.chunk):
            blocks = [None if block is None else list(block) for block in contents[start : start + self.chunk]]
            self.chunks.setdefault(copy.hashes[start + self.chunk - 1], blocks)
        while len(self.chunks) > MAX_CHUNKS:
            del self.chunks[self._chosen.choice(list(self.chunks))]

    def find(self, root: bytes, copy: ChainCopy) -> list[list[int]]:
        """Return the copy's leading blocks that a chain of whole chunks from the sequence's beginning reaches."""
        hashes: list[bytes] = []
        extend_hashes(hashes, root, copy.token_ids, BLOCK_SIZE)
        assert hashes[copy.first_block :] == list(copy.hashes), "hashes that differ from those of the tokens"
        blocks: list[list[int] | None] = []
        for end in hashes[self.chunk - 1 :: self.chunk]:
            if end not in self.chunks:
                break
            blocks += self.chunks[end]
        whole = itertools.takewhile(lambda block: block is not None, blocks[copy.first_block :])
        return [block for block in whole if block is not None]


class SimTiers:
    """The tiers of one worker, where the shape has any: a small one, and one twice as large, searched after it."""

    def __init__(self, worker: "SimWorker", num_slots: int) -> None:
        self.worker = worker
        sizes = {"near": num_slots, "far": 2 * num_slots} if num_slots else {}
        self.generations = np.full(num_slots, worker.sim.random.getrandbits(63), dtype=np.uint64)
        served = {"near": self.generations}  # the tier that peers read
        self.tiers = [
            Tier(name, TierIndex(size, served.get(name)), max_blocks_per_copy=3) for name, size in sizes.items()
        ]
        self.slots: dict[str, list[list[int]]] = {name: [[] for _ in range(size)] for name, size in sizes.items()}
        chunk = worker.sim.shared.chunk
        self.shared = SharedTier(SHARED, BLOCK_SIZE, 3 * chunk) if chunk else SharedTier()
        self.moved_at: dict[int, float] = {}  # by copy: the time at which a waiting device continues
        self.waiting: set[int] = set()  # copies that have not begun
        self.dropped: set[int] = set()  # cancelled before they began
        self.num_clears = 0
        self.num_waits = 0
        self.num_loaded = 0
        self.num_turns = 0
        self.found: dict[str, set[bytes]] = {}  # by tier: blocks that a subscriber to the worker's events knows

    def follow_events(self) -> None:
        """Publish events, and check that their sum is the content of the tiers."""
        blocks = self.worker.core.state.blocks
        events = blocks.tiers.events.take()
        self.worker.sim.routers.on_kv_events(self.worker, events)
        for event in events:
            known = self.found.setdefault(event.tier, set())
            hashes = set(event.hashes)
            assert len(hashes) == len(event.hashes), "an event names a block twice"
            if event.kind == "stored":
                assert not hashes & known, "stored twice"
                known |= hashes
            else:
                assert hashes <= known, "evicted without having been stored"
                known -= hashes
        contents = {event.tier: set(event.hashes) for event in blocks.contents()}
        found = {tier: known for tier, known in self.found.items() if known}
        assert found == contents, f"events say {found}, but the tiers hold {contents}"

    def content(self, slot: int) -> list[int]:
        """Return the content of a slot that a peer reads; some were never written."""
        return self.slots["near"][slot] or [0] * len(self.worker.memory[0])

    def begin(self) -> None:
        """Report the shared tier after a while."""
        if self.shared.name:
            self.worker.sim.after(self.worker.sim.random.uniform(0.0, 0.5), lambda: self.tell(is_available=True))

    def tell(self, *, is_available: bool) -> None:
        """Report the shared tier's availability, which faults change; a tier that returns may have lost everything."""
        worker, sim = self.worker, self.worker.sim
        if not worker.can_run(lambda: self.tell(is_available=is_available)):
            return
        state = TierState(SHARED, is_available, sim.shared.chunk * BLOCK_SIZE, self.num_clears)
        worker.core.handle_copy_result(state, worker.clock)
        worker.settle()
        if sim.faults.copy_error and self.num_turns < 6:
            self.num_turns += 1
            if not is_available and sim.random.random() < 0.3:
                sim.shared.chunks.clear()
            sim.after(sim.random.uniform(0.2, 2.0), lambda: self.tell(is_available=not is_available))

    def start(self, command: AnyCommand) -> None:
        """Start or cancel a copy, or clear the shared tier."""
        if isinstance(command, CancelCommand):
            self.cancel(command.copy_id)
            return
        if isinstance(command, ClearCommand):
            if command.tier == SHARED:
                self.num_clears += 1
                self.worker.sim.shared.chunks.clear()
                self.worker.sim.after(0.1, lambda: self.tell(is_available=True))
            return
        sim = self.worker.sim
        taken = self.worker.stamp(command.block_ids)
        is_late = command.is_load and sim.random.random() < sim.faults.copy_late
        num_good = len(command.block_ids)
        if sim.random.random() < sim.faults.copy_error:
            num_good = sim.random.randrange(num_good)
        seconds = sim.random.uniform(0.0, sim.faults.copy_seconds) + (3.0 if is_late else 0.0)
        self.waiting.add(command.copy_id)
        if isinstance(command, ChainCopy):
            sim.after(seconds, lambda: self.finish_chain(command, num_good, taken))
            return
        seconds_to_move = seconds * sim.random.random()
        self.moved_at[command.copy_id] = sim.now + seconds_to_move
        if command.is_load and sim.random.random() < 0.8:
            sim.after(seconds_to_move * sim.random.random(), lambda: self.near_end(command))
        sim.after(seconds_to_move, lambda: self.move(command, num_good, taken))
        sim.after(seconds, lambda: self.finish(command, num_good, taken))

    def cancel(self, copy_id: int) -> None:
        """Drop a copy, if it has not begun, which is a matter of chance."""
        if copy_id in self.waiting and self.worker.sim.random.random() < 0.5:
            self.dropped.add(copy_id)
            self.worker.sim.after(0.0, lambda: self.drop(copy_id))

    def goes_on(self, copy_id: int) -> bool:
        """Return whether a copy was not dropped. From now on it has begun."""
        self.waiting.discard(copy_id)
        return copy_id not in self.dropped

    def drop(self, copy_id: int) -> None:
        """Report the end of a copy that never began."""
        worker = self.worker
        if worker.can_run(lambda: self.drop(copy_id)):
            worker.core.handle_copy_result(CopyResult(copy_id, 0, was_dropped=True), worker.clock)
            worker.settle()

    def seconds_until_moved(self, copy_ids: Sequence[int]) -> float:
        """Return the time that a step waits for these copies."""
        self.num_waits += bool(copy_ids)
        return max([0.0, *(self.moved_at[copy_id] - self.worker.sim.now for copy_id in copy_ids)])

    def near_end(self, command: CopyCommand) -> None:
        """Announce that a load nears its end."""
        worker = self.worker
        if self.goes_on(command.copy_id) and worker.can_run(lambda: self.near_end(command)):
            worker.core.handle_copy_result(CopyNearsEnd(command.copy_id), worker.clock)
            worker.settle()

    def move(self, command: CopyCommand, num_good: int, taken: dict[int, int]) -> None:
        """Move the content: ``num_good`` blocks, and garbage after them."""
        worker, slots = self.worker, self.slots[command.tier]
        if not (worker.alive and self.goes_on(command.copy_id)):
            return
        worker.assert_kept(taken, "a copy")
        for number, (block_id, slot) in enumerate(zip(command.block_ids, command.slots, strict=True)):
            garbage = [-1] * len(worker.memory[block_id])
            if command.is_load:
                worker.memory[block_id] = list(slots[slot]) if number < num_good else garbage
            else:
                slots[slot] = list(worker.memory[block_id]) if number < num_good else garbage

    def finish_chain(self, copy: ChainCopy, num_good: int, taken: dict[int, int]) -> None:
        """Move a chain and end its copy at once; the garbage of a failed store can be found, and is detected."""
        worker, shared = self.worker, self.worker.sim.shared
        if not (self.goes_on(copy.copy_id) and worker.can_run(lambda: self.finish_chain(copy, num_good, taken))):
            return
        worker.assert_kept(taken, "a copy")
        is_whole = num_good == len(copy.block_ids)
        if copy.is_load:
            found = shared.find(worker.core.state.blocks.root_hash, copy)
            num_good = min(num_good, len(found))
            for number, block_id in enumerate(copy.block_ids):
                garbage = [-1] * len(worker.memory[block_id])
                worker.memory[block_id] = list(found[number]) if number < num_good else garbage
            self.num_loaded += num_good
        else:
            contents = [worker.memory[block_id] if n < num_good else None for n, block_id in enumerate(copy.block_ids)]
            shared.keep(copy, contents)
        result = CopyResult(copy.copy_id, num_good, None if is_whole else "planted copy error")
        worker.core.handle_copy_result(result, worker.clock)
        worker.settle()

    def finish(self, command: CopyCommand, num_good: int, taken: dict[int, int]) -> None:
        """Report the end of a copy."""
        worker = self.worker
        if not (self.goes_on(command.copy_id) and worker.can_run(lambda: self.finish(command, num_good, taken))):
            return
        worker.assert_kept(taken, "a copy")
        is_whole = num_good == len(command.block_ids)
        self.num_loaded += num_good if command.is_load else 0
        result = CopyResult(command.copy_id, num_good, None if is_whole else "planted copy error")
        worker.core.handle_copy_result(result, worker.clock)
        worker.settle()
