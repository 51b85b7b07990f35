"""Locations of prefixes: one index of the blocks that all workers hold, on the device and in every tier.

Workers tell by KV events what they hold. What this router sent to a worker counts as well, until the worker's memory
must be full of later prompts, or an event says that it is gone: so requests of a conversation find each other where
events are off, and before an event has come.

The index is a hint: a block may be evicted before a request needs it; its KV is then computed. Pure: no I/O, no clock.
"""

import itertools
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from splitserve.protocol.block_hash import extend_hashes, salted_root
from splitserve.protocol.kv_event_batch import DEVICE, KVEvent, KVEventBatch
from splitserve.protocol.request import Party
from splitserve.router.placement.block_index import BlockIndex
from splitserve.router.placement.known_chains import KnownChains
from splitserve.router.placement.sent_blocks import SentBlocks

MAX_HASHES_PER_WORKER = 1 << 20
HASHES_AT_ONCE = 1024
"""Blocks of a long prompt that are hashed in one go, in a millisecond: a multiple of those that chains are known by.
Also those of events that are applied, and of lost workers that are removed, in one go."""
MIN_GAIN_BLOCKS = 2
"""Least gain for which a worker reads from another one, since the request takes a round trip."""


class PrefixMatch(NamedTuple):
    """The leading part of a prompt that a worker holds, in any tier."""

    num_tokens: int
    worth_tokens: int  # num_tokens weighted by ``TIER_WORTH``


@dataclass(slots=True)
class _Holding:
    """Blocks of one worker: the root and size of its chains, and the tiers of each block."""

    bit: int  # in the indexes
    root_hash: bytes
    block_size: int
    number: int | None = None  # of the last batch of events; None: there was none
    sizes: dict[str, int] = field(default_factory=dict)  # number of blocks by tier, as announced
    blocks: set[bytes] = field(default_factory=set)  # in any tier, as announced
    is_forgotten: bool = False


class PromptHashes:
    """Hashes of a prompt's full blocks, computed once per block size and root. The last token's block is left out,
    since it is always computed. ``cache_salt``: that of the request."""

    def __init__(self, token_ids: Sequence[int], cache_salt: str = "") -> None:
        self._token_ids = token_ids
        self._cache_salt = cache_salt
        self._chains: dict[tuple[bytes, int], list[bytes]] = {}

    def extended(self, output_ids: Sequence[int]) -> "PromptHashes":
        """Return the hashes of the prompt with an output behind it; those of the prompt aren't computed again."""
        token_ids: Sequence[int]
        if isinstance(self._token_ids, array):  # joined as such: a list of a long prompt takes longer than its hashes
            token_ids = self._token_ids + array("i", output_ids)
        else:
            token_ids = [*self._token_ids, *output_ids]
        longer = PromptHashes(token_ids, self._cache_salt)
        longer._chains = {key: list(chain) for key, chain in self._chains.items()}
        return longer

    def longest_computed(self) -> tuple[Sequence[bytes], int] | None:
        """Return the longest chain that was computed, with its block size; None if there is none."""
        chains = ((chain, block_size) for (_, block_size), chain in self._chains.items())
        return max(chains, key=lambda found: len(found[0]), default=None)

    def chain(self, root_hash: bytes, block_size: int, known: KnownChains | None = None) -> Sequence[bytes]:
        """Return the hashes of the full blocks; ``known``: those of earlier prompts, which may begin likewise."""
        self.extend(root_hash, block_size, known, len(self._token_ids))
        return self._chains[root_hash, block_size]

    def extend(self, root_hash: bytes, block_size: int, known: KnownChains | None, most: int) -> bool:
        """Compute at most ``most`` hashes that a chain lacks. Return whether it lacks none then."""
        chain = self._chains.setdefault((root_hash, block_size), [])
        num_blocks = (len(self._token_ids) - 1) // block_size
        end = min(num_blocks, len(chain) + most)
        if len(chain) < end:
            extend = extend_hashes if known is None else known.extend
            extend(chain, salted_root(root_hash, self._cache_salt), self._token_ids[: end * block_size], block_size)
        return end == num_blocks


