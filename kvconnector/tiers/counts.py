"""Counts of each tier since start, for /metrics."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from splitserve.kvconnector.tiers.index import TierIndex
from splitserve.protocol.messages.membership import TierLoad


@dataclass(slots=True)
class TierCounts:
    """Counts of one tier, in blocks unless noted.

    A lookup asks the tiers in order, and ends at the first tier that has the block: a hit there, a miss in the tiers
    before it, and not counted in the tiers behind it.
    """

    hits: int = 0  # requested, and found here
    misses: int = 0  # requested, not on the device and not found here
    stored_blocks: int = 0
    loaded_blocks: int = 0
    evicted_blocks: int = 0
    failures: int = 0  # copies
    store_seconds: float = 0.0  # durations of copies, added up
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
        """Return the counts for the heartbeat; ``index`` is None if the amount stored is unknown."""
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
    """Count hits and misses of ``num_wanted`` blocks that a request needs and that are not on the device.

    ``asked``: all tiers in lookup order. ``found_in``: the tiers of the leading blocks; after them is a gap, so no
    further block can be used.
    """
    num_left = num_wanted
    for counts in asked:
        num_hits = sum(1 for each in found_in if each is counts)
        num_left -= num_hits
        counts.hits += num_hits
        counts.misses += num_left
