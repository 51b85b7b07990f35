"""``splitserve plan``: objectives that can't be met, loads that last long enough, traces without times, ranks."""

import argparse
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from splitserve.benchmarks.engine.engine_options import model_of
from splitserve.benchmarks.goodput import bench
from splitserve.benchmarks.goodput.objectives import Objectives, Outcome
from splitserve.benchmarks.twin import plan, simulate
from splitserve.benchmarks.twin.loads import one_at_a_time
from splitserve.benchmarks.twin.setups import GPU_BYTES, STEP_BYTES, setups_of_arm
from splitserve.common.errors import ConfigError
from splitserve.models.config import ModelConfig, load_model_config
from splitserve.models.declared import stored_weights
from splitserve.protocol.placement.step_model import StepModel, StepWork
from splitserve.protocol.request import Role
from splitserve.simulation.twin.models import Calibration
from splitserve.simulation.twin.worker import WorkerSetup
from splitserve.workloads.named import parse_workload

TINY = ["--shape", "tiny", "--num-requests", "8", "--first-rate", "400", "--min-seconds", "0", "--workload", "1024/8"]


def worker_and_config(shape: str, gpu: str) -> tuple[WorkerSetup, ModelConfig]:
    """Return the worker of one device, and its model's config."""
    options = plan.parser().parse_args(["--gpus", "1", "--shape", shape, "--gpu", gpu, "--chunk-budgets", "8192"])
    [arm] = plan.arms_of(options)
    with model_of(options) as model:
        engine, config = simulate.engine_of(options, model), load_model_config(model)
        [worker] = setups_of_arm(arm, engine, config, simulate.calibration_of(options, config), gpu)
    return worker, config


def test_objectives_that_no_idle_worker_meets_are_refused_with_the_least() -> None:
    words = (
        r"even with one request at a time: .* TTFT is [\d.]+ ms \(objective 0.1 ms\) and of ITL is .* raise --ttft-ms"
    )
    with pytest.raises(ConfigError, match=words):
        plan.main(["--gpus", "2", *TINY, "--chunk-budgets", "512", "--ttft-ms", "0.1", "--itl-ms", "30"])


