"""``splitserve bench engine-loop``: real processes, short."""

import json
from pathlib import Path

import pytest

from splitserve.benchmarks.engine import engine_loop
from splitserve.benchmarks.engine.paced_runner import PacedRunner
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.step import SampleSpec, ScheduledChunk, StepPlan

GREEDY = SampleSpec(0.0, 0, 1.0, 0, 0, 1)


@pytest.mark.slow
def test_whole_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--streams", "4", "--input-len", "40", "--output-len", "60", "--step-ms", "3", "--launch-us", "50"]
    assert engine_loop.main([*arguments, "--result-dir", str(tmp_path)]) == 0
    [path] = tmp_path.iterdir()
    result = json.loads(path.read_text())
    assert result["command"][:3] == ["splitserve", "bench", "engine-loop"]
    assert [row["arm"] for row in result["results"]] == ["direct", "http"]
    for row in result["results"]:
        device = row["device"]
        assert 0.1 < device["busy_share"] <= 1.0 and device["steps"] >= 20
        assert 0 < device["loop_cpu_us"] <= device["process_cpu_us"]
        assert row["itl_ms"]["p50"] > 1.0
    assert result["results"][1]["router_cpu_us_per_token"] >= 0
    assert "router us/token" in capsys.readouterr().out


def test_the_device_is_idle_while_it_waits_for_a_launch() -> None:
    runner = PacedRunner(StepModel(0.02), vocab_size=10)
    plan = StepPlan([ScheduledChunk([0], 5, [0], GREEDY)] * 2)
    for _ in range(3):
        runner.launch(plan).wait()  # never a step ahead
    report = runner.report()
    assert report is not None
    assert report.steps == 3 and 0.0 < report.busy_share < 1.0
    assert report.idle_ms["max"] > 0.0
    ahead = PacedRunner(StepModel(60.0), vocab_size=10)  # nobody waits for its steps
    for _ in range(3):
        ahead.launch(plan)
    report = ahead.report()
    assert report is not None
    assert report.busy_share == pytest.approx(1.0) and report.idle_ms["max"] == pytest.approx(0.0)


def test_prefill_takes_its_time_and_is_no_part_of_the_report() -> None:
    runner = PacedRunner(StepModel(0.001, per_token=0.0001), vocab_size=10)
    pending = runner.launch(StepPlan([ScheduledChunk([0] * 100, 0, [0], None)]))
    assert pending.output.token_ids == [None]
    assert runner.steps[0].end - runner.steps[0].begin == pytest.approx(0.011)
    assert runner.report() is None
