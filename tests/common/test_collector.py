"""The collector of processes whose pauses are felt."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from splitserve.common import collector
from splitserve.common.collector import Collector


class Node:
    """Refers to itself: only the collector frees it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def started() -> Iterator[Collector]:
    thresholds, num_callbacks = gc.get_threshold(), len(gc.callbacks)
    assert gc.get_freeze_count(), "by conftest.py"
    found = Collector()
    found.start()
    yield found
    found.stop()
    found.stop()
    assert gc.get_threshold() == thresholds
    assert len(gc.callbacks) == num_callbacks
    assert gc.get_freeze_count(), "the objects that were set aside before are so again"


def test_a_process_that_had_set_nothing_aside_has_nothing_set_aside() -> None:
    program = "import gc; from splitserve.common.collector import Collector; found = Collector(); found.start(); "
    program += "assert gc.get_freeze_count(); found.stop(); print(gc.get_freeze_count())"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "0\n"


def test_a_pass_looks_at_young_objects_only(started: Collector) -> None:
    sizes = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            sizes.append(sum(len(gc.get_objects(generation)) for generation in range(info["generation"] + 1)))

    gc.callbacks.append(note)
    try:
        kept = [[number] for number in range(50 * collector.YOUNG_OBJECTS)]
    finally:
        gc.callbacks.remove(note)
    assert len(sizes) >= 25  # passes over all of the generations, too
    assert max(sizes) <= 2 * collector.YOUNG_OBJECTS
    assert started.look(is_idle=False) is False
    del kept


def test_cycles_that_a_pass_finds_dead_are_freed_at_once(started: Collector) -> None:
    freed = weakref.ref(Node())
    kept = [[number] for number in range(2 * collector.YOUNG_OBJECTS)]
    assert freed() is None
    del kept


@pytest.mark.parametrize("is_idle", [True, False])
def test_cycles_that_outlive_a_pass_are_freed_by_a_full_one(
    started: Collector, is_idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "MIN_GROWTH_BLOCKS", 1 << 16)
    node = Node()
    freed = weakref.ref(node)
    gc.collect()  # sets it aside
    del node
    gc.collect()
    assert freed() is not None
    assert started.look(is_idle=is_idle) is False  # nothing has grown
    least = collector.IDLE_GROWTH_BLOCKS if is_idle else max(1 << 16, started._num_blocks)
    kept = [bytes(8 + number % 8) for number in range(least + 1000)]
    assert started.look(is_idle=is_idle) is True
    assert freed() is None
    del kept
