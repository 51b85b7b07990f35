"""The host tier of a simulated worker: copies that take their time, fail in the middle, or end long after anybody
waits for them. What a failed copy has written is garbage."""

from typing import TYPE_CHECKING

from splitserve.kvconnector.tier_index import TierIndex
from splitserve.kvconnector.tiers import ClearCommand, CopyCommand, CopyResult, Tier

if TYPE_CHECKING:
    from simulated_worker import SimWorker


class SimTiers:
    """Two tiers where the shape has any: a small one, and one twice as large that is asked after it."""

    def __init__(self, worker: "SimWorker", num_slots: int) -> None:
        self.worker = worker
        sizes = {"near": num_slots, "far": 2 * num_slots} if num_slots else {}
        self.tiers = [Tier(name, TierIndex(size), max_blocks_per_copy=3) for name, size in sizes.items()]
        self.slots: dict[str, list[list[int]]] = {name: [[] for _ in range(size)] for name, size in sizes.items()}
        self.num_loaded = 0
        self.found: dict[str, set[bytes]] = {}  # what a subscriber to the worker's events believes, by tier

    def follow_events(self) -> None:
        """Whoever adds up the events knows what can be found."""
        blocks = self.worker.core.state.blocks
        for event in blocks.tiers.events.take():
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
        assert {tier: known for tier, known in self.found.items() if known} == contents

    def start(self, command: CopyCommand | ClearCommand) -> None:
        if isinstance(command, ClearCommand):
            return
        sim = self.worker.sim
        taken = self.worker.stamp(command.block_ids)
        is_late = command.is_load and sim.random.random() < sim.faults.copy_late
        num_good = len(command.block_ids)
        if sim.random.random() < sim.faults.copy_error:
            num_good = sim.random.randrange(num_good)
        seconds = sim.random.uniform(0.0, sim.faults.copy_seconds) + (3.0 if is_late else 0.0)
        sim.after(seconds * sim.random.random(), lambda: self.move(command, num_good, taken))
        sim.after(seconds, lambda: self.finish(command, num_good, taken))

    def move(self, command: CopyCommand, num_good: int, taken: dict[int, int]) -> None:
        worker, slots = self.worker, self.slots[command.tier]
        if not worker.alive:
            return
        worker.assert_kept(taken, "a copy")
        for number, (block_id, slot) in enumerate(zip(command.block_ids, command.slots, strict=True)):
            garbage = [-1] * len(worker.memory[block_id])
            if command.is_load:
                worker.memory[block_id] = list(slots[slot]) if number < num_good else garbage
            else:
                slots[slot] = list(worker.memory[block_id]) if number < num_good else garbage

    def finish(self, command: CopyCommand, num_good: int, taken: dict[int, int]) -> None:
        worker = self.worker
        if not worker.can_run(lambda: self.finish(command, num_good, taken)):
            return
        worker.assert_kept(taken, "a copy")
        is_whole = num_good == len(command.block_ids)
        self.num_loaded += num_good if command.is_load else 0
        result = CopyResult(command.copy_id, num_good, None if is_whole else "planted copy error")
        worker.core.handle_copy_result(result, worker.clock)
        worker.settle()
