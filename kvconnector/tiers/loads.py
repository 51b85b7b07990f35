"""Loads: blocks are onboarded from the tiers for a sequence that waits for them, up to a deadline.

A sequence whose prefix is found in a tier holds all of its blocks before the first copy starts, so two sequences can't
wait for each other. Every block comes from the first tier that has it.

A load that takes too long is abandoned. A copy of it that has begun keeps its blocks in quarantine until it ends, and
until then lookups skip its tier; copies that have not begun are dropped. So a tier that hangs costs the blocks of one
copy, not of one copy per request.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from splitserve.kvconnector.tiers.commands import Copy, CopyCommand
from splitserve.kvconnector.tiers.counts import count_lookups
from splitserve.kvconnector.tiers.shared import ChainCopy, SharedTier
from splitserve.kvconnector.tiers.tier import Tier, TierWork


@dataclass(slots=True, eq=False)
class BlockLoad:
    """Blocks of one sequence that are being onboarded."""

    owner: Any  # the sequence
    block_ids: list[int]
    good: list[bool]  # good[i]: block number i of the load has landed
    pending: dict[int, int] = field(default_factory=dict)  # copies in flight: id -> number of its first block
    deadline: float | None = None
    is_abandoned: bool = False  # it took too long: no sequence waits for it, its unfinished blocks are quarantined
    is_distrusted: bool = False  # the tiers were cleared meanwhile: none of its blocks are used
    near_end: set[int] = field(default_factory=set)  # copies in `pending` that a step can wait for
    holds_step: bool = False  # a step that waits for it was launched, so it can't be abandoned before it ends
    has_failed: bool = False  # some copy brought fewer blocks than it should

    @property
    def can_hold_step(self) -> bool:
        """True if a step may be launched that waits on the device for the missing blocks."""
        return self.pending.keys() <= self.near_end and not (self.has_failed or self.is_distrusted)

    @property
    def num_good(self) -> int:
        """Number of blocks that landed, up to the first that did not."""
        if self.is_distrusted:
            return 0
        return next((number for number, is_good in enumerate(self.good) if not is_good), len(self.good))


class TierLoads:
    """Loads in flight, by copy id. A load is overdue ``load_seconds`` after its clock was started."""

    def __init__(self, work: TierWork, load_seconds: float) -> None:
        self._work = work
        self._load_seconds = load_seconds
        self._by_copy: dict[int, BlockLoad] = {}

    def begin(
        self, owner: Any, hashes: Sequence[bytes], block_ids: Sequence[int], token_ids: Sequence[int], first_block: int
    ) -> BlockLoad | None:
        """Begin a load; see :meth:`.Tiers.begin_load`."""
        work, sources = self._work, self._sources(hashes)
        num_blocks = len(sources)
        count_lookups([tier.counts for tier in self._asked], [tier.counts for tier in sources], len(hashes))
        num_shared = work.shared.num_wanted(first_block + num_blocks, first_block + len(hashes)) if token_ids else 0
        if not num_blocks + num_shared:
            return None
        load = BlockLoad(owner, list(block_ids[: num_blocks + num_shared]), [False] * (num_blocks + num_shared))
        for part in _same_source(sources):
            tier, chosen = sources[part.start], list(hashes[part])
            slots = tier.index.pin(chosen)
            command = CopyCommand(work.copies.next_id, tier.name, True, load.block_ids[part], slots, chosen)
            self._add(load, command, part.start)
        for tier in work.tiers:
            tier.index.touch(hashes[:num_blocks])
        if num_shared:
            self._ask_shared(load, num_blocks, first_block + num_blocks, hashes[num_blocks:], token_ids)
        return load

    def _ask_shared(
        self, load: BlockLoad, start: int, first_block: int, hashes: Sequence[bytes], token_ids: Sequence[int]
    ) -> None:
        shared = self._work.shared
        block_ids = load.block_ids[start:]
        known = list(token_ids[: (first_block + len(block_ids)) * shared.block_size])
        wanted = list(hashes[: len(block_ids)])
        copy = ChainCopy(self._work.copies.next_id, shared.name, True, known, first_block, block_ids, wanted)
        self._add(load, copy, start)

    def _add(self, load: BlockLoad, copy: Copy, start: int) -> None:
        load.pending[copy.copy_id] = start
        self._by_copy[copy.copy_id] = load
        self._work.copies.start(copy)

    def may_find(self, first_block: int, hashes: Sequence[bytes], *, with_shared: bool = True) -> bool:
        """Return whether :meth:`begin` would begin a load for these blocks of a sequence."""
        if self._sources(hashes[:1]):
            return True
        return with_shared and self._work.shared.num_wanted(first_block, first_block + len(hashes)) > 0

    @property
    def _asked(self) -> list[Tier]:
        """The tiers that are looked up, in order."""
        return [tier for tier in self._work.tiers if not tier.num_late_loads]

    def _sources(self, hashes: Sequence[bytes]) -> list[Tier]:
        """Return, for each leading block found in some tier, the first tier that holds it."""
        sources: list[Tier] = []
        asked = self._asked
        for block_hash in hashes:
            for tier in asked:
                if block_hash in tier.index:
                    sources.append(tier)
                    break
            else:
                break
        return sources

    def abandon(self, load: BlockLoad) -> list[int]:
        """Abandon a load; see :meth:`.Tiers.abandon`."""
        load.is_abandoned = True
        copies = [self._work.copies.get(copy_id) for copy_id in load.pending]
        in_flight = [block_id for copy in copies for block_id in copy.block_ids]
        self._work.pool.quarantine(in_flight)
        for copy in copies:
            self._source(copy).num_late_loads += 1
            self._work.copies.cancel(copy)
        return in_flight

    def _source(self, copy: Copy) -> Tier | SharedTier:
        """Return the tier that a copy reads."""
        if isinstance(copy, ChainCopy):
            return self._work.shared
        return next(tier for tier in self._work.tiers if tier.name == copy.tier)

    def distrust_all(self) -> None:
        """Mark all loads in flight as untrusted."""
        for load in self._by_copy.values():
            load.is_distrusted = True

    # ---- results ----

    def nears_end(self, copy_id: int) -> None:
        """Record that a step can wait for a copy."""
        self._by_copy[copy_id].near_end.add(copy_id)

    def finish(self, tier: Tier, command: CopyCommand, num_good: int) -> BlockLoad | None:
        """Record the end of a copy from a tier; return the load that it completes, unless that is abandoned."""
        tier.index.unpin(command.slots)
        if num_good < len(command.hashes):
            bad = command.hashes[num_good]
            if tier.index.forget(bad):
                self._work.events.evicted(tier.name, [bad])
        return self._land(command, num_good)

    def finish_shared(self, command: ChainCopy, num_good: int) -> BlockLoad | None:
        """Record the end of a copy from the shared tier; return the load that it completes, unless that is
        abandoned."""
        self._work.shared.on_loaded(command, num_good)
        return self._land(command, num_good)

    def drop(self, command: Copy) -> None:
        """Record the end of an abandoned copy that never began."""
        source = self._source(command)
        if isinstance(source, Tier) and isinstance(command, CopyCommand):
            source.index.unpin(command.slots)
        self._land(command, 0)

    def _land(self, command: Copy, num_good: int) -> BlockLoad | None:
        load = self._by_copy.pop(command.copy_id)
        first = load.pending.pop(command.copy_id)
        if load.is_abandoned:
            self._source(command).num_late_loads -= 1
            self._work.pool.lift_quarantine(command.block_ids)
            return None
        load.good[first : first + num_good] = [True] * num_good
        load.has_failed |= num_good < len(command.block_ids)
        if load.pending:
            return None
        self._work.counters.tier_loaded_blocks += load.num_good
        return load

    # ---- time ----

    def start_clocks(self, now: float) -> None:
        """Set the deadline of loads that began since the last call."""
        for load in self._by_copy.values():
            if load.deadline is None:
                load.deadline = now + self._load_seconds

    def overdue(self, now: float) -> list[BlockLoad]:
        """Return loads past their deadline, each once, and count them as failures: the caller abandons them."""
        late = {id(load): load for load, deadline in self._deadlines() if now >= deadline}
        self._work.counters.tier_failures += len(late)
        return list(late.values())

    def next_deadline(self) -> float:
        """Return the time at which the next load is overdue, or infinity."""
        return min((deadline for _, deadline in self._deadlines()), default=float("inf"))

    def _deadlines(self) -> Iterator[tuple[BlockLoad, float]]:
        """Deadlines of loads that may still be abandoned."""
        for load in self._by_copy.values():
            if load.deadline is not None and not (load.is_abandoned or load.holds_step):
                yield load, load.deadline

    # ---- the whole ----

    @property
    def awaited(self) -> list[BlockLoad]:
        """Loads whose owner waits for them."""
        return list({id(load): load for load in self._by_copy.values() if not load.is_abandoned}.values())

    def check_invariants(self) -> None:
        """Raise AssertionError unless each copy into the device belongs to a load."""
        loads = {copy.copy_id for copy in self._work.copies.loads}
        assert loads == self._by_copy.keys(), "the copies of loads differ from the loads in flight"
        late = Counter(c.tier for c in self._work.copies.loads if self._by_copy[c.copy_id].is_abandoned)
        sources: list[Tier | SharedTier] = [*self._work.tiers, self._work.shared]
        for source in sources:
            assert source.num_late_loads == late[source.name], f"the count of late loads from {source.name} is wrong"


def _same_source(sources: Sequence[Tier]) -> Iterator[slice]:
    """Split blocks into runs from one tier each, no longer than that tier's maximum per load."""
    start = 0
    while start < len(sources):
        tier = sources[start]
        end, most = start + 1, min(len(sources), start + (tier.max_blocks_per_load or tier.max_blocks_per_copy))
        while end < most and sources[end] is tier:
            end += 1
        yield slice(start, end)
        start = end
