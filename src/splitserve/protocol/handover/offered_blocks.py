"""Decode's record of a group's offered blocks: their locations, which are read, which are verified. No I/O.

A block may move while it's on offer: a later revision of the offer names another location. A read of the old location
counts if the generation found after the data is still the one that was offered there. If not, the whole read is
discarded, and is due again once every block that changed has another location.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.protocol.messages.handover import OfferedBlock


@dataclass(frozen=True, slots=True)
class DiscardedRead:
    """A read that found other generations than were offered, at ``positions`` of it; ``first_index`` counts from the
    group's first offered block. An offer with other locations may arrive until ``deadline``."""

    first_index: int
    remote: Sequence[OfferedBlock]
    positions: Sequence[int]
    deadline: float


class OfferedBlocks:
    """The blocks of one group in a hand-over, by their index from its first one on; ``num_wanted`` at most."""

    def __init__(self, num_wanted: int) -> None:
        self.revision = 0
        self.num_posted = 0
        self.num_repeated = 0
        self.num_verified = 0  # without a gap
        self._locations: list[OfferedBlock] = []
        self._is_verified = [False] * num_wanted
        self._discarded: list[DiscardedRead] = []
        self._again: deque[tuple[int, int]] = deque()  # first index and number of blocks

    def __len__(self) -> int:
        return len(self._locations)

    def problem_with(self, start: int, blocks: Sequence[OfferedBlock], revision: int) -> str | None:
        """Return why an offer from index ``start`` on contradicts the earlier ones, in words, or None."""
        known = self._locations[start : start + len(blocks)]
        if revision == self.revision and known != list(blocks[: len(known)]):
            return "it contradicts an earlier one"
        if revision > self.revision and start + len(blocks) < len(self._locations):
            return f"it names {start + len(blocks)} blocks; an earlier one named {len(self._locations)}"
        return None

    def learn(self, start: int, blocks: Sequence[OfferedBlock], revision: int) -> None:
        """Take an offer in that isn't overtaken and leaves no gap. Discarded reads may be due again."""
        self._locations[start:] = [*blocks, *self._locations[start + len(blocks) :]]
        self.revision = revision
        self._find_moved()

    # ---- reading ----

    @property
    def can_post(self) -> bool:
        """Return whether some blocks have yet to be read that no read in flight covers."""
        return bool(self._again) or self.num_posted < len(self._locations)

    def next_range(self, most: int) -> tuple[int, list[OfferedBlock]]:
        """Return first index and locations of the next blocks to read, at most ``most`` of those not read before."""
        if self._again:
            first, count = self._again.popleft()
            self.num_repeated += 1
        else:
            first, count = self.num_posted, min(len(self._locations) - self.num_posted, most)
            self.num_posted += count
        return first, self._locations[first : first + count]

    def verify(self, first: int, count: int) -> None:
        self._is_verified[first : first + count] = [True] * count
        while self.num_verified < len(self._is_verified) and self._is_verified[self.num_verified]:
            self.num_verified += 1

    def is_verified(self, index: int) -> bool:
        return self._is_verified[index]

    def discard(self, read: DiscardedRead) -> None:
        self._discarded.append(read)
        self._find_moved()

    @property
    def discarded(self) -> Sequence[DiscardedRead]:
        """Discarded reads whose blocks have no other known location."""
        return self._discarded

    def _find_moved(self) -> None:
        for read in list(self._discarded):
            locations = self._locations[read.first_index :]
            if all(locations[position] != read.remote[position] for position in read.positions):
                self._discarded.remove(read)
                self._again.append((read.first_index, len(read.remote)))