def test_an_arrangement_that_misses_the_objectives_alone_is_not_searched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objectives = ["--ttft-ms", "12", "--itl-ms", "9", "--chunk-budgets", "32", "8192"]  # 1024 tokens in 32 steps
    assert plan.main(["--gpus", "1", *TINY, *objectives, "--result-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "not searched: with one request at a time p99 of TTFT is" in shown and "%" in shown
    assert shown.count("1M@32:least-loaded") == 2 and "none" in shown
    [file] = tmp_path.glob("plan-*.json")
    kept = json.loads(file.read_text())
    assert kept["unable"]["1M@32:least-loaded"]["ttft_ms"] > 12
    assert [arm["name"] for arm in kept["verdict"]["arms"]] == ["1M@8192:least-loaded"]


def test_requests_one_at_a_time_do_not_meet() -> None:
    worker, _ = worker_and_config("tiny", "H200")
    workload = one_at_a_time(parse_workload("1000/100").at(1e6, 3, 0), [worker])
    step = worker.model.decode_seconds(1, 1100)
    begins = [each.start_seconds for each in workload.conversations]
    assert begins[0] == 0.0 and min(np.diff(begins)) > 100 * step


def test_a_load_outlasts_what_its_objectives_allow() -> None:
    """A queue that grows by a twentieth of the time is as long as the objective, and batches have been full."""
    workload, options = parse_workload("9/100").at(1.0, 40, 0), argparse.Namespace(num_requests=40, min_seconds=None)
    assert plan.lasting_seconds(workload, Objectives(500, 1)) == pytest.approx(10.0)
    assert plan.lasting_seconds(workload, Objectives(10, 30)) == pytest.approx(6.0)
    number = plan.requests_by_rate(options, 10.0)
    assert [number(1.0), number(6.0), number(1e4)] == [40, 60, 400]
    assert "from 50/s on had 400 requests" in plan.shortened_words(options, 10.0, [1.0, 90.0, 50.0])
    assert not plan.shortened_words(options, 10.0, [1.0, 6.0])
    asked_for = argparse.Namespace(num_requests=40, min_seconds=10.0)
    assert plan.requests_by_rate(asked_for, 10.0)(1e4) == 100_000
    assert not plan.shortened_words(asked_for, 10.0, [1e4])


def test_a_trace_whose_requests_all_come_at_once_has_no_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "one.jsonl"
    trace.write_text('{"input_length": 50, "output_length": 2}\n' * 2)
    objectives = ["--ttft-ms", "500", "--itl-ms", "30"]
    words = "8 requests of the trace one come at the same time, at any rate"
    with pytest.raises(ConfigError, match=words):
        plan.main(["--gpus", "1", *TINY, *objectives, "--trace", str(trace)])
    with pytest.raises(ConfigError, match=words):
        bench.main(["--dry-run", "--num-requests", "8", *objectives, "--workloads", f"trace:{trace}"])
    simulated = ["--shape", "tiny", "--num-requests", "8", "--runs", "1", "--workload", f"trace:{trace}"]
    assert simulate.main(simulated) == 0
    assert words in capsys.readouterr().out


def test_a_trace_of_one_conversation_has_no_rate_either(tmp_path: Path) -> None:
    """Nor has one request: loads at higher rates repeat it, at the same time."""
    trace = tmp_path / "talk.jsonl"
    lines = ({"timestamp": 1000 * turn, "input_length": 50, "output_length": 2, "session_id": "a"} for turn in range(9))
    trace.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--gpus", "1", *TINY, "--ttft-ms", "500", "--itl-ms", "30", "--trace", str(trace)]
    with pytest.raises(ConfigError, match="the trace talk is one conversation, the same at any rate"):
        plan.main(arguments)
    trace.write_text('{"input_length": 50, "output_length": 2}\n')
    with pytest.raises(ConfigError, match="all 2 requests of the trace talk come at the same time"):
        plan.main([*arguments, "--num-requests", "1"])


@pytest.mark.parametrize("rate", ["0", "-1", "nan"])
def test_a_first_rate_that_is_no_rate_is_refused(rate: str) -> None:
    with pytest.raises(SystemExit):
        plan.main(["--gpus", "1", "--ttft-ms", "9", "--itl-ms", "9", "--first-rate", rate])


def test_requests_that_fail_alone_are_named_as_such() -> None:
    outcome = Outcome(np.array([1.0, np.inf]), (np.array([1.0]), np.array([np.inf])), 1)
    assert plan.alone_words(outcome, Objectives(500, 30)) == "1 of 2 requests fail"


def test_few_failures_are_not_why_the_objectives_are_missed(tmp_path: Path) -> None:
    trace = tmp_path / "one-long.jsonl"
    lines = [{"timestamp": number, "input_length": 90_000 if number == 9 else 50} for number in range(150)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--gpus", "1", *TINY, "--num-requests", "150", "--trace", str(trace)]
    with pytest.raises(ConfigError, match=r"TTFT is .* raise --ttft-ms"):
        plan.main([*arguments, "--chunk-budgets", "8192", "--ttft-ms", "0.1", "--itl-ms", "30"])


def test_the_memory_of_a_gpu_has_room_for_the_embedding_too() -> None:
    worker, config = worker_and_config("llama-3.1-8b", "L40S")
    weights = sum(2 * int(np.prod(weight.shape)) for weight in stored_weights(config).values())
    room = GPU_BYTES["L40S"] * worker.engine.gpu_memory_utilization - STEP_BYTES - weights
    assert room - worker.layout.block_bytes <= worker.num_blocks[0] * worker.layout.block_bytes <= room


def test_a_step_of_one_sequence_reads_its_own_experts_only() -> None:
    worker, _ = worker_and_config("qwen3-30b-a3b", "H200")
    assert worker.law is not None
    one = StepWork(num_decodes=1)  # 3.3 GB of 61 are read for it
    assert worker.law.seconds(one) == pytest.approx(2.3e-3, rel=0.05)
    assert worker.model.seconds(one) > 3 * worker.law.seconds(one)


def test_a_calibration_of_workers_with_other_ranks_is_refused(tmp_path: Path) -> None:
    saved = tmp_path / "calibration.json"
    saved.write_bytes(msgspec.json.encode(Calibration(steps={Role.MIXED: StepModel(base=1e-3)}, num_ranks=2)))
    options = ["--shape", "tiny", "--calibration", str(saved), "--num-requests", "2", "--runs", "1"]
    with pytest.raises(ConfigError, match=r"fitted by workers of 2 ranks.* give --tensor-parallel-size 2"):
        simulate.main(options)
    assert simulate.main([*options, "--tensor-parallel-size", "2"]) == 0


def test_conversations_left_out_of_a_trace_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "mixed.jsonl"
    lines = [{"timestamp": 1000 * number, "input_length": length} for number, length in enumerate((50, 900, 60))]
    trace.write_text("\n".join(map(json.dumps, lines)))
    simulated = ["--shape", "tiny", "--num-requests", "2", "--runs", "1", "--workload", f"trace:{trace}"]
    words = "1 of 3 conversations of the trace mixed have more than 500 tokens, up to 901, and are left out"
    assert simulate.main([*simulated, "--max-tokens", "500"]) == 0
    assert words in capsys.readouterr().out
    assert simulate.main(simulated) == 0
    assert "left out" not in capsys.readouterr().out
