"""``splitserve simulate``, ``calibrate`` and ``plan``: on rooflines, saved models, and a running cluster."""

import json
import re
import time
from pathlib import Path

import pytest
from openai import OpenAI

from splitserve.benchmarks.twin import calibrate, plan, simulate
from splitserve.common.errors import ConfigError, SplitserveError
from splitserve.models.demo.checkpoint import write_demo_model
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.document import read_spec
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig
from splitserve.workloads.named import parse_workload

UNEVEN = ["--gpus", "3", "--tensor-parallel-size", "2"]
SHORT = ["--shape", "tiny", "--num-requests", "20"]


def result_of(folder: Path, name: str) -> dict:
    [file] = folder.glob(f"{name}-*.json")
    return json.loads(file.read_text())


def test_a_roofline_is_marked_as_uncalibrated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main([*SHORT, "--rate", "50", "--runs", "2", "--result-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "roofline of H200, uncalibrated" in shown and "TTFT p99" in shown
    kept = result_of(tmp_path, "simulate")
    assert [run["figures"]["completed"] for run in kept["runs"]] == [20, 20]
    assert kept["runs"][0]["paths"] == {"disaggregated disaggregated ok": 20}


def test_the_median_of_two_runs_is_between_them() -> None:
    runs = [{"figures": {"ttft_ms": {"p50": value}, "slo_attainment": 1.0}} for value in (4.0, 10.0)]
    assert simulate.rows_of(runs) == [["TTFT p50, ms", 7.0, 4.0, 10.0], ["within the objectives, %", 100, 100, 100]]


def test_specs_and_requests_of_a_comparison_can_be_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Read again, the trace gives the same requests at the same times."""
    folder = tmp_path / "exported"
    options = [*SHORT, "--rate", "40", "--runs", "1", "--workload", "300/5~1-4", "--tpot-ms", "9", "--policy", "prefix"]
    assert simulate.main([*options, "--cluster", "1P1D", "2M@256", "--export", str(folder)]) == 0
    rate = re.search(r"workload.jsonl has ([\d.]+) requests per second", capsys.readouterr().out)
    assert rate is not None
    read = parse_workload(f"trace:{folder / 'workload.jsonl'}").at(float(rate[1]), 20, 0)
    made = parse_workload("300/5~1-4").at(40.0, 20, 0)
    begin = made.conversations[0].start_seconds
    for one, other in zip(read.conversations, made.conversations, strict=True):
        assert one.start_seconds == pytest.approx(other.start_seconds - begin, abs=1e-5)
        assert [(turn.num_new_tokens, turn.num_output_tokens) for turn in one.turns] == [(300, 5)]
    pair, mixed = (read_spec(str(folder / name)) for name in ("1P1D-prefix.yaml", "2M-chunks-256-prefix.yaml"))
    assert [(pool.role, pool.count) for pool in pair.pools] == [("prefill", 1), ("decode", 1)]
    assert mixed.engine.max_num_batched_tokens == mixed.engine.max_num_prefill_tokens_beside_decode == 256
    assert mixed.objectives.tpot_ms == 9
    assert mixed.model.path == "tiny" and mixed.router.policy == "prefix"


def test_requests_that_a_trace_cannot_hold_are_not_exported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which lengths alone don't describe"):
        simulate.main([*SHORT, "--workload", "chats", "--export", str(tmp_path)])


def test_a_plan_ranks_both_kinds_and_writes_the_best_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "best.yaml"
    objectives = ["--ttft-ms", "20", "--itl-ms", "3", "--chunk-budgets", "512"]
    arguments = [
        "--gpus",
        "2",
        *SHORT,
        *objectives,
        "--first-rate",
        "400",
        "--num-requests",
        "8",
        "--min-seconds",
        "0",
        "--output",
        str(spec),
    ]
    assert plan.main([*arguments, "--result-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "Best: " in shown and "2M@512:least-loaded" in shown and "1P1D:cost" in shown
    written = read_spec(str(spec))
    assert written.num_workers == 2 and written.objectives.ttft_ms == 20
    best = max(result_of(tmp_path, "plan")["verdict"]["arms"], key=lambda arm: arm["goodput"]["rate"])["name"]
    assert best.startswith("2M") == (written.pools[0].role == "mixed")
    assert written.model.path == "tiny" and "put the path of a checkpoint in the place of tiny" in shown


def test_written_specs_load_the_checkpoint_that_was_named(tiny_qwen3: Path, tmp_path: Path) -> None:
    """The twin loads no weights; workers that are started by the spec do."""
    named, rates = ["--model", str(tiny_qwen3), "--gpu", "cpu"], ["--ttft-ms", "200", "--itl-ms", "90"]
    searched = [
        *rates,
        "--gpus",
        "2",
        "--workload",
        "30/5",
        "--num-requests",
        "4",
        "--min-seconds",
        "0",
        "--output",
        str(tmp_path / "best.yaml"),
    ]
    assert plan.main([*named, *searched, "--result-dir", str(tmp_path)]) == 0
    simulated = ["--cluster", "1P1D", "--workload", "30/5", "--rate", "40", "--runs", "1", "--num-requests", "4"]
    assert simulate.main([*named, *simulated, "--export", str(tmp_path)]) == 0
    written = sorted(tmp_path.glob("*.yaml"))
    assert len(written) == 2
    for path in written:
        model = read_spec(str(path)).model
        assert (model.path, model.load_format) == (str(tiny_qwen3), "auto"), path


def test_a_running_cluster_is_its_own_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before its workers have fitted their steps, that is said; then both commands take what they have fitted."""
    model = str(write_demo_model(tmp_path / "tiny"))
    spec = simple_spec(EngineConfig(model=model, kv_memory_bytes=64 << 20, threads=1), num_mixed=1, port=0)
    saved = tmp_path / "models.json"
    with LocalCluster(spec, log_level="warning") as cluster:
        with pytest.raises(ConfigError, match="fitted no step times yet"):
            calibrate.main(["--against", cluster.url, "--output", str(saved)])
        client = OpenAI(base_url=f"{cluster.url}/v1", api_key="none")
        body = {"ignore_eos": True}
        client.completions.create(model="tiny", prompt=[5] * 40, max_tokens=300, temperature=0, extra_body=body)
        client.completions.create(model="tiny", prompt=[6] * 40, max_tokens=60, temperature=0, extra_body=body)
        _until_fitted(cluster.url, saved)
        shown = capsys.readouterr().out
        assert "mixed" in shown and "written to" in shown
        options = ["--against", cluster.url, "--rate", "5", "--num-requests", "10", "--workload", "64/8", "--runs", "1"]
        assert simulate.main([*options, "--result-dir", str(tmp_path)]) == 0
    assert "fitted by the workers" in capsys.readouterr().out
    from_file = ["--model", model, "--gpu", "cpu", "--cluster", "2M", "--calibration", str(saved)]
    assert simulate.main([*from_file, *options[2:]]) == 0


LONG = "each request of the workload 8000/128 has 8128 tokens or more, prompt and output together, but "
ENDS = "the positions of tiny end at 4096: shorten the requests, or choose a --model with more positions"


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        (simulate.main, [], LONG + ENDS),
        (plan.main, ["--gpus", "1", "--ttft-ms", "9", "--itl-ms", "9"], LONG + ENDS),
        (simulate.main, ["--max-model-len", "900"], LONG + "--max-model-len is 900: .*, or raise --max-model-len"),
        (
            simulate.main,
            ["--kv-memory", "1MiB"],
            LONG + "the KV memory of a worker holds 512 .*, or raise --kv-memory",
        ),
    ],
)
def test_requests_that_are_all_too_long_are_refused_at_the_start(
    command, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=f"^{words}$"):
        command([*SHORT, *arguments, "--workload", "8000/128"])
    assert "steps:" not in capsys.readouterr().out


