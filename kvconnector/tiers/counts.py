"""What each tier has done since start, for /metrics."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from splitserve.kvconnector.tiers.index import TierIndex
from splitserve.protocol.messages.membership import TierLoad


@dataclass(slots=True)
class TierCounts:
    """In blocks, but for ``failures``, which are copies, and seconds, which are what copies took.

    ``hits``: asked for, and here; ``misses``: asked for, not on the device and not here. Of the first of several tiers
    that has a block it's a hit, of those before it a miss, and those behind it aren't asked.
    """

    hits: int = 0
    misses: int = 0
    stored_blocks: int = 0
    loaded_blocks: int = 0
    evicted_blocks: int = 0
    failures: int = 0
    store_seconds: float = 0.0
    load_seconds: float = 0.0

    def add_copy(self, *, is_load: bool, num_good: int, seconds: float, failed: bool) -> None:
        self.failures += failed
        if is_load:
            self.loaded_blocks += num_good
            self.load_seconds += seconds
        else:
            self.stored_blocks += num_good
            self.store_seconds += seconds

    def report(self, name: str, index: TierIndex | None, block_bytes: int) -> TierLoad:
        """For the heartbeat; no ``index``: nobody knows how much is there."""
        return TierLoad(
            name=name,
            slots=index.num_slots if index is not None else 0,
            blocks=len(index) if index is not None else 0,
            stored_bytes=self.stored_blocks * block_bytes,
            loaded_bytes=self.loaded_blocks * block_bytes,
            **asdict(self),
        )


@dataclass(slots=True)
class TierCounters:
    """Totals since start, over all tiers. Names as in :class:`splitserve.protocol.messages.membership.WorkerLoad`."""

    tier_stored_blocks: int = 0
    tier_loaded_blocks: int = 0
    tier_failures: int = 0


def count_lookups(asked: Sequence[TierCounts], found_in: Sequence[TierCounts], num_wanted: int) -> None:
    """Of ``num_wanted`` blocks that a request needs and that aren't on the device; ``asked``: in the order in which
    tiers are. ``found_in``: where the first of the blocks are. Behind them there is a gap: nothing more can be used."""
    num_left = num_wanted
    for counts in asked:
        num_hits = sum(1 for each in found_in if each is counts)
        num_left -= num_hits
        counts.hits += num_hits
        counts.misses += num_left
