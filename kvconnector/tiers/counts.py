"""Counts of each tier since start, for /metrics."""

from collections.abc import Sequence

import msgspec

from splitserve.kvconnector.tiers.index import TierIndex
from splitserve.protocol.counters import TierCounters, TierLoad


class TierStatistics(TierCounters, kw_only=True):
    """Counters of one tier, and how copies add to them."""

    def add_copy(self, *, is_load: bool, num_good: int, seconds: float, failed: bool) -> None:
        self.failures += failed
        if is_load:
            self.loaded_blocks += num_good
            self.load_seconds += seconds
        else:
            self.stored_blocks += num_good
            self.store_seconds += seconds

    def report(self, name: str, index: TierIndex | None, block_bytes: int) -> TierLoad:
        """Return the counts for the heartbeat; ``index`` is None if the amount stored is unknown. ``block_bytes``: of a
        block, over all ranks."""
        return TierLoad(
            name=name,
            slots=index.num_slots if index is not None else 0,
            blocks=len(index) if index is not None else 0,
            stored_bytes=self.stored_blocks * block_bytes,
            loaded_bytes=self.loaded_blocks * block_bytes,
            **msgspec.structs.asdict(self),
        )


def count_lookups(asked: Sequence[TierStatistics], found_in: Sequence[TierStatistics], num_wanted: int) -> None:
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
