"""Locations of prefixes: one index of the blocks that all workers hold, on the device and in every tier.

Workers tell by KV events what they hold. What this router sent to a worker counts as well, until the worker's memory
must be full of later prompts, or an event says that it is gone: so requests of a conversation find each other where
events are off, and before an event has come.

The index is a hint: a block may be evicted before a request needs it; its KV is then computed. Pure: no I/O, no clock.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from splitserve.protocol.block_hash import extend_hashes, salted_root
from splitserve.protocol.kv_event_batch import DEVICE, KVEvent, KVEventBatch
from splitserve.protocol.request import Party

TIER_WORTH = {DEVICE: 1.0, "host": 0.9, "disk": 0.6}
"""Worth of a block in a tier, relative to one on the device, which costs nothing to use; the highest is preferred."""
OTHER_WORTH = 0.5
MAX_HASHES_PER_WORKER = 1 << 20
MIN_GAIN_BLOCKS = 2
"""Least gain for which a worker reads from another one, since the request takes a round trip."""
SENT = "sent"
"""The tier of blocks that a worker was sent and has not announced; they are taken to be on its device."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The leading part of a prompt that a worker holds, in any tier."""

    num_tokens: int
    worth_tokens: int  # num_tokens weighted by ``TIER_WORTH``


@dataclass(slots=True)
class _Holding:
    """Blocks of one worker: the root and size of its chains, and the tiers of each block."""

    root_hash: bytes
    block_size: int
    number: int | None = None  # of the last batch of events; None: there was none
    sizes: dict[str, int] = field(default_factory=dict)  # number of blocks by tier
    sent: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # the longest unused ones first
    blocks: set[bytes] = field(default_factory=set)  # in any tier


@dataclass(slots=True)
class _Block:
    """One block: the tiers of each worker that has it. ``lesser``: its worth where that is below 1."""

    tiers: dict[Party, set[str]] = field(default_factory=dict)
    lesser: dict[Party, float] = field(default_factory=dict)
    only_sent: set[Party] = field(default_factory=set)

    def judge(self, party: Party) -> None:
        """Note what a worker's tiers are worth, after a change."""
        tiers = self.tiers.get(party, ())
        worth = max((1.0 if tier == SENT else TIER_WORTH.get(tier, OTHER_WORTH) for tier in tiers), default=1.0)
        self.lesser.pop(party, None)
        self.only_sent.discard(party)
        if worth < 1.0:
            self.lesser[party] = worth
        if len(tiers) == 1 and SENT in tiers:
            self.only_sent.add(party)


class PromptHashes:
    """Hashes of a prompt's full blocks, computed once per block size and root. The last token's block is left out,
    since it is always computed. ``cache_salt``: that of the request."""

    def __init__(self, token_ids: Sequence[int], cache_salt: str = "") -> None:
        self._token_ids = token_ids
        self._cache_salt = cache_salt
        self._chains: dict[tuple[bytes, int], list[bytes]] = {}

    def extended(self, output_ids: Sequence[int]) -> "PromptHashes":
        """Return the hashes of the prompt with an output behind it; those of the prompt aren't computed again."""
        longer = PromptHashes([*self._token_ids, *output_ids], self._cache_salt)
        longer._chains = {key: list(chain) for key, chain in self._chains.items()}
        return longer

    def longest_computed(self) -> tuple[Sequence[bytes], int] | None:
        """Return the longest chain that was computed, with its block size; None if there is none."""
        chains = ((chain, block_size) for (_, block_size), chain in self._chains.items())
        return max(chains, key=lambda found: len(found[0]), default=None)

    def chain(self, root_hash: bytes, block_size: int) -> Sequence[bytes]:
        chain = self._chains.setdefault((root_hash, block_size), [])
        if len(chain) < (len(self._token_ids) - 1) // block_size:
            extend_hashes(chain, salted_root(root_hash, self._cache_salt), self._token_ids[:-1], block_size)
        return chain


