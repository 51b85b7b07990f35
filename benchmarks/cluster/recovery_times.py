"""Recovery times of the workers of a dead machine, split into detection, node assignment and start. Pure."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from splitserve.orchestration.cluster.restarts import StartTimes


@dataclass(frozen=True)
class Recovery:
    """Recovery of one worker. All in seconds; the four parts add up to ``total``."""

    worker: str
    detection: float  # from the death until the cluster noticed the worker's loss
    delay: float  # imposed by the restart policy
    assignment: float  # until a process of the worker ran on another node
    start: float  # until it accepted requests there
    total: float


def lost_and_back(status: Mapping[str, Any], workers: Collection[str], died_at: float) -> bool:
    """Return whether each of ``workers`` was lost and is ready again since ``died_at``. ``status``: as JSON."""
    return len(list(_back(status, workers, died_at))) == len(workers)


def recoveries(status: Mapping[str, Any], workers: Collection[str], died_at: float) -> list[Recovery]:
    """Return the recoveries of those of ``workers`` that are ready again since ``died_at`` (seconds since 1970), the
    fastest first."""
    found = [_recovery(name, times, died_at) for name, times in _back(status, workers, died_at)]
    return sorted(found, key=lambda recovery: recovery.total)


def _back(
    status: Mapping[str, Any], workers: Collection[str], died_at: float
) -> Iterable[tuple[str, tuple[float, float, float, float]]]:
    for worker in status["workers"]:
        times = msgspec.convert(worker["times"], StartTimes)
        steps = (times.lost_at, times.asked_at, times.placed_at, times.ready_at)
        lost_at, asked_at, placed_at, ready_at = steps
        if worker["name"] not in workers or lost_at is None or lost_at < died_at or worker["phase"] != "ready":
            continue
        if asked_at is not None and placed_at is not None and ready_at is not None:
            yield worker["name"], (lost_at, asked_at, placed_at, ready_at)


def _recovery(name: str, times: tuple[float, float, float, float], died_at: float) -> Recovery:
    lost_at, asked_at, placed_at, ready_at = times
    return Recovery(
        worker=name,
        detection=lost_at - died_at,
        delay=asked_at - lost_at,
        assignment=placed_at - asked_at,
        start=ready_at - placed_at,
        total=ready_at - died_at,
    )
