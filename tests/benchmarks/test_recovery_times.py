"""The split of a recovery, on numbers worked out by hand; what Ray's settings come to."""

from typing import Any

import pytest

from splitserve.benchmarks.cluster.recovery_times import Recovery, lost_and_back, recoveries
from splitserve.orchestration.ray.health import RECOMMENDED, HealthChecks

DIED_AT = 1000.0


def worker(name: str, *times: float | None, phase: str = "ready") -> dict[str, Any]:
    names = ("lost_at", "asked_at", "placed_at", "ready_at")
    return {"name": name, "phase": phase, "times": dict(zip(names, times, strict=True))}


def test_the_parts_of_a_recovery() -> None:
    status = {
        "workers": [worker("gen-0", 1005.0, 1005.5, 1008.5, 1016.0), worker("fill-0", 1004.0, 1004.0, 1007.0, 1012.0)]
    }
    assert recoveries(status, ["gen-0", "fill-0"], DIED_AT) == [
        Recovery("fill-0", detection=4.0, delay=0.0, assignment=3.0, start=5.0, total=12.0),
        Recovery("gen-0", detection=5.0, delay=0.5, assignment=3.0, start=7.5, total=16.0),
    ]
    for each in recoveries(status, ["gen-0", "fill-0"], DIED_AT):
        assert each.detection + each.delay + each.assignment + each.start == each.total
    assert lost_and_back(status, ["gen-0", "fill-0"], DIED_AT)
    assert [each.worker for each in recoveries(status, ["gen-0"], DIED_AT)] == ["gen-0"], "others don't count"


@pytest.mark.parametrize(
    "unfinished",
    [
        worker("gen-0", None, 900.0, 901.0, 905.0),  # it hasn't been missed yet
        worker("gen-0", 990.0, 990.0, 993.0, 999.0),  # an earlier death
        worker("gen-0", 1005.0, None, None, None, phase="waiting"),
        worker("gen-0", 1005.0, 1005.5, 1008.5, None, phase="starting"),
        worker("gen-0", 1005.0, 1005.5, 1008.5, 1016.0, phase="leaving"),
    ],
)
def test_a_worker_that_is_not_back_yet(unfinished: dict[str, Any]) -> None:
    status = {"workers": [unfinished, worker("fill-0", 1004.0, 1004.0, 1007.0, 1012.0)]}
    assert not lost_and_back(status, ["gen-0", "fill-0"], DIED_AT)
    assert [each.worker for each in recoveries(status, ["gen-0", "fill-0"], DIED_AT)] == ["fill-0"]


def test_what_rays_health_checks_come_to() -> None:
    default = HealthChecks(period_ms=3000, timeout_ms=10_000, failure_threshold=5)
    assert default.silent_seconds == 65.0
    assert "after up to 65 s" in default.advice() and "RAY_health_check_timeout_ms=2000" in default.advice()
    ours = HealthChecks(*(int(value) for value in RECOMMENDED.values()))
    assert ours.silent_seconds == 15.0 and ours.failure_threshold * ours.period_ms == 5000, "as the Ray guide says"
    assert ours.advice() == ""