class PrefixView:
    """The index of all workers' blocks."""

    def __init__(self) -> None:
        self.on_sent: Callable[[Party, list[bytes]], None] | None = None  # takes new blocks that a worker was sent
        self._holdings: dict[Party, _Holding] = {}
        self._parties: dict[int, Party] = {}  # by their bits
        self._roots: Counter[tuple[bytes, int]] = Counter()  # root and block size of the workers' chains
        self._announced = BlockIndex()
        self._sent = SentBlocks()
        self._chains = KnownChains()
        self._forgotten: dict[int, set[bytes]] = {}  # announced blocks that are still in the index, by former bits

    # ---- events ----

    def apply(self, batch: KVEventBatch) -> bool:
        """Apply a batch at once. Return False if an earlier batch is missing: the view then holds nothing of that
        worker until its next snapshot."""
        parts = self.apply_in_parts(batch)
        if parts is not None:
            deque(parts, maxlen=0)
        return parts is not None

    def apply_in_parts(self, batch: KVEventBatch) -> Iterator[int] | None:
        """Begin to apply a batch, as :meth:`apply` does; None if an earlier batch is missing. Iterating the result
        applies it part by part, and yields the number of blocks of each part; the worker's next batch comes after it.

        Of a worker with more than ``MAX_HASHES_PER_WORKER`` blocks, the view holds those that it announced first.
        """
        party = Party(batch.engine_id, batch.incarnation)
        known = self._holdings.get(party)
        if batch.is_snapshot:
            if known is not None and known.number == batch.number:
                return iter(())  # another subscriber has asked for it: the view has followed the events up to here
            self.forget(party)
            known = self._hold(party, batch.root_hash, batch.block_size)
        elif known is None or known.number is None:
            return iter(())  # the snapshot is on its way
        elif batch.number != known.number + 1:
            self.forget(party)
            return None
        known.number = batch.number
        return self._parts(known, batch.events)

    def _parts(self, known: _Holding, events: Sequence[KVEvent]) -> Iterator[int]:
        for event in events:
            for begin in range(0, len(event.hashes), HASHES_AT_ONCE):
                if known.is_forgotten:
                    return
                some = event.hashes[begin : begin + HASHES_AT_ONCE]
                self._apply_event(known, event.kind == "stored", some, event.tier)
                if self._forgotten:
                    self.tidy(len(some))
                yield len(some)

    def _apply_event(self, known: _Holding, is_stored: bool, hashes: Sequence[bytes], tier: str) -> None:
        if is_stored:
            room = MAX_HASHES_PER_WORKER - sum(known.sizes.values())
            self._put(known, hashes if len(hashes) <= room else hashes[: max(0, room)], tier)
            return
        self._take(known, hashes, tier)
        if tier == DEVICE:
            self._sent.take(known.bit, hashes)

    def note_sent(self, party: Party, root_hash: bytes, prompt: PromptHashes, block_size: int, num_blocks: int) -> None:
        """Take a prompt into account that ``party``, which has ``num_blocks`` blocks, was sent or has computed."""
        known = self._holdings.get(party) or self._hold(party, root_hash, block_size)
        chain = prompt.chain(known.root_hash, known.block_size, self._chains)
        new = self._sent.note(known.bit, chain, min(num_blocks, MAX_HASHES_PER_WORKER))
        if new and self.on_sent is not None:
            self.on_sent(party, new[::-1])

    def note_computed(self, party: Party, prompt: PromptHashes) -> None:
        """Note that ``party`` has computed a prompt that it was sent."""
        known = self._holdings.get(party)
        if known is not None:
            self._sent.note_computed(known.bit, prompt.chain(known.root_hash, known.block_size))

    def note_hashes(
        self, party: Party, root_hash: bytes, block_size: int, hashes: Sequence[bytes], num_blocks: int
    ) -> None:
        """Take blocks into account that another router has sent to ``party``, ends of prompts first."""
        known = self._holdings.get(party) or self._hold(party, root_hash, block_size)
        beginnings_first = list(dict.fromkeys(reversed(hashes)))
        self._sent.note(known.bit, beginnings_first, min(num_blocks, MAX_HASHES_PER_WORKER))

    def sent_to(self, party: Party, most: int) -> list[bytes]:
        """Return the blocks that a worker was sent, at most the ``most`` last ones, ends of prompts first."""
        known = self._holdings.get(party)
        return [] if known is None else self._sent.last(known.bit, most)

    def forget_sent(self) -> None:
        """Forget all that workers were sent and have not announced."""
        for known in self._holdings.values():
            self._sent.forget(known.bit)

    def forget(self, party: Party) -> None:
        """Forget all blocks of a worker."""
        known = self._holdings.pop(party, None)
        if known is not None:
            known.is_forgotten = True
            del self._parties[known.bit]
            self._roots -= Counter([(known.root_hash, known.block_size)])
            self._sent.forget(known.bit)
            self._forgotten[known.bit] = known.blocks
            if len(known.blocks) <= HASHES_AT_ONCE:
                self._remove(known.bit, len(known.blocks))

    def tidy(self, most: int) -> None:
        """Remove at most ``most`` blocks of forgotten workers from the index. No worker is found by them."""
        while most > 0 and self._forgotten:
            most -= self._remove(next(iter(self._forgotten)), most)

    def _remove(self, bit: int, most: int) -> int:
        """Remove at most ``most`` blocks of a forgotten worker; return their number."""
        blocks = self._forgotten[bit]
        some = [blocks.pop() for _ in range(min(most, len(blocks)))]
        self._announced.forget(bit, some)
        if not blocks:
            del self._forgotten[bit]
        return len(some)

    def _hold(self, party: Party, root_hash: bytes, block_size: int) -> _Holding:
        taken = self._parties.keys() | self._forgotten.keys()
        bit = next(1 << number for number in itertools.count() if 1 << number not in taken)
        self._parties[bit] = party
        self._roots[root_hash, block_size] += 1
        known = self._holdings[party] = _Holding(bit, root_hash, block_size)
        return known

    def _put(self, known: _Holding, block_hashes: Sequence[bytes], tier: str) -> None:
        added = self._announced.put(known.bit, block_hashes, tier)
        known.blocks.update(added)
        known.sizes[tier] = known.sizes.get(tier, 0) + len(added)

    def _take(self, known: _Holding, block_hashes: Sequence[bytes], tier: str) -> None:
        num_taken, gone = self._announced.take(known.bit, block_hashes, tier)
        if num_taken:
            known.sizes[tier] -= num_taken
            known.blocks.difference_update(gone)

    # ---- queries ----

    @property
    def hears_events(self) -> bool:
        """Return whether a worker announces its blocks."""
        return any(known.number is not None for known in self._holdings.values())

    def num_blocks(self, party: Party) -> Mapping[str, int]:
        """Return the number of a worker's blocks by tier, as its events say."""
        known = self._holdings.get(party)
        return {} if known is None else {tier: size for tier, size in known.sizes.items() if size}

    def num_computed(self, party: Party, prompt: PromptHashes, num_tokens: int) -> int:
        """Return how many of the first ``num_tokens`` tokens of a prompt, which a worker was sent, it has computed as
        far as is known. What it announces tells more."""
        known = self._holdings[party]
        chain = prompt.chain(known.root_hash, known.block_size)[: num_tokens // known.block_size]
        return self._sent.num_computed(known.bit, chain) * known.block_size

    def announces(self, party: Party) -> bool:
        """Return whether a worker tells by KV events what it holds."""
        known = self._holdings.get(party)
        return known is not None and known.number is not None

    def hash_in_parts(self, prompt: PromptHashes) -> Iterator[None]:
        """Hash a prompt's blocks as :meth:`matches` needs them. Yields where something else may be done in between."""
        for root_hash, block_size in tuple(self._roots):
            while not prompt.extend(root_hash, block_size, self._chains, HASHES_AT_ONCE):
                yield

    def matches(self, prompt: PromptHashes, *, certain: bool = False) -> dict[Party, PrefixMatch]:
        """Return the match of a prompt for each worker that holds some of it. ``certain``: count only blocks that the
        worker has announced."""
        found: dict[Party, PrefixMatch] = {}
        for root_hash, block_size in self._roots:
            chain = prompt.chain(root_hash, block_size, self._chains)
            sent = [(len(chain), 0)] if certain else self._sent.stretches(chain)
            for bit, (count, worth) in self._announced.leading(chain, sent).items():
                if bit in self._parties:  # else of a forgotten worker
                    found[self._parties[bit]] = PrefixMatch(count * block_size, round(worth * block_size))
        return found


def helper_of(worker: Party, matches: Mapping[Party, PrefixMatch], min_gain_tokens: int) -> Party | None:
    """Return the worker with the longest match; None unless it exceeds that of ``worker`` by ``min_gain_tokens``."""
    own = matches.get(worker, PrefixMatch(0, 0)).num_tokens
    best = max(
        (party for party in matches if party != worker),
        key=lambda party: (matches[party].num_tokens, matches[party].worth_tokens, party.engine_id),
        default=None,
    )
    return best if best is not None and matches[best].num_tokens - own >= min_gain_tokens else None
