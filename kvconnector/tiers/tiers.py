"""KV beyond the device: offloading, onboarding, and failed copies. No I/O, no clock.

Blocks are offloaded in the background as soon as they are complete (:mod:`.stores`), and stay on the device as well
until their memory is needed. A block that is being copied, in either direction, is referenced, so that it is not
allocated for new content. A sequence whose prefix is found in a tier waits for a load (:mod:`.loads`). It runs when its
copies have ended, or when they nearly have: then its step waits for them on the device. Blocks whose copy failed are
computed, as if they had not been found.

Tiers are looked up in order, cheapest first, and every block comes from one of them. The last is the one that workers
share (:mod:`.shared`), for blocks that none of the others has.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from splitserve.kvconnector.blocks.kv_events import KVEvents
from splitserve.kvconnector.blocks.pool import BlockPool
from splitserve.kvconnector.tiers.commands import AnyCommand, AnyResult, ClearCommand, CopiesInFlight, CopyNearsEnd
from splitserve.kvconnector.tiers.counts import TierStatistics
from splitserve.kvconnector.tiers.loads import BlockLoad, TierLoads
from splitserve.kvconnector.tiers.policy import KeepAll, KeepPolicy
from splitserve.kvconnector.tiers.shared import ChainCopy, SharedTier, TierState
from splitserve.kvconnector.tiers.stores import TierStores
from splitserve.kvconnector.tiers.tier import ServedSlots, Tier, TierWork
from splitserve.protocol.counters import TierLoad, WorkerCounters


class Tiers:
    """The tiers of one worker. Without any tier it does nothing; that is the state with tiers off.

    The caller executes the commands of :meth:`take_commands`, and passes every result to :meth:`on_result`. The block
    pool's prefix index holds the blocks on the device; ``load_seconds`` is how long a request waits for its blocks.
    """

    def __init__(
        self,
        pool: BlockPool,
        tiers: Sequence[Tier] = (),
        *,
        policy: KeepPolicy | None = None,
        load_seconds: float = 5.0,
        events: KVEvents | None = None,
        shared: SharedTier | None = None,
    ) -> None:
        self.tiers = list(tiers)
        self.shared = shared or SharedTier()
        self.shared_counts = TierStatistics()
        self.counters = WorkerCounters()
        self.events = events or KVEvents()
        self._by_name = {tier.name: tier for tier in tiers}
        self._policy = policy or KeepAll()
        self._copies = CopiesInFlight()
        work = TierWork(pool, self.tiers, self.shared, self._copies, self.events, self.counters)
        self._stores = TierStores(work)
        self._loads = TierLoads(work, load_seconds)
        self._served = ServedSlots(self.tiers)

    # ---- events of the device's blocks ----

    def on_complete(self, block_id: int, block_hash: bytes, *, is_prompt: bool) -> bool:
        """Record that a full block of the device is computed, or read, and verified; return whether to keep it in the
        tiers."""
        is_worth = self.is_on and self._policy.on_complete(block_hash, is_prompt=is_prompt)
        if is_worth:
            self._stores.propose(block_id, block_hash)
        return is_worth

    def on_reused(self, block_ids: Sequence[int], hashes: Sequence[bytes], token_ids: Sequence[int] = ()) -> None:
        """Record that a request found its first blocks on the device. ``token_ids`` are its tokens, by which the shared
        tier names them; none for a request that keeps out of it."""
        if not self.is_on:
            return
        for tier in self.tiers:
            tier.index.touch(hashes)
        worth = [self._policy.on_reused(block_hash) for block_hash in hashes]
        for block_id, block_hash, is_worth in zip(block_ids, hashes, worth, strict=True):
            if is_worth:
                self._stores.propose(block_id, block_hash)
        if token_ids:
            self.shared.propose(token_ids, hashes, 0, worth)

    def start_stores(self) -> None:
        """Begin waiting stores, as far as the bounds allow. Candidates whose blocks were reused meanwhile are
        dropped."""
        self._stores.start()

    # ---- loads ----

    def begin_load(
        self,
        owner: Any,
        hashes: Sequence[bytes],
        block_ids: Sequence[int],
        token_ids: Sequence[int] = (),
        first_block: int = 0,
    ) -> BlockLoad | None:
        """Onboard as much of a chain as the tiers hold, into the first of ``block_ids``, to which only ``owner``
        refers.

        The shared tier may be asked for more: ``hashes`` are those of the blocks ``first_block`` and following of a
        sequence with ``token_ids``, none for one that keeps out of that tier. Return None if there is nothing to wait
        for.
        """
        return self._loads.begin(owner, hashes, block_ids, token_ids, first_block)

    def may_find(self, first_block: int, hashes: Sequence[bytes], *, with_shared: bool = True) -> bool:
        """Return whether :meth:`begin_load` would begin a load for these blocks of a sequence."""
        return self._loads.may_find(first_block, hashes, with_shared=with_shared)

    def abandon(self, load: BlockLoad) -> list[int]:
        """Abandon a load. Blocks that a copy may still write to are quarantined until it ends, and returned: their
        owner no longer holds them. The copies that have not begun are dropped. Until the last of them has ended, no
        lookup finds content in the tiers that they read."""
        return self._loads.abandon(load)

    def start_clocks(self, now: float) -> None:
        """Start the clocks of loads that began since the last call."""
        self._loads.start_clocks(now)

    def overdue(self, now: float) -> list[BlockLoad]:
        """Return loads that took too long, each once: the caller abandons them."""
        return self._loads.overdue(now)

    def next_deadline(self) -> float:
        """Return the time at which the next load is overdue, or infinity."""
        return self._loads.next_deadline()

    @property
    def loads(self) -> list[BlockLoad]:
        """Loads whose owner waits for them."""
        return self._loads.awaited

    # ---- for peers ----

    @property
    def serves_slots(self) -> bool:
        """True if peers can read from a tier here."""
        return self._served.tier is not None

    def has_slot(self, block_hash: bytes) -> bool:
        """Return whether :meth:`hold_slot` would find the content."""
        return self._served.has(block_hash)

    def hold_slot(self, block_hash: bytes) -> tuple[int, int] | None:
        """Return slot and generation of content that peers can read from here; it stays until :meth:`release_slots`."""
        return self._served.hold(block_hash)

    def release_slots(self, slots: Sequence[int]) -> None:
        """Release one hold on each slot."""
        self._served.release(slots)

    @property
    def num_held_slots(self) -> int:
        """Number of holds over all slots: a slot held twice counts twice."""
        return self._served.num_held

    # ---- copies ----

    def take_commands(self) -> list[AnyCommand]:
        """Return the commands since the last call."""
        return self._copies.take_commands()

    def on_result(self, result: AnyResult) -> BlockLoad | None:
        """Record that a copy ended, or nearly, or that the shared tier's state changed; return the load that it
        completes, unless that was abandoned."""
        if isinstance(result, TierState):
            self.shared.on_state(result)
            return None
        if isinstance(result, CopyNearsEnd):
            self._loads.nears_end(result.copy_id)
            return None
        command = self._copies.finish(result.copy_id)
        if result.was_dropped:
            self._loads.drop(command)
            return None
        failed, good = result.error is not None, result.num_good
        self.counters.tier_failures += failed
        if isinstance(command, ChainCopy):
            self.shared_counts.add_copy(is_load=command.is_load, num_good=good, seconds=result.seconds, failed=failed)
            if command.is_load:
                return self._loads.finish_shared(command, good)
            self._stores.finish_shared(command, result)
            return None
        tier = self._by_name[command.tier]
        tier.counts.add_copy(is_load=command.is_load, num_good=good, seconds=result.seconds, failed=failed)
        if command.is_load:
            return self._loads.finish(tier, command, good)
        self._stores.finish(tier, command, result)
        return None

    # ---- the whole ----

    def clear(self) -> None:
        """Forget all stored content, which can't be trusted any more, and use no block of a load in flight."""
        for tier in self.tiers:
            tier.candidates.clear()
            self.events.evicted(tier.name, tier.index.clear())
            self._copies.commands.append(ClearCommand(tier.name))
        if self.shared.name:
            self.shared.clear()
            self._copies.commands.append(ClearCommand(self.shared.name))
        self._loads.distrust_all()

    @property
    def is_on(self) -> bool:
        """True if there is any tier."""
        return bool(self.tiers or self.shared.name)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that can be loaded, over all tiers except the shared one."""
        return sum(len(tier.index) for tier in self.tiers)

    def report(self, block_bytes: int) -> list[TierLoad]:
        """Return the counts of each tier, for the heartbeat. ``block_bytes``: of a block, over all ranks."""
        reports = [tier.counts.report(tier.name, tier.index, block_bytes) for tier in self.tiers]
        if self.shared.name:
            report = self.shared_counts.report(self.shared.name, None, block_bytes)
            reports.append(msgspec.structs.replace(report, available=int(self.shared.is_available)))
        return reports

    def num_references(self) -> int:
        """Return how many references stores hold on blocks of the device."""
        return self._stores.num_references()

    @property
    def is_idle(self) -> bool:
        """True if no copy is in flight."""
        return self._copies.is_idle

    def check_invariants(self) -> None:
        """Raise AssertionError unless slots and copies are consistent."""
        for tier in self.tiers:
            tier.index.check_invariants()
            copies = self._copies.of_tier(tier.name)
            in_use = {slot for command in copies for slot in command.slots} | self._served.held_in(tier)
            assert tier.index.num_in_use == len(in_use), (
                f"slots of {tier.name} in use differ from those that copies and peers touch"
            )
            stores = sum(not command.is_load for command in copies)
            assert stores == tier.num_stores_in_flight, f"the count of stores to {tier.name} is wrong"
        self._loads.check_invariants()
        chains = [copy for copy in self._copies.stores if isinstance(copy, ChainCopy)]
        assert len(chains) == self.shared.num_stores_in_flight, "the count of stores to the shared tier is wrong"
