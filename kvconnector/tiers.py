"""KV beyond the device: what goes down, what comes up, and what happens when a copy fails. No I/O, no clock.

Blocks go down in the background as soon as they are complete, and stay on the device as well until their place is
needed. A block that is being copied, either way, is referenced: nobody can take it. A sequence whose prefix is found
in a tier holds all of its blocks before the first copy starts, so two sequences can't wait for each other; it runs
when its copies are over, or when they nearly are: then its step waits for them on the device. Blocks whose copy failed
are computed, as if nothing had been found.

Tiers are asked in their order, cheapest first, and every block comes from one of them. Last is the one that workers
share (:mod:`.shared_tier`), for what none of the others has.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from splitserve.counters import TierLoad, WorkerCounters
from splitserve.kvconnector.block_pool import BlockPool
from splitserve.kvconnector.kv_events import KVEvents
from splitserve.kvconnector.shared_tier import ChainCopy, SharedTier, TierState
from splitserve.kvconnector.tier_counts import TierCounts, count_lookups
from splitserve.kvconnector.tier_index import TierIndex
from splitserve.kvconnector.tier_policy import KeepAll, KeepPolicy

MAX_STORES_IN_FLIGHT = 2
"""Per tier: one that is copied, and the next one."""
MAX_CANDIDATES = 1 << 16


class CopyCommand(msgspec.Struct, frozen=True, tag=True):
    """Copy whole blocks between the device and a tier: ``block_ids[i]`` with ``slots[i]``, whose content is
    ``hashes[i]``. ``is_load``: into the blocks."""

    copy_id: int
    tier: str
    is_load: bool
    block_ids: Sequence[int]
    slots: Sequence[int]
    hashes: Sequence[bytes]


class ClearCommand(msgspec.Struct, frozen=True, tag=True):
    """Nothing that was stored in the tier before is to be found by anybody, the next incarnation included."""

    tier: str


class CopyResult(msgspec.Struct, frozen=True, tag=True):
    """A copy is over: nothing touches its blocks or slots any more. The first ``num_good`` blocks are right; ``error``
    says what is wrong with the one after them; ``seconds`` is what it took."""

    copy_id: int
    num_good: int
    error: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CopyNearsEnd:
    """What is left of a load takes no longer than a step does: one that needs the blocks may be launched, and waits for
    them on the device. Its :class:`CopyResult` follows."""

    copy_id: int


AnyCommand: TypeAlias = CopyCommand | ChainCopy | ClearCommand
AnyResult: TypeAlias = CopyResult | CopyNearsEnd | TierState


@dataclass(slots=True)
class Tier:
    """One place below the device: its name and what it holds. ``max_blocks_per_copy`` bounds how long a store takes,
    ``max_blocks_per_load`` a load (None: the same)."""

    name: str
    index: TierIndex
    max_blocks_per_copy: int = 64
    max_blocks_per_load: int | None = None
    counts: TierCounts = field(default_factory=TierCounts)
    num_stores_in_flight: int = 0
    candidates: OrderedDict[bytes, int] = field(default_factory=OrderedDict)  # hash -> block, oldest first


@dataclass(slots=True, eq=False)
class BlockLoad:
    """Blocks of one sequence on their way up. ``good[i]``: block number i of the load has landed.

    ``pending`` are the copies under way: id -> number of its first block in the load. ``owner`` is the sequence.
    ``near_end`` are those of them that a step can wait for. ``holds_step``: one is launched that does, so the load
    isn't given up before it ends. ``has_failed``: some copy brought less than it should.
    ``is_abandoned``: it took too long; nobody waits for it any more, and its unfinished blocks are in quarantine.
    """

    owner: Any
    block_ids: list[int]
    good: list[bool]
    pending: dict[int, int] = field(default_factory=dict)
    deadline: float | None = None
    is_abandoned: bool = False
    is_distrusted: bool = False
    near_end: set[int] = field(default_factory=set)
    holds_step: bool = False
    has_failed: bool = False

    @property
    def can_hold_step(self) -> bool:
        """Whether a step may be launched that waits on the device for what isn't here yet."""
        return self.pending.keys() <= self.near_end and not (self.has_failed or self.is_distrusted)

    @property
    def num_good(self) -> int:
        """Blocks that landed, up to the first that didn't."""
        if self.is_distrusted:
            return 0
        return next((number for number, is_good in enumerate(self.good) if not is_good), len(self.good))


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
        self._pool = pool
        self._by_name = {tier.name: tier for tier in tiers}
        self._policy = policy or KeepAll()
        self._load_seconds = load_seconds
        self._commands: list[AnyCommand] = []
        self._copies: dict[int, CopyCommand | ChainCopy] = {}
        self._loads: dict[int, BlockLoad] = {}  # by the ids of their copies under way
        self._next_copy_id = 1
        self._held_slots: Counter[int] = Counter()  # of the tier that is served, by their holders for peers

    # ---- what the device's blocks do ----

    def on_complete(self, block_id: int, block_hash: bytes, *, is_prompt: bool) -> bool:
        """A full block of the device is computed, or read, and verified. Whether it's worth keeping."""
        is_worth = self.is_on and self._policy.on_complete(block_hash, is_prompt=is_prompt)
        if is_worth:
            self._propose(block_id, block_hash)
        return is_worth

    def on_reused(self, block_ids: Sequence[int], hashes: Sequence[bytes], token_ids: Sequence[int] = ()) -> None:
        """A request with these tokens found its first blocks on the device."""
        if not self.is_on:
            return
        for tier in self.tiers:
            tier.index.touch(hashes)
        worth = [self._policy.on_reused(block_hash) for block_hash in hashes]
        for block_id, block_hash, is_worth in zip(block_ids, hashes, worth, strict=True):
            if is_worth:
                self._propose(block_id, block_hash)
        self.shared.propose(token_ids, hashes, 0, worth)

    def _propose(self, block_id: int, block_hash: bytes) -> None:
        for tier in self.tiers:
            if block_hash not in tier.index:
                tier.candidates[block_hash] = block_id
                if len(tier.candidates) > MAX_CANDIDATES:
                    tier.candidates.popitem(last=False)

    # ---- down ----

    def start_stores(self) -> None:
        """Send down what waits for it, as far as the bounds allow. Blocks that were taken meanwhile are lost."""
        for tier in self.tiers:
            while tier.candidates and tier.num_stores_in_flight < MAX_STORES_IN_FLIGHT:
                self._start_store(tier)
        while (copy := self.shared.next_store(self._next_copy_id, self._pool.match)) is not None:
            self._pool.reference(copy.block_ids)
            self._start(copy)

    def _start_store(self, tier: Tier) -> None:
        block_ids: list[int] = []
        slots: list[int] = []
        hashes: list[bytes] = []
        while tier.candidates and len(block_ids) < tier.max_blocks_per_copy:
            block_hash, block_id = tier.candidates.popitem(last=False)
            if self._pool.match([block_hash]) != [block_id]:
                continue
            place = tier.index.begin_store(block_hash)
            if place is None:
                continue
            if place.evicted is not None:
                tier.counts.evicted_blocks += 1
                self.events.evicted(tier.name, [place.evicted])
            block_ids.append(block_id)
            slots.append(place.slot)
            hashes.append(block_hash)
        if block_ids:
            self._pool.reference(block_ids)
            tier.num_stores_in_flight += 1
            self._start_copy(tier, block_ids, slots, hashes, is_load=False)

    def _finish_store(self, tier: Tier, command: CopyCommand, num_good: int) -> None:
        tier.num_stores_in_flight -= 1
        stored: list[bytes] = []
        for number, (block_hash, slot) in enumerate(zip(command.hashes, command.slots, strict=True)):
            if tier.index.finish_store(block_hash, slot, is_good=number < num_good):
                stored.append(block_hash)
        self.counters.tier_stored_blocks += len(stored)
        self.events.stored(tier.name, stored)
        self._pool.release(command.block_ids)

    # ---- up ----

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
        sources = self._sources(hashes)
        num_blocks = len(sources)
        count_lookups([tier.counts for tier in self.tiers], [tier.counts for tier in sources], len(hashes))
        num_shared = self.shared.num_wanted(first_block + num_blocks, first_block + len(hashes))
        if not num_blocks + num_shared:
            return None
        load = BlockLoad(owner, list(block_ids[: num_blocks + num_shared]), [False] * (num_blocks + num_shared))
        start = 0
        while start < num_blocks:
            tier = sources[start]
            end, most = start + 1, min(num_blocks, start + (tier.max_blocks_per_load or tier.max_blocks_per_copy))
            while end < most and sources[end] is tier:
                end += 1
            chosen = list(hashes[start:end])
            slots = tier.index.pin(chosen)
            copy_id = self._start_copy(tier, load.block_ids[start:end], slots, chosen, is_load=True)
            load.pending[copy_id] = start
            self._loads[copy_id] = load
            start = end
        for tier in self.tiers:
            tier.index.touch(hashes[:num_blocks])
        if num_shared:
            self._ask_shared(load, num_blocks, first_block + num_blocks, hashes[num_blocks:], token_ids)
        return load

    def _ask_shared(
        self, load: BlockLoad, start: int, first_block: int, hashes: Sequence[bytes], token_ids: Sequence[int]
    ) -> None:
        block_ids = load.block_ids[start:]
        known = list(token_ids[: (first_block + len(block_ids)) * self.shared.block_size])
        wanted = list(hashes[: len(block_ids)])
        load.pending[self._next_copy_id] = start
        self._loads[self._next_copy_id] = load
        self._start(ChainCopy(self._next_copy_id, self.shared.name, True, known, first_block, block_ids, wanted))

    def may_find(self, first_block: int, hashes: Sequence[bytes]) -> bool:
        """Whether :meth:`begin_load` would begin one for these blocks of a sequence."""
        return bool(self._sources(hashes[:1])) or self.shared.num_wanted(first_block, first_block + len(hashes)) > 0

    def _sources(self, hashes: Sequence[bytes]) -> list[Tier]:
        """Of each leading block of a chain that is in some tier, the first that holds it."""
        sources: list[Tier] = []
        for block_hash in hashes:
            for tier in self.tiers:
                if block_hash in tier.index:
                    sources.append(tier)
                    break
            else:
                break
        return sources

    def abandon(self, load: BlockLoad) -> list[int]:
        """Nobody waits for a load any more. Its blocks that a copy may still write to are put into quarantine until
        that is over, and returned: their owner doesn't hold them any longer."""
        load.is_abandoned = True
        under_way = [block_id for copy_id in load.pending for block_id in self._copies[copy_id].block_ids]
        self._pool.quarantine(under_way)
        return under_way

    def _finish_load(self, tier: Tier, command: CopyCommand, num_good: int) -> BlockLoad | None:
        tier.index.unpin(command.slots)
        if num_good < len(command.hashes):
            bad = command.hashes[num_good]
            if tier.index.forget(bad):
                self.events.evicted(tier.name, [bad])
        return self._land(command, num_good)

    def _land(self, command: CopyCommand | ChainCopy, num_good: int) -> BlockLoad | None:
        load = self._loads.pop(command.copy_id)
        first = load.pending.pop(command.copy_id)
        if load.is_abandoned:
            self._pool.lift_quarantine(command.block_ids)
            return None
        load.good[first : first + num_good] = [True] * num_good
        load.has_failed |= num_good < len(command.block_ids)
        if load.pending:
            return None
        self.counters.tier_loaded_blocks += load.num_good
        return load

    # ---- for peers ----

    @property
    def serves_slots(self) -> bool:
        """Whether peers can read from a tier here."""
        return self._served_tier is not None

    def has_slot(self, block_hash: bytes) -> bool:
        """Whether :meth:`hold_slot` would find the content."""
        tier = self._served_tier
        return tier is not None and block_hash in tier.index

    def hold_slot(self, block_hash: bytes) -> tuple[int, int] | None:
        """Slot and generation of a content that peers can read from here: it stays until :meth:`release_slots`."""
        tier = self._served_tier
        if tier is None or not self.has_slot(block_hash):
            return None
        [slot] = tier.index.pin([block_hash])
        self._held_slots[slot] += 1
        return slot, tier.index.generation(slot)

    def release_slots(self, slots: Sequence[int]) -> None:
        if self._served_tier is not None:
            self._served_tier.index.unpin(slots)
            self._held_slots.subtract(slots)
            self._held_slots += Counter()  # without zeros

    @property
    def num_held_slots(self) -> int:
        """Slots that are held, each as often as it is."""
        return self._held_slots.total()

    @property
    def _served_tier(self) -> Tier | None:
        return next((tier for tier in self.tiers if tier.index.is_served), None)

    # ---- copies and time ----

    def _start_copy(
        self, tier: Tier, block_ids: list[int], slots: list[int], hashes: list[bytes], *, is_load: bool
    ) -> int:
        return self._start(CopyCommand(self._next_copy_id, tier.name, is_load, block_ids, slots, hashes))

    def _start(self, command: CopyCommand | ChainCopy) -> int:
        self._next_copy_id += 1
        self._copies[command.copy_id] = command
        self._commands.append(command)
        return command.copy_id

    def take_commands(self) -> list[AnyCommand]:
        commands, self._commands = self._commands, []
        return commands

    def on_result(self, result: AnyResult) -> BlockLoad | None:
        """A copy is over, or nearly, or the shared tier isn't what it was. The load that is complete with it, if
        somebody still waits for one."""
        if isinstance(result, TierState):
            self.shared.on_state(result)
            return None
        if isinstance(result, CopyNearsEnd):
            self._loads[result.copy_id].near_end.add(result.copy_id)
            return None
        command = self._copies.pop(result.copy_id)
        if result.error is not None:
            self.counters.tier_failures += 1
        counts = self.shared_counts if isinstance(command, ChainCopy) else self._by_name[command.tier].counts
        failed, good = result.error is not None, result.num_good
        counts.add_copy(is_load=command.is_load, num_good=good, seconds=result.seconds, failed=failed)
        if isinstance(command, ChainCopy):
            return self._on_shared_result(command, result)
        tier = self._by_name[command.tier]
        if command.is_load:
            return self._finish_load(tier, command, result.num_good)
        self._finish_store(tier, command, result.num_good)
        return None

    def _on_shared_result(self, command: ChainCopy, result: CopyResult) -> BlockLoad | None:
        if command.is_load:
            self.shared.on_loaded(command, result.num_good)
            return self._land(command, result.num_good)
        self.shared.on_stored(command, is_good=result.error is None)
        self.counters.tier_stored_blocks += result.num_good
        self._pool.release(command.block_ids)
        return None

    def start_clocks(self, now: float) -> None:
        """Loads that began since the last call begin to age."""
        for load in self._loads.values():
            if load.deadline is None:
                load.deadline = now + self._load_seconds

    def overdue(self, now: float) -> list[BlockLoad]:
        """Loads that somebody has waited for too long. Each is told of once: the caller abandons them."""
        late = {id(load): load for load, deadline in self._deadlines() if now >= deadline}
        self.counters.tier_failures += len(late)
        return list(late.values())

    def next_deadline(self) -> float:
        return min((deadline for _, deadline in self._deadlines()), default=float("inf"))

    def _deadlines(self) -> Iterator[tuple[BlockLoad, float]]:
        """Of loads that can be given up."""
        for load in self._loads.values():
            if load.deadline is not None and not (load.is_abandoned or load.holds_step):
                yield load, load.deadline

    # ---- the whole ----

    def clear(self) -> None:
        """Nothing that was stored can be trusted any more; what is on its way up is not used."""
        for tier in self.tiers:
            tier.candidates.clear()
            self.events.evicted(tier.name, tier.index.clear())
            self._commands.append(ClearCommand(tier.name))
        if self.shared.name:
            self.shared.forget()
            self._commands.append(ClearCommand(self.shared.name))
        for load in self._loads.values():
            load.is_distrusted = True

    @property
    def is_on(self) -> bool:
        """Whether there is any tier."""
        return bool(self.tiers or self.shared.name)

    @property
    def num_blocks(self) -> int:
        """Blocks that can be loaded, over all tiers but the shared one."""
        return sum(len(tier.index) for tier in self.tiers)

    def report(self, block_bytes: int) -> list[TierLoad]:
        """What each has done, for the heartbeat."""
        reports = [tier.counts.report(tier.name, tier.index, block_bytes) for tier in self.tiers]
        if self.shared.name:
            report = self.shared_counts.report(self.shared.name, None, block_bytes)
            reports.append(msgspec.structs.replace(report, available=int(self.shared.is_available)))
        return reports

    @property
    def loads(self) -> list[BlockLoad]:
        """Loads that somebody waits for."""
        return list({id(load): load for load in self._loads.values() if not load.is_abandoned}.values())

    def num_references(self) -> int:
        """References that stores hold on blocks of the device."""
        return sum(len(command.block_ids) for command in self._copies.values() if not command.is_load)

    @property
    def is_idle(self) -> bool:
        return not self._copies

    def check_invariants(self) -> None:
        """Raise AssertionError unless slots and copies explain each other."""
        for tier in self.tiers:
            tier.index.check_invariants()
            copies = [c for c in self._copies.values() if isinstance(c, CopyCommand) and c.tier == tier.name]
            in_use = {slot for command in copies for slot in command.slots}
            if tier is self._served_tier:
                in_use |= set(self._held_slots)
            assert tier.index.num_in_use == len(in_use), f"slots of {tier.name} are in use that no copy touches"
            stores = sum(not command.is_load for command in copies)
            assert stores == tier.num_stores_in_flight, f"the count of stores to {tier.name} is off"
        loads = {copy_id for copy_id, copy in self._copies.items() if copy.is_load}
        assert loads == self._loads.keys(), "a load counts as over before it is, or as in flight after its end"
        chains = [copy for copy in self._copies.values() if isinstance(copy, ChainCopy) and not copy.is_load]
        assert len(chains) == self.shared.num_stores_in_flight, "the count of stores to the shared tier is off"
