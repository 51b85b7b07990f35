"""Objectives: what counts as met, and that the router counts it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from router_harness import RouterProcess, Workers, write_model_dir
from splitserve.protocol.request import Role
from splitserve.router.requests.objectives import Objectives
from waiting import wait_until


@pytest.mark.parametrize(
    ("first", "last", "num_tokens", "verdicts"),
    [
        (10.4, 11.3, 10, {"ttft": True, "tpot": True}),
        (10.6, 11.5, 10, {"ttft": False, "tpot": True}),
        (10.4, 11.4, 10, {"ttft": True, "tpot": False}),
        (10.4, 10.4, 1, {"ttft": True, "tpot": True}),
        (0.0, 0.0, 0, {"ttft": False, "tpot": True}),
    ],
)
def test_verdicts(first: float, last: float, num_tokens: int, verdicts: dict[str, bool]) -> None:
    objectives = Objectives(ttft_seconds=0.5, tpot_seconds=0.101)
    assert dict(objectives.judge(10.0, first, last, num_tokens)) == verdicts


def test_only_objectives_that_there_are_count() -> None:
    assert dict(Objectives(0.5, 0.0).judge(0.0, 0.1, 9.0, 5)) == {"ttft": True}
    assert dict(Objectives(0.0, 0.5).missed()) == {"tpot": False}
    assert not list(Objectives(0.0, 0.0).judge(0.0, 0.1, 9.0, 5))


@pytest.fixture
def router(tmp_path: Path) -> Iterator[RouterProcess]:
    write_model_dir(tmp_path)
    process = RouterProcess(tmp_path, ttft_objective_ms=30_000.0, tpot_objective_ms=1e-6)
    yield process
    process.stop()


def test_the_router_counts_requests_by_objective(router: RouterProcess) -> None:
    workers = Workers(router.membership)
    try:
        workers.start("mixed-0", Role.MIXED)
        wait_until(lambda: router.request("GET", "/ready")[0] == 200)
        for _ in range(3):
            assert router.post("/v1/completions", prompt=[5, 6], max_tokens=4)[0] == 200
        assert router.metric('splitserve_objectives_total{met="true",objective="ttft"}') == 3
        assert router.post("/v1/completions", prompt=[5, 6], max_tokens=10**6)[0] == 400
        total = [
            router.metric(f'splitserve_objectives_total{{met="{met}",objective="tpot"}}') for met in ("true", "false")
        ]
        assert sum(total) == 3, "a request that never ran says nothing"
    finally:
        workers.close()
