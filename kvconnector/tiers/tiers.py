"""KV beyond the device: what goes down, what comes up, and what happens when a copy fails. No I/O, no clock.

Blocks go down in the background as soon as they are complete (:mod:`.stores`), and stay on the device as well
until their memory is needed. A block that is being copied, either way, is referenced, so that it isn't taken for new
content. A sequence whose prefix is found in a tier waits for a load (:mod:`.loads`); it runs when its copies are
over, or when they nearly are: then its step waits for them on the device. Blocks whose copy failed are computed, as if
nothing had been found.

Tiers are asked in their order, cheapest first, and every block comes from one of them. Last is the one that workers
share (:mod:`.shared`), for what none of the others has.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from splitserve.kvconnector.blocks.kv_events import KVEvents
from splitserve.kvconnector.blocks.pool import BlockPool
from splitserve.kvconnector.tiers.commands import AnyCommand, AnyResult, ClearCommand, CopiesInFlight, CopyNearsEnd
from splitserve.kvconnector.tiers.counts import TierCounts
from splitserve.kvconnector.tiers.loads import BlockLoad, TierLoads
from splitserve.kvconnector.tiers.policy import KeepAll, KeepPolicy
from splitserve.kvconnector.tiers.shared import ChainCopy, SharedTier, TierState
from splitserve.kvconnector.tiers.stores import TierStores
from splitserve.kvconnector.tiers.tier import ServedSlots, Tier, TierWork
from splitserve.protocol.counters import TierLoad, WorkerCounters


class Tiers:
    """The tiers of one worker. Without any it does nothing: that is how they are off.

    The caller performs :meth:`take_commands`, and hands every result to :meth:`on_result`. The block pool's prefix
    index says what is on the device; ``load_seconds`` is how long a request waits for its blocks.
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
        self.shared_counts = TierCounts()
        self.counters = WorkerCounters()
        self.events = events or KVEvents()
        self._by_name = {tier.name: tier for tier in tiers}
        self._policy = policy or KeepAll()
        self._copies = CopiesInFlight()
        work = TierWork(pool, self.tiers, self.shared, self._copies, self.events, self.counters)
        self._stores = TierStores(work)
        self._loads = TierLoads(work, load_seconds)
        self._served = ServedSlots(self.tiers)

    # ---- what the device's blocks do ----

    def on_complete(self, block_id: int, block_hash: bytes, *, is_prompt: bool) -> bool:
        """Note that a full block of the device is computed, or read, and verified; return whether to keep it below."""
        is_worth = self.is_on and self._policy.on_complete(block_hash, is_prompt=is_prompt)
        if is_worth:
            self._stores.propose(block_id, block_hash)
        return is_worth

    def on_reused(self, block_ids: Sequence[int], hashes: Sequence[bytes], token_ids: Sequence[int] = ()) -> None:
        """Note that a request with these tokens found its first blocks on the device."""
        if not self.is_on:
            return
        for tier in self.tiers:
            tier.index.touch(hashes)
        worth = [self._policy.on_reused(block_hash) for block_hash in hashes]
        for block_id, block_hash, is_worth in zip(block_ids, hashes, worth, strict=True):
            if is_worth:
                self._stores.propose(block_id, block_hash)
        self.shared.propose(token_ids, hashes, 0, worth)

    def start_stores(self) -> None:
        """Send down what waits for it, as far as the bounds allow. Blocks that were taken meanwhile are lost."""
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
        """Bring up as much of a chain as the tiers hold, into the first of ``block_ids``, which ``owner`` holds alone.

        The shared tier may be asked for more: ``hashes`` are those of the blocks ``first_block`` and following of a
        sequence with ``token_ids``. None if there is nothing to wait for.
        """
        return self._loads.begin(owner, hashes, block_ids, token_ids, first_block)

    def may_find(self, first_block: int, hashes: Sequence[bytes]) -> bool:
        """Return whether :meth:`begin_load` would begin one for these blocks of a sequence."""
        return self._loads.may_find(first_block, hashes)

    def abandon(self, load: BlockLoad) -> list[int]:
        """Give up a load. Its blocks that a copy may still write to are put into quarantine until that is over, and
        returned: their owner doesn't hold them any longer."""
        return self._loads.abandon(load)

    def start_clocks(self, now: float) -> None:
        """Let loads that began since the last call begin to age."""
        self._loads.start_clocks(now)

    def overdue(self, now: float) -> list[BlockLoad]:
        """Return loads that took too long, each once: the caller abandons them."""
        return self._loads.overdue(now)

    def next_deadline(self) -> float:
        """Return when the next load is overdue, or infinity."""
        return self._loads.next_deadline()

    @property
    def loads(self) -> list[BlockLoad]:
        """Loads that their owner waits for."""
        return self._loads.awaited

    # ---- for peers ----

    @property
    def serves_slots(self) -> bool:
        """Whether peers can read from a tier here."""
        return self._served.tier is not None

    def has_slot(self, block_hash: bytes) -> bool:
        """Return whether :meth:`hold_slot` would find the content."""
        return self._served.has(block_hash)

    def hold_slot(self, block_hash: bytes) -> tuple[int, int] | None:
        """Return slot and generation of a content that peers can read from here; it stays until
        :meth:`release_slots`."""
        return self._served.hold(block_hash)

    def release_slots(self, slots: Sequence[int]) -> None:
        """Give up one hold on each of some slots."""
        self._served.release(slots)

    @property
    def num_held_slots(self) -> int:
        """Slots that are held, each as often as it is."""
        return self._served.num_held

    # ---- copies ----

    def take_commands(self) -> list[AnyCommand]:
        """Return what is to be performed since the last call."""
        return self._copies.take_commands()

    def on_result(self, result: AnyResult) -> BlockLoad | None:
        """Note that a copy is over, or nearly, or that the shared tier's state changed; returns the load that is
        complete with it, unless that was abandoned."""
        if isinstance(result, TierState):
            self.shared.on_state(result)
            return None
        if isinstance(result, CopyNearsEnd):
            self._loads.nears_end(result.copy_id)
            return None
        command = self._copies.finish(result.copy_id)
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
        self._stores.finish(tier, command, good)
        return None

    # ---- the whole ----

    def clear(self) -> None:
        """Forget all that was stored, which can't be trusted any more, and use nothing that is on its way up."""
        for tier in self.tiers:
            tier.candidates.clear()
            self.events.evicted(tier.name, tier.index.clear())
            self._copies.commands.append(ClearCommand(tier.name))
        if self.shared.name:
            self.shared.forget()
            self._copies.commands.append(ClearCommand(self.shared.name))
        self._loads.distrust_all()

    @property
    def is_on(self) -> bool:
        """Whether there is any tier."""
        return bool(self.tiers or self.shared.name)

    @property
    def num_blocks(self) -> int:
        """Blocks that can be loaded, over all tiers but the shared one."""
        return sum(len(tier.index) for tier in self.tiers)

    def report(self, block_bytes: int) -> list[TierLoad]:
        """Return what each tier has done, for the heartbeat."""
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
        """Whether no copy is in flight."""
        return self._copies.is_idle

    def check_invariants(self) -> None:
        """Raise AssertionError unless slots and copies explain each other."""
        for tier in self.tiers:
            tier.index.check_invariants()
            copies = self._copies.of_tier(tier.name)
            in_use = {slot for command in copies for slot in command.slots} | self._served.held_in(tier)
            assert tier.index.num_in_use == len(in_use), f"slots of {tier.name} are in use that no copy touches"
            stores = sum(not command.is_load for command in copies)
            assert stores == tier.num_stores_in_flight, f"the count of stores to {tier.name} is off"
        self._loads.check_invariants()
        chains = [copy for copy in self._copies.stores if isinstance(copy, ChainCopy)]
        assert len(chains) == self.shared.num_stores_in_flight, "the count of stores to the shared tier is off"
