"""Where prefixes are: one view of what all workers hold, on the device and in every tier, added up from KV events.

It's a hint. What it says may be gone by the time a request comes; then the KV is computed. Pure: no I/O, no clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from splitserve.protocol.block_hash import extend_hashes
from splitserve.protocol.kv_event_batch import DEVICE, KVEventBatch
from splitserve.protocol.request import Party

TIER_WORTH = {DEVICE: 1.0, "host": 0.9, "disk": 0.6}
"""What a block there is worth, as a share of one on the device, which costs nothing: the cheaper place comes first."""
OTHER_WORTH = 0.5
MAX_HASHES_PER_WORKER = 1 << 20
MIN_GAIN_BLOCKS = 2
"""A worker asks another one for no less: asking takes a round trip."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How much of a prompt a worker holds from its beginning on, wherever; ``worth_tokens``: by what it costs."""

    num_tokens: int
    worth_tokens: int


@dataclass(slots=True)
class _Holding:
    """What one worker holds. ``number`` of the last batch; ``tiers``: hashes by tier."""

    root_hash: bytes
    block_size: int
    number: int
    tiers: dict[str, set[bytes]] = field(default_factory=dict)

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
    """The hashes of a prompt's full blocks, made once for each block size and root. Its last token's block is always
    computed, so it isn't among them."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._chains: dict[tuple[bytes, int], list[bytes]] = {}

    def chain(self, root_hash: bytes, block_size: int) -> Sequence[bytes]:
        chain = self._chains.get((root_hash, block_size))
        if chain is None:
            chain = self._chains[root_hash, block_size] = []
            extend_hashes(chain, root_hash, self._token_ids[:-1], block_size)
        return chain


class PrefixView:
    def __init__(self) -> None:
        self._holdings: dict[Party, _Holding] = {}

    def apply(self, batch: KVEventBatch) -> bool:
        """Take a batch in. False if one before it is missing, or if there's too much: nothing is known of that worker
        until its next snapshot."""
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
        """By tier."""
        known = self._holdings.get(party)
        return {} if known is None else {tier: len(hashes) for tier, hashes in known.tiers.items()}

    def matches(self, prompt: PromptHashes) -> dict[Party, PrefixMatch]:
        """Of a prompt, by the workers that hold some of it."""
        found: dict[Party, PrefixMatch] = {}
        for party, holding in self._holdings.items():
            match = holding.match(prompt.chain(holding.root_hash, holding.block_size))
            if match.num_tokens:
                found[party] = match
        return found


def helper_of(worker: Party, matches: Mapping[Party, PrefixMatch], min_gain_tokens: int) -> Party | None:
    """Who has the most of a prefix, if that is so much more than ``worker`` has that it's worth asking."""
    own = matches.get(worker, PrefixMatch(0, 0)).num_tokens
    best = max(
        (party for party in matches if party != worker),
        key=lambda party: (matches[party].num_tokens, matches[party].worth_tokens, party.engine_id),
        default=None,
    )
    return best if best is not None and matches[best].num_tokens - own >= min_gain_tokens else None
