"""The storm on real processes, in small. ``scripts/long-tests storm`` does the same with 1,300 requests."""

from pathlib import Path

import pytest

from real_storm import run_storm
from splitserve.benchmarks.chaos.faults import FaultKind
from storm_requests import write_storm_model

NUM_REQUESTS = 24


@pytest.mark.parametrize(("shape", "first"), [("2P2D", 0), pytest.param("1P1D", 100, marks=pytest.mark.slow)])
def test_answers_in_a_storm_are_those_of_an_undisturbed_worker(shape: str, first: int, tmp_path: Path) -> None:
    model = write_storm_model(tmp_path / "model")
    storm = run_storm(model, first, NUM_REQUESTS, [FaultKind.KILL], shape=shape, pause=1.0)
    assert not storm.problems and not storm.num_given_up
    assert len(storm.answers) == NUM_REQUESTS
    assert storm.faults, "no worker was lost"
