"""Locations of prefixes: one view of the blocks that all workers hold, on the device and in every tier, built from KV
events.

The view is a hint: a block may be evicted before a request needs it; its KV is then computed. Pure: no I/O, no clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from splitserve.protocol.block_hash import extend_hashes, salted_root
from splitserve.protocol.kv_event_batch import DEVICE, KVEventBatch
from splitserve.protocol.request import Party

TIER_WORTH = {DEVICE: 1.0, "host": 0.9, "disk": 0.6}
"""Worth of a block in a tier, relative to one on the device, which costs nothing to use; the highest is preferred."""
OTHER_WORTH = 0.5
MAX_HASHES_PER_WORKER = 1 << 20
MIN_GAIN_BLOCKS = 2
"""Least gain for which a worker reads from another one, since the request takes a round trip."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The leading part of a prompt that a worker holds, in any tier."""

    num_tokens: int
    worth_tokens: int  # num_tokens weighted by ``TIER_WORTH``


@dataclass(slots=True)
class _Holding:
    """Blocks of one worker."""

    root_hash: bytes
    block_size: int
    number: int  # of the last batch
    tiers: dict[str, set[bytes]] = field(default_factory=dict)  # block hashes by tier

    def match(self, chain: Sequence[bytes]) -> PrefixMatch:
        best_first = sorted(
            ((TIER_WORTH.get(tier, OTHER_WORTH), hashes) for tier, hashes in self.tiers.items()),
            key=lambda of_tier: -of_tier[0],
        )
        worth, count = 0.0, 0
        for block_hash in chain:
            for worth_here, hashes in best_first:
                if block_hash in hashes:
                    worth, count = worth + worth_here, count + 1
                    break
            else:
                break
        return PrefixMatch(count * self.block_size, round(worth * self.block_size))


class PromptHashes:
    """Hashes of a prompt's full blocks, computed once per block size and root. The last token's block is left out,
    since it is always computed. ``cache_salt``: that of the request."""

    def __init__(self, token_ids: Sequence[int], cache_salt: str = "") -> None:
        self._token_ids = token_ids
        self._cache_salt = cache_salt
        self._chains: dict[tuple[bytes, int], list[bytes]] = {}

    def chain(self, root_hash: bytes, block_size: int) -> Sequence[bytes]:
        chain = self._chains.get((root_hash, block_size))
        if chain is None:
            chain = self._chains[root_hash, block_size] = []
            extend_hashes(chain, salted_root(root_hash, self._cache_salt), self._token_ids[:-1], block_size)
        return chain


class PrefixView:
    def __init__(self) -> None:
        self._holdings: dict[Party, _Holding] = {}

    def apply(self, batch: KVEventBatch) -> bool:
        """Apply a batch. Return False if an earlier batch is missing, or the worker has too many blocks: the view then
        holds nothing of that worker until its next snapshot."""
        party = Party(batch.engine_id, batch.incarnation)
        known = self._holdings.get(party)
        if batch.is_snapshot:
            known = self._holdings[party] = _Holding(batch.root_hash, batch.block_size, batch.number)
        elif known is None:
            return True  # the snapshot is on its way
        elif batch.number != known.number + 1:
            self.forget(party)
            return False
        known.number = batch.number
        for event in batch.events:
            hashes = known.tiers.setdefault(event.tier, set())
            if event.kind == "stored":
                hashes.update(event.hashes)
            else:
                hashes.difference_update(event.hashes)
        if sum(map(len, known.tiers.values())) > MAX_HASHES_PER_WORKER:
            self.forget(party)
            return False
        return True

    def forget(self, party: Party) -> None:
        self._holdings.pop(party, None)

    def num_blocks(self, party: Party) -> Mapping[str, int]:
        """Return the number of a worker's blocks by tier."""
        known = self._holdings.get(party)
        return {} if known is None else {tier: len(hashes) for tier, hashes in known.tiers.items()}

    def matches(self, prompt: PromptHashes) -> dict[Party, PrefixMatch]:
        """Return the match of a prompt for each worker that holds some of it."""
        found: dict[Party, PrefixMatch] = {}
        for party, holding in self._holdings.items():
            match = holding.match(prompt.chain(holding.root_hash, holding.block_size))
            if match.num_tokens:
                found[party] = match
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