class PrefixView:
    """The index of all workers' blocks."""

    def __init__(self) -> None:
        self._holdings: dict[Party, _Holding] = {}
        self._blocks: dict[bytes, _Block] = {}

    # ---- events ----

    def apply(self, batch: KVEventBatch) -> bool:
        """Apply a batch. Return False if an earlier batch is missing, or the worker has too many blocks: the view then
        holds nothing of that worker until its next snapshot."""
        party = Party(batch.engine_id, batch.incarnation)
        known = self._holdings.get(party)
        if batch.is_snapshot:
            self.forget(party)
            known = self._holdings[party] = _Holding(batch.root_hash, batch.block_size, batch.number)
        elif known is None or known.number is None:
            return True  # the snapshot is on its way
        elif batch.number != known.number + 1:
            self.forget(party)
            return False
        known.number = batch.number
        for event in batch.events:
            self._apply_event(party, known, event)
        if sum(known.sizes.values()) > MAX_HASHES_PER_WORKER:
            self.forget(party)
            return False
        return True

    def _apply_event(self, party: Party, known: _Holding, event: KVEvent) -> None:
        if event.kind == "stored":
            for block_hash in event.hashes:
                self._put(party, known, block_hash, event.tier)
            return
        for block_hash in event.hashes:
            self._take(party, known, block_hash, event.tier)
            if event.tier == DEVICE and known.sent.pop(block_hash, SENT) is None:
                self._take(party, known, block_hash, SENT)

    def note_sent(self, party: Party, root_hash: bytes, prompt: PromptHashes, block_size: int, num_blocks: int) -> None:
        """Take a prompt into account that ``party``, which has ``num_blocks`` blocks, was sent or has computed."""
        known = self._holdings.get(party)
        if known is None:
            known = self._holdings[party] = _Holding(root_hash, block_size)
        chain = prompt.chain(known.root_hash, known.block_size)
        for block_hash in reversed(chain):  # so that the end of a prompt is forgotten before its beginning
            if block_hash in known.sent:
                known.sent.move_to_end(block_hash)
            else:
                known.sent[block_hash] = None
                self._put(party, known, block_hash, SENT)
        while len(known.sent) > min(num_blocks, MAX_HASHES_PER_WORKER):
            self._take(party, known, known.sent.popitem(last=False)[0], SENT)

    def forget(self, party: Party) -> None:
        """Forget all blocks of a worker."""
        known = self._holdings.pop(party, None)
        for block_hash in () if known is None else known.blocks:
            self._blocks[block_hash].tiers.pop(party)
            self._settle(party, block_hash)

    def _put(self, party: Party, known: _Holding, block_hash: bytes, tier: str) -> None:
        block = self._blocks.setdefault(block_hash, _Block())
        tiers = block.tiers.setdefault(party, set())
        if tier in tiers:
            return
        tiers.add(tier)
        known.blocks.add(block_hash)
        known.sizes[tier] = known.sizes.get(tier, 0) + 1
        block.judge(party)

    def _take(self, party: Party, known: _Holding, block_hash: bytes, tier: str) -> None:
        if block_hash not in known.blocks or tier not in self._blocks[block_hash].tiers[party]:
            return
        tiers = self._blocks[block_hash].tiers
        tiers[party].remove(tier)
        known.sizes[tier] -= 1
        if not tiers[party]:
            del tiers[party]
            known.blocks.remove(block_hash)
        self._settle(party, block_hash)

    def _settle(self, party: Party, block_hash: bytes) -> None:
        block = self._blocks[block_hash]
        block.judge(party)
        if not block.tiers:
            del self._blocks[block_hash]

    # ---- queries ----

    def num_blocks(self, party: Party) -> Mapping[str, int]:
        """Return the number of a worker's blocks by tier, as its events say."""
        known = self._holdings.get(party)
        return {} if known is None else {tier: size for tier, size in known.sizes.items() if tier != SENT and size}

    def matches(self, prompt: PromptHashes, *, certain: bool = False) -> dict[Party, PrefixMatch]:
        """Return the match of a prompt for each worker that holds some of it. ``certain``: count only blocks that the
        worker has announced."""
        found: dict[Party, PrefixMatch] = {}
        for root_hash, block_size in {(known.root_hash, known.block_size) for known in self._holdings.values()}:
            worths = self._worths(prompt.chain(root_hash, block_size), certain=certain)
            for party, (count, worth) in worths.items():
                found[party] = PrefixMatch(count * block_size, round(worth * block_size))
        return found

    def _worths(self, chain: Iterable[bytes], *, certain: bool) -> dict[Party, tuple[int, float]]:
        """Return the number of leading blocks of ``chain`` that each worker holds, and their worth, in one pass: what a
        block costs does not depend on the number of workers that hold it on their device."""
        counts: dict[Party, int] = {}
        lost: dict[Party, float] = {}  # worth that blocks in lower tiers lack
        left: set[Party] = set()  # workers that hold all blocks so far
        number = 0
        for number, block_hash in enumerate(chain):
            block = self._blocks.get(block_hash)
            holders: Set[Party] = frozenset() if block is None else block.tiers.keys()
            if block is not None and certain:
                holders = holders - block.only_sent
            before = left if number else set(holders)
            left = before & holders
            counts |= dict.fromkeys(before - left, number)
            if block is None or not left:
                break
            for party, worth in block.lesser.items():
                if party in left:
                    lost[party] = lost.get(party, 0.0) + 1.0 - worth
        else:
            counts |= dict.fromkeys(left, number + 1)
        return {party: (count, count - lost.get(party, 0.0)) for party, count in counts.items() if count}


def helper_of(worker: Party, matches: Mapping[Party, PrefixMatch], min_gain_tokens: int) -> Party | None:
    """Return the worker with the longest match; None unless it exceeds that of ``worker`` by ``min_gain_tokens``."""
    own = matches.get(worker, PrefixMatch(0, 0)).num_tokens
    best = max(
        (party for party in matches if party != worker),
        key=lambda party: (matches[party].num_tokens, matches[party].worth_tokens, party.engine_id),
        default=None,
    )
    return best if best is not None and matches[best].num_tokens - own >= min_gain_tokens else None
