"""The sequences' view of the block pool and the tiers below it: reserve, publish, give back."""

from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import NamedTuple

from splitserve.engine.cache_groups import GroupPool, Table, TableRule, resume_point
from splitserve.engine.sequence import Sequence
from splitserve.kvconnector.blocks.pool import BlockPool
from splitserve.kvconnector.layout.shape import num_blocks_for
from splitserve.kvconnector.tiers.tiers import Tiers
from splitserve.protocol.block_hash import extend_hashes, salted_root
from splitserve.protocol.kv_event_batch import DEVICE, KVEvent
from splitserve.protocol.step import BlockCopy
from splitserve.protocol.token_ids import TokenIds


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """Blocks that a peer may read: each is referenced on the device, or pinned in the host tier, until it's given back.

    ``locations``: pairs of id and generation; the ids of slots follow those of the device's blocks.
    """

    block_ids: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    locations: list[tuple[int, int]] = field(default_factory=list)


class Shortage(NamedTuple):
    """The lack of ``num_blocks`` blocks for the next sequence to begin. The ``wanted`` blocks are those that it would
    share."""

    num_blocks: int = 0
    wanted: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class BlockManager:
    """The blocks of sequences: reserve, publish, give back. ``root_hash`` starts every prefix chain.

    ``tiers`` hold blocks that don't fit the pool; only a cache of one full group has any.
    """

    pool: BlockPool  # of the first group
    block_size: int
    root_hash: bytes
    tiers: Tiers
    others: tuple[GroupPool, ...] = ()  # the groups after the first

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        """The pool of each group."""
        return (self.pool, *(group.pool for group in self.others))

    def tables(self, sequence: Sequence) -> list[Table]:
        """Return the table of each group."""
        return [Table(TableRule(self.block_size), 0, sequence.block_ids), *sequence.other_tables]

    def tails(self, num_tokens: int) -> list[int]:
        """Return, for each group after the first, the first block that a token after ``num_tokens`` others needs."""
        return [group.rule.first_needed(num_tokens) for group in self.others]

    def reserve(self, sequence: Sequence, headroom: int = 0, *, pulls: bool = False) -> bool:
        """Hold blocks for all known tokens, or none: cached ones for the longest cached prefix, else fresh ones.

        The last known token is never taken from the cache, since its logits must be computed.
        ``headroom`` blocks must remain available. Returns False, and holds nothing, if there's no room in some group.
        ``pulls``: a peer fills the blocks, so only the first group's cached prefix counts, and of a window the tail
        suffices; there is room for one more token, whose KV may come with the rest. Else every group must have the
        cached prefix.
        """
        assert not sequence.block_ids, "the sequence holds blocks already"
        hashes = self._reusable_hashes(sequence)
        cached = self.pool.match(hashes)
        if self.others and not pulls:
            cached = cached[: resume_point(self.others, hashes[: len(cached)])]
        num_fresh = num_blocks_for(len(sequence.token_ids) + pulls, self.block_size) - len(cached)
        if self._num_missing(cached, num_fresh, headroom) > 0:
            return False
        if self.others and not self._reserve_others(sequence, hashes, len(cached), headroom, pulls=pulls):
            return False
        self.pool.reference(cached)
        fresh = self.pool.allocate(num_fresh, after=cached[-1] if cached else None)
        assert fresh is not None, "room was checked above"
        sequence.block_ids = cached + fresh
        sequence.num_computed = len(cached) * self.block_size
        sequence.num_published = len(cached)
        if not sequence.was_admitted:
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
            sequence.was_admitted = True
        self.tiers.on_reused(cached, hashes[: len(cached)], self._shareable_ids(sequence))
        if not sequence.skips_tiers:
            rest = hashes[len(cached) :]
            sequence.load = self.tiers.begin_load(sequence, rest, fresh, self._shareable_ids(sequence), len(cached))
        return True

    def fork_headroom(self, sequence: Sequence) -> int:
        """Return the blocks for the sequences that fork from this one, one each, as far as the memory can ever hold
        them beside it."""
        if not sequence.num_forks:
            return 0
        num_needed = num_blocks_for(len(sequence.token_ids) + 1, self.block_size)
        return max(0, min(sequence.num_forks, min(pool.num_blocks for pool in self.pools) - num_needed))

    def share(self, sequence: Sequence, fork: Sequence) -> bool:
        """Let ``fork``, another choice, hold the blocks of the prompt that ``sequence`` has: the full ones together
        with it, and a block of its own that the content of a partial one is to be copied to. False, and nothing is
        held, if the prompt's KV isn't complete, or if a group lacks a block for that."""
        num_tokens = fork.num_prompt_tokens
        num_full, num_rest = divmod(num_tokens, self.block_size)
        is_complete = sequence.num_computed >= num_tokens and sequence.load is None
        if not is_complete or (num_rest and not all(pool.num_available for pool in self.pools)):
            return False
        tables = []
        for group, (table, pool) in enumerate(zip(self.tables(sequence), self.pools, strict=True)):
            held = table.between(0, num_full)
            pool.reference(held)
            for source in table.between(num_full, num_full + 1) if num_rest else ():
                pool.reference([source])
                fresh = pool.allocate(1, after=source)
                assert fresh is not None, "room was checked above"
                fork.copies.append(BlockCopy(group, source, fresh[0]))
                held += fresh
            tables.append(Table(table.rule, table.first_number, held, max(num_full, table.first_number)))
        fork.block_ids, fork.other_tables = tables[0].block_ids, tables[1:]
        fork.block_hashes = sequence.block_hashes[:num_full]
        fork.num_computed, fork.num_published = num_tokens, num_full
        fork.was_admitted = True
        return True

    def forget_copies(self, sequence: Sequence) -> None:
        """Release the sources of a sequence's copies, which are made or not needed any more."""
        for copy in sequence.copies:
            self.pools[copy.group].release([copy.source])
        sequence.copies = []

    def _reserve_others(
        self, sequence: Sequence, hashes: ListLike[bytes], num_cached: int, headroom: int, *, pulls: bool
    ) -> bool:
        """Hold the blocks of all groups after the first, or none."""
        num_tokens = len(sequence.token_ids)
        holds = [
            group.hold_to_pull(num_tokens) if pulls else group.hold_to_compute(hashes, num_cached, num_tokens)
            for group in self.others
        ]
        if not all(group.has_room(hold, headroom) for group, hold in zip(self.others, holds, strict=True)):
            return False
        sequence.other_tables = [group.take(hold) for group, hold in zip(self.others, holds, strict=True)]
        return True

    def _num_missing(self, cached: ListLike[int], num_fresh: int, headroom: int) -> int:
        """Blocks more that would have to be available to hold these; 0 or less if there's room."""
        return num_fresh + headroom + self.pool.num_unheld(cached) - self.pool.num_available

    def shortage(self, sequence: Sequence, headroom: int = 0) -> Shortage:
        """Return the blocks that :meth:`reserve` lacks."""
        cached = self.pool.match(self._reusable_hashes(sequence))
        num_fresh = num_blocks_for(len(sequence.token_ids), self.block_size) - len(cached)
        return Shortage(max(0, self._num_missing(cached, num_fresh, headroom)), frozenset(cached))

    def would_load(self, sequence: Sequence) -> bool:
        """Return whether some of the sequence's blocks are in a tier, and not in the pool."""
        if sequence.skips_tiers or not (self.tiers.num_blocks or self.tiers.shared.is_available):
            return False
        hashes = self._reusable_hashes(sequence)
        num_cached = len(self.pool.match(hashes))
        return self.tiers.may_find(num_cached, hashes[num_cached:], with_shared=not sequence.cache_salt)

    def finish_load(self, sequence: Sequence) -> None:
        """The sequence's load is over: what landed needs no computing."""
        assert sequence.load is not None
        is_first = sequence.num_cached_tokens == sequence.num_computed
        sequence.num_computed += sequence.load.num_good * self.block_size
        sequence.load = None
        if is_first:
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
        self.publish_computed(sequence)

    def abandon_load(self, sequence: Sequence) -> None:
        """The sequence's load takes too long: give back what it holds, and don't look into the tiers again."""
        assert sequence.load is not None
        kept_away = set(self.tiers.abandon(sequence.load))
        sequence.block_ids = [block_id for block_id in sequence.block_ids if block_id not in kept_away]
        sequence.load = None
        sequence.skips_tiers = True
        self.give_back(sequence)

    def hold_prefix(self, hashes: ListLike[bytes]) -> HeldPrefix:
        """Hold as much of a chain of hashes as is on the device or in the host tier, for a peer to read."""
        held = HeldPrefix()
        for block_hash in hashes:
            block_id = self.pool.find(block_hash)
            if block_id is not None:
                self.pool.reference([block_id])
                held.block_ids.append(block_id)
                held.locations.append((block_id, self.pool.generation(block_id)))
            elif (found := self.tiers.hold_slot(block_hash)) is not None:
                slot, generation = found
                held.slots.append(slot)
                held.locations.append((self.pool.num_blocks + slot, generation))
            else:
                break
        return held

    def give_prefix_back(self, held: HeldPrefix) -> None:
        self.pool.release(held.block_ids)
        self.tiers.release_slots(held.slots)

    def can_leave(self, sequence: Sequence, number: int, block_id: int) -> bool:
        """Return whether block ``number`` of a sequence, which is in ``block_id``, can be read from the host tier
        instead, and has no other holder, so that it becomes available."""
        return self.pool.num_holders(block_id) == 1 and self.tiers.has_slot(sequence.block_hashes[number])

    def leave_device(self, sequence: Sequence, block_ids: Mapping[int, int]) -> dict[int, tuple[int, int]]:
        """Hold slots of the host tier instead of blocks that can leave (``block_ids`` by number). Returns id and
        generation by number, as in :class:`HeldPrefix`."""
        locations = {}
        for number in block_ids:
            held = self.tiers.hold_slot(sequence.block_hashes[number])
            assert held is not None, f"block {number} is not in the host tier"
            slot, generation = held
            sequence.host_slots.append(slot)
            locations[number] = self.pool.num_blocks + slot, generation
        gone = set(block_ids.values())
        sequence.block_ids = [block_id for block_id in sequence.block_ids if block_id not in gone]
        self.pool.release([block_ids[number] for number in sorted(block_ids)])
        return locations

    def missing_hashes(self, sequence: Sequence) -> list[bytes]:
        """Return the hashes of the full blocks that the sequence has yet to compute, except its last token's block."""
        return self._reusable_hashes(sequence)[sequence.num_computed // self.block_size :]

    def _reusable_hashes(self, sequence: Sequence) -> list[bytes]:
        """Return the hashes of the full blocks of all known tokens but the last, and but those whose logits are needed
        for log-probabilities of the prompt."""
        self._extend_hashes(sequence)
        num_reusable = len(sequence.token_ids) - 1
        scores = sequence.prompt_logprobs
        if scores is not None and (limit := scores.max_reused_tokens) is not None:
            num_reusable = min(num_reusable, limit)
        return sequence.block_hashes[: num_reusable // self.block_size]

    def _extend_hashes(self, sequence: Sequence) -> None:
        root = salted_root(self.root_hash, sequence.cache_salt)
        extend_hashes(sequence.block_hashes, root, sequence.token_ids, self.block_size)

    @staticmethod
    def _shareable_ids(sequence: Sequence) -> TokenIds | tuple[()]:
        """Return the tokens that name the sequence's chunks in the shared tier; none for a salted one, which keeps out
        of it: that tier's names don't cover the salt."""
        return () if sequence.cache_salt else sequence.token_ids

    def contents(self) -> list[KVEvent]:
        """Return events that rebuild, from an empty state, the blocks that can be found now in each tier."""
        found = {DEVICE: self.pool.hashes(), **{tier.name: tier.index.hashes() for tier in self.tiers.tiers}}
        return [KVEvent("stored", name, hashes) for name, hashes in found.items() if hashes]

    def forget_prefixes(self) -> None:
        """Nothing that was computed so far is used again."""
        for pool in self.pools:
            pool.clear_prefix_index()
        self.tiers.clear()

    def grow(self, sequence: Sequence) -> bool:
        """Make room for one more token. False, and nothing is held, if a group has no block available."""
        if len(sequence.block_ids) * self.block_size > sequence.num_launched:
            return True
        if self.others and not all(group.pool.num_available for group in self.others):
            return False
        fresh = self.pool.allocate(1, after=sequence.block_ids[-1])
        if fresh is None:
            return False
        sequence.block_ids += fresh
        if self.others:
            for group, table in zip(self.others, sequence.other_tables, strict=True):
                group.grow(table)
        return True

    def publish_computed(self, sequence: Sequence) -> None:
        """Let others find the full blocks that are complete by now, unless they rest on forgotten content."""
        num_full = sequence.num_computed // self.block_size
        if sequence.keeps_to_itself:
            self._extend_hashes(sequence)
            sequence.num_published = max(sequence.num_published, num_full)
        elif num_full > sequence.num_published:
            self._extend_hashes(sequence)
            worth: list[bool] = []
            for index in range(sequence.num_published, num_full):
                block_id, block_hash = sequence.block_ids[index], sequence.block_hashes[index]
                self.pool.publish(block_id, block_hash)
                is_prompt = (index + 1) * self.block_size <= sequence.num_prompt_tokens
                worth.append(self.tiers.on_complete(block_id, block_hash, is_prompt=is_prompt))
            if not sequence.cache_salt:
                self.tiers.shared.propose(sequence.token_ids, sequence.block_hashes, sequence.num_published, worth)
            sequence.num_published = num_full
        if self.others:
            self._follow(sequence, num_full)

    def publish_verified(self, sequence: Sequence, ends: ListLike[int]) -> None:
        """Let others find the full blocks that a peer has handed over: in each group those before the number in
        ``ends``."""
        self._extend_hashes(sequence)
        num_full = len(sequence.token_ids) // self.block_size
        if sequence.keeps_to_itself:
            return
        for number in range(sequence.num_published, min(ends[0], num_full)):
            self.pool.publish(sequence.block_ids[number], sequence.block_hashes[number])
            sequence.num_published = number + 1
        for group, table, end in zip(self.others, sequence.other_tables, ends[1:], strict=True):
            group.publish(table, sequence.block_hashes, min(end, num_full))

    def _follow(self, sequence: Sequence, num_full: int) -> None:
        """Publish the full blocks of the groups after the first, then release those that windows have slid past. No
        launched step has them in its tables."""
        for group, table in zip(self.others, sequence.other_tables, strict=True):
            if not sequence.keeps_to_itself:
                group.publish(table, sequence.block_hashes, num_full)
            # What decode was granted of a window is what the first token after the known ones attends to.
            group.trim(table, sequence.num_computed - sequence.draws_second)

    def quarantine(self, sequence: Sequence, group: int, block_ids: ListLike[int]) -> None:
        """Take blocks of a group from a sequence that a read in flight may still write to."""
        self.pools[group].quarantine(block_ids)
        gone = set(block_ids)
        if group == 0:
            sequence.block_ids = [block_id for block_id in sequence.block_ids if block_id not in gone]
        else:
            table = sequence.other_tables[group - 1]
            table.block_ids = [block_id for block_id in table.block_ids if block_id not in gone]

    def give_back(self, sequence: Sequence) -> None:
        """Drop the sequence's references. Nothing may touch its blocks any more."""
        assert not sequence.is_touched, f"{sequence.key} gives blocks back that a step or a load still touches"
        self.forget_copies(sequence)
        self.pool.release(sequence.block_ids)
        for group, table in zip(self.others, sequence.other_tables, strict=False):
            group.pool.release(table.block_ids)
        self.tiers.release_slots(sequence.host_slots)
        sequence.block_ids = []
        sequence.other_tables = []
        sequence.host_slots = []
        sequence.num_computed = 0
        sequence.num_published = 0