def test_single_requests_of_a_trace_that_are_too_long_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And their failures are added up over all runs."""
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 1000 * n, "input_length": 5000 if n == 2 else 50, "output_length": 4} for n in range(4)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--shape", "tiny", "--num-requests", "4", "--workload", f"trace:{trace}", "--cluster", "1M"]
    assert simulate.main([*options, "--runs", "3"]) == 1
    shown = capsys.readouterr().out
    assert (
        "note: in the first run 1 of 4 requests have up to 5004 tokens and will fail, since the positions of tiny end "
        "at 4096: shorten them (of a trace, --max-tokens 4096 leaves them out)"
    ) in shown
    assert "note: 3 of the 12 requests of all runs failed; 3 times: no ready mixed worker takes" in shown
    assert simulate.main([*options, "--runs", "1", "--max-tokens", "4096"]) == 0
    shown = capsys.readouterr().out
    assert "note: in the first run" not in shown and "each run has the same requests" not in shown
    assert simulate.main([*options, "--runs", "2", "--max-tokens", "4096"]) == 0
    assert "note: each run has the same requests of the trace trace at the same times" in capsys.readouterr().out


def test_the_model_is_named_and_objectives_only_where_there_are_any(
    tiny_qwen3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--num-requests", "4", "--workload", "30/5", "--runs", "1", "--cluster", "1M", "1P1D"]
    assert simulate.main([*options, "--shape", "tiny"]) == 0
    shown = capsys.readouterr().out
    assert "model: tiny, as --shape says; no --model was given\n" in shown
    assert "within the objectives" not in shown and "goodput" not in shown and "no objectives are given" in shown
    assert simulate.main([*options, "--model", str(tiny_qwen3), "--ttft-ms", "500"]) == 0
    shown = capsys.readouterr().out
    assert f"model: {tiny_qwen3}\n" in shown
    assert "within the objectives" in shown and "goodput" in shown and "no objectives" not in shown


def _until_fitted(url: str, saved: Path) -> None:
    """Wait until a heartbeat has brought the fitted model."""
    deadline = time.monotonic() + 30
    while True:
        try:
            calibrate.main(["--against", url, "--output", str(saved)])
            return
        except ConfigError:
            assert time.monotonic() < deadline, "no heartbeat brought a fitted model"
            time.sleep(0.2)


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        (simulate.main, ["--cluster", "3X"], "must be xPyD or nM"),
        (simulate.main, ["--workload", "nonsense"], "must be INPUT/OUTPUT"),
        (simulate.main, ["--calibration", "/no/such/file"], "make one with"),
        (simulate.main, ["--against", "http://127.0.0.1:9"], "127.0.0.1:9"),
        (plan.main, ["--gpus", "2"], "needs both objectives"),
        (plan.main, [*UNEVEN, "--ttft-ms", "9", "--itl-ms", "9"], "isn't a multiple"),
        (plan.main, ["--gpus", "2", "--ttft-ms", "9", "--itl-ms", "9", "--output", "/no/x.yaml"], "no such folder"),
        (simulate.main, ["--shape", "llama-3.1-8b", "--tensor-parallel-size", "3"], "3 tensor-parallel ranks; 1, 2"),
    ],
)
def test_bad_options_are_refused_in_words(command, arguments: list[str], words: str) -> None:
    with pytest.raises(SplitserveError, match=words):
        command(arguments)
