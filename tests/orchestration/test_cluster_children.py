"""The end of a cluster's children that obey no signal."""

from typing import cast

import pytest

from splitserve.orchestration.cluster.children import Children
from splitserve.orchestration.cluster.host import Child


class SlowToDie:
    """A child that ignores signals and has ended two seconds after it and its ``neighbours`` were killed."""

    pid = 1

    def __init__(self, name: str = "mixed-0") -> None:
        self.name = name
        self.is_killed = self.is_gone = False
        self.neighbours: list[SlowToDie] = [self]

    def send_signal(self, _signal_number: int) -> None:
        pass

    def kill(self) -> None:
        self.is_killed = True

    def join(self, timeout_seconds: float) -> bool:
        self.is_gone |= all(each.is_killed for each in self.neighbours) and timeout_seconds >= 2.0
        return self.is_gone


def test_a_killed_child_is_waited_for_longer_than_one_that_may_still_obey(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it takes a while until a killed process is gone."""
    monkeypatch.setattr("splitserve.orchestration.cluster.children.STOP_GRACE_SECONDS", 0.5)
    children, child = Children(lambda: False), SlowToDie()
    children.add(cast(Child, child))
    children.end_all(0.0)
    assert child.is_killed and child.is_gone


def test_children_that_are_killed_end_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them takes time of its own from the end of the cluster."""
    monkeypatch.setattr("splitserve.orchestration.cluster.children.STOP_GRACE_SECONDS", 0.5)
    children, neighbours = Children(lambda: False), [SlowToDie("mixed-0"), SlowToDie("mixed-1")]
    for child in neighbours:
        child.neighbours = neighbours
        children.add(cast(Child, child))
    children.end_all(0.0)
    assert all(child.is_gone for child in neighbours)
