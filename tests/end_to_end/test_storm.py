"""The storm on real processes, in small. ``scripts/long-tests storm`` does the same with 1,000 requests."""

from pathlib import Path

from real_storm import run_storm
from splitserve.benchmarks.chaos.faults import FaultKind

NUM_REQUESTS = 24


def test_answers_in_a_storm_are_those_of_an_undisturbed_worker(tiny_qwen3: Path) -> None:
    storm = run_storm(tiny_qwen3, 0, NUM_REQUESTS, [FaultKind.KILL], pause=0.3)
    assert not storm.problems
    assert len(storm.answers) == NUM_REQUESTS
    assert storm.faults, "no worker was lost"
