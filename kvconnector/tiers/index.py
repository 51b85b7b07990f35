"""Index of a tier below the device: the content of each slot, its use, the eviction order. No I/O, no clock.

A slot is in exactly one state:

    free      its content is worthless
    storing   a copy into it is in flight; lookups do not find it
    ready     lookups by its hash find it; the least recently used one is evicted first
    pinned    ready, and copies out of it are in flight, or peers may be reading it: it can't be evicted
    doomed    forgotten while a copy touches it; free when that copy ends
    aside     free, but the tier, which has less room than slots, has none for its content

Slots that peers may read have generations, like blocks of the device: a slot's generation advances when the slot is
taken for new content, before anything is written to it.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from splitserve.kvconnector.blocks.pool import GENERATION_MASK


class BlockLocation(NamedTuple):
    """A slot to store into. ``evicted``: the hash of its content until now, if any."""

    slot: int
    evicted: bytes | None


class TierIndex:
    """Index of ``num_slots`` slots for one block each.

    ``generations``: uint64 ``[num_slots]``, in memory that peers read and with a start that is random per incarnation;
    None if peers can't read the tier.
    """

    def __init__(self, num_slots: int, generations: npt.NDArray[np.uint64] | None = None) -> None:
        self.num_slots = num_slots
        self._generations = generations
        self._free = list(range(num_slots - 1, -1, -1))
        self._aside: list[int] = []
        self._ready: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._storing: dict[bytes, int] = {}
        self._pins: Counter[int] = Counter()
        self._num_ready_pinned = 0
        self._doomed: set[int] = set()

    # ---- finding ----

    def __contains__(self, block_hash: bytes) -> bool:
        """Return whether the content can be loaded from this tier."""
        return block_hash in self._ready

    def __len__(self) -> int:
        return len(self._ready)

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Mark a chain as used: its blocks are evicted last, and among them the end of the chain before its
        beginning."""
        for block_hash in reversed(hashes):
            if block_hash in self._ready:
                self._ready.move_to_end(block_hash)

    # ---- storing ----

    def begin_store(self, block_hash: bytes) -> BlockLocation | None:
        """Return a slot for new content: a free one, otherwise that of the least recently used content that is not
        pinned.

        Return None if the content is here or is being stored already, or if every slot is in use.
        """
        if block_hash in self._ready or block_hash in self._storing:
            return None
        evicted = None
        if not self._free:
            evicted = self._least_recently_used()
            if evicted is None:
                return None
            self._free.append(self._ready.pop(evicted))
        slot = self._free.pop()
        if self._generations is not None:
            self._generations[slot] = (int(self._generations[slot]) + 1) & GENERATION_MASK
        self._storing[block_hash] = slot
        return BlockLocation(slot, evicted)

    def _least_recently_used(self) -> bytes | None:
        """Return the content to evict; None if all is pinned. Pinned content is in use: what is found before it moves
        to the end, or each store would search through all of it again."""
        if self._num_ready_pinned == len(self._ready):
            return None
        while True:
            block_hash, slot = next(iter(self._ready.items()))
            if slot not in self._pins:
                return block_hash
            self._ready.move_to_end(block_hash)

    def finish_store(self, block_hash: bytes, slot: int, *, is_good: bool) -> bool:
        """End the copy into a slot. Return whether lookups find the content from now on."""
        if slot in self._doomed:
            self._doomed.remove(slot)
            self._free.append(slot)
            return False
        assert self._storing[block_hash] == slot, "a store ends in another slot than it began in"
        del self._storing[block_hash]
        if is_good:
            self._ready[block_hash] = slot
        else:
            self._free.append(slot)
        return is_good

    def set_free_aside(self) -> None:
        """Use no free slot until :meth:`take_back`, unless there are no others: the tier lacks room for more content
        than it has."""
        if self._ready:
            self._aside += self._free
            self._free.clear()

    def take_back(self) -> None:
        """Use all free slots again."""
        self._free += self._aside
        self._aside.clear()

    def adopt(self, contents: Sequence[tuple[bytes, int]]) -> None:
        """Add the contents found at start, as hashes and slots, least recently used first."""
        self._ready.update(contents)
        taken = {slot for _, slot in contents}
        self._free = [slot for slot in self._free if slot not in taken]

    # ---- loading ----

    @property
    def is_served(self) -> bool:
        """True if peers may read this tier."""
        return self._generations is not None

    def generation(self, slot: int) -> int:
        assert self._generations is not None, "a slot that no peer reads"
        return int(self._generations[slot])

    def pin(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the slots of contents that are here: they stay until :meth:`unpin`."""
        slots = [self._ready[block_hash] for block_hash in hashes]
        num_pinned = len(self._pins)
        self._pins.update(slots)
        self._num_ready_pinned += len(self._pins) - num_pinned
        return slots

    def unpin(self, slots: Iterable[int]) -> None:
        for slot in slots:
            pins = self._pins.pop(slot, 0)
            assert pins > 0, f"slot {slot} is unpinned more often than it was pinned"
            if pins > 1:
                self._pins[slot] = pins - 1
            elif slot in self._doomed:
                self._doomed.remove(slot)
                self._free.append(slot)
            else:
                self._num_ready_pinned -= 1

    # ---- forgetting ----

    def forget(self, block_hash: bytes) -> bool:
        """Remove content that is damaged or lost. Return whether lookups could find it before."""
        slot = self._ready.pop(block_hash, None)
        if slot is None:
            return False
        if slot in self._pins:
            self._doomed.add(slot)
            self._num_ready_pinned -= 1
        else:
            self._free.append(slot)
        return True

    def clear(self) -> list[bytes]:
        """Forget everything, including stores in flight. Return the hashes that lookups could find before."""
        forgotten = list(self._ready)
        for block_hash in forgotten:
            self.forget(block_hash)
        self._doomed.update(self._storing.values())
        self._storing.clear()
        self.take_back()
        return forgotten

    # ---- looking at it ----

    @property
    def num_in_use(self) -> int:
        """Slots that a copy touches."""
        return len(self._storing) + len(self._pins) + sum(1 for slot in self._doomed if slot not in self._pins)

    def hashes(self) -> list[bytes]:
        """Return all hashes that lookups find, least recently used first."""
        return list(self._ready)

    def contents(self) -> list[tuple[bytes, int]]:
        """Return all hashes that lookups find, with their slots, least recently used first."""
        return list(self._ready.items())

    def check_invariants(self) -> None:
        """Raise AssertionError unless every slot is in one state."""
        content = (list(self._ready.values()), list(self._storing.values()))
        groups = (self._free, self._aside, list(self._doomed), *content)
        slots = [slot for group in groups for slot in group]
        assert len(slots) == self.num_slots, "a slot is in no state, or in two"
        assert set(slots) == set(range(self.num_slots)), "a slot is in no state"
        assert not self._ready.keys() & self._storing.keys(), "content is stored twice"
        assert all(count > 0 for count in self._pins.values()), "a slot has a pin count below 1"
        assert set(self._pins) <= set(self._ready.values()) | self._doomed, "a slot without content is pinned"
        num_pinned = len(self._pins.keys() & set(self._ready.values()))
        assert self._num_ready_pinned == num_pinned, "the count of pinned contents is wrong"
