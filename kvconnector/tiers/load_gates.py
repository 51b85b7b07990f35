"""Gates at which steps wait on the device for a load's last copies: which layers of which loads are queued for copying.

A load is copied one group of layers after another. The step that needs its blocks can then run concurrently: before the
first layer of a group, the step's stream waits for the event behind that group's copies. The last groups are small,
because their computation is what remains when the last bytes have landed.

The thread that queues copies and the one that launches the step share one :class:`LoadGates`. A launch waits until a
group's copies are queued, so that nothing on the device ever waits for copies that no thread has queued yet.
"""

import itertools
import threading
from typing import NamedTuple

import torch


class LayerGroup(NamedTuple):
    first_layer: int
    num_layers: int


def layer_groups(num_layers: int) -> list[LayerGroup]:
    """Return groups of at most a quarter of all layers, the last ones ever smaller: 8, 8, 8, 4, 2, 1, 1 of 32. The
    first group takes the remainder."""
    sizes: list[int] = []
    while (left := num_layers - sum(sizes)) > 0:
        sizes.append(min(left, max(1, num_layers // 4), max(1, sum(sizes))))
    sizes.reverse()
    firsts = itertools.accumulate(sizes, initial=0)
    return [LayerGroup(first, size) for first, size in zip(firsts, sizes, strict=False)]


class LoadGates:
    """Gates of the loads of one worker with ``num_layers`` layers, by copy id."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.groups = layer_groups(num_layers)
        self._changed = threading.Condition()
        self._events: dict[int, dict[int, torch.cuda.Event]] = {}  # of open loads: by first layer of a group

    @property
    def first_layers(self) -> list[int]:
        """First layer of each group."""
        return [group.first_layer for group in self.groups]

    # ---- the copying thread ----

    def open(self, copy_id: int) -> None:
        """Open a load's gates: steps may wait for it from now on."""
        with self._changed:
            self._events[copy_id] = {}

    def queued(self, copy_id: int, group: LayerGroup, event: torch.cuda.Event) -> None:
        """Record that all copies of a group are queued, with ``event`` behind them."""
        with self._changed:
            self._events[copy_id][group.first_layer] = event
            self._changed.notify_all()

    def close(self, copy_id: int) -> None:
        """Close the gates of a load that ended, successfully or not: no step waits for it any more."""
        with self._changed:
            del self._events[copy_id]
            self._changed.notify_all()

    # ---- the launching thread ----

    def event(self, copy_id: int, first_layer: int) -> torch.cuda.Event | None:
        """Return the event that the group beginning at ``first_layer`` must wait for, once its copies are queued; None
        if the load has ended."""
        with self._changed:
            self._changed.wait_for(lambda: copy_id not in self._events or first_layer in self._events[copy_id])
            return self._events.get(copy_id, {}).get(first_layer)
