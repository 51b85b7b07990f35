"""Steps that wait on the device for a load's last copies: which layers of which loads are queued for copying.

A load that is copied a group of layers at a time, group after group, lets the step that needs its blocks run beside it:
before the first layer of a group the step's stream waits for the event behind that group's copies. The last groups are
small, since they are what is left to compute when the last bytes are here.

The thread that queues copies and the one that launches the step share one :class:`LoadGates`. A launch waits until a
group's copies are queued, so that nothing on the device ever waits for what no thread has queued yet.
"""

import itertools
import threading
from typing import NamedTuple

import torch


class LayerGroup(NamedTuple):
    first_layer: int
    num_layers: int


def layer_groups(num_layers: int) -> list[LayerGroup]:
    """A quarter of all layers each, the last ones ever smaller: 8, 8, 8, 4, 2, 1, 1 of 32. The first one takes what is
    left over."""
    sizes: list[int] = []
    while (left := num_layers - sum(sizes)) > 0:
        sizes.append(min(left, max(1, num_layers // 4), max(1, sum(sizes))))
    sizes.reverse()
    firsts = itertools.accumulate(sizes, initial=0)
    return [LayerGroup(first, size) for first, size in zip(firsts, sizes, strict=False)]


class LoadGates:
    """Of the loads of one worker with so many layers, by the ids of their copies."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.groups = layer_groups(num_layers)
        self._changed = threading.Condition()
        self._events: dict[int, dict[int, torch.cuda.Event]] = {}  # of open loads: by first layers

    @property
    def first_layers(self) -> list[int]:
        """Of each group."""
        return [group.first_layer for group in self.groups]

    # ---- who copies ----

    def open(self, copy_id: int) -> None:
        """The load begins: steps may wait for it from now on."""
        with self._changed:
            self._events[copy_id] = {}

    def queued(self, copy_id: int, group: LayerGroup, event: torch.cuda.Event) -> None:
        """All copies of a group are queued, and ``event`` was recorded behind them."""
        with self._changed:
            self._events[copy_id][group.first_layer] = event
            self._changed.notify_all()

    def close(self, copy_id: int) -> None:
        """The load is over, well or not: nobody waits for it any more."""
        with self._changed:
            del self._events[copy_id]
            self._changed.notify_all()

    # ---- who launches ----

    def event(self, copy_id: int, first_layer: int) -> torch.cuda.Event | None:
        """What the group that begins there has to wait for, as soon as its copies are queued; None once the load is
        over."""
        with self._changed:
            self._changed.wait_for(lambda: copy_id not in self._events or first_layer in self._events[copy_id])
            return self._events.get(copy_id, {}).get(first_layer)
