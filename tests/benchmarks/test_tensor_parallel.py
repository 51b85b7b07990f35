"""The benches of tensor parallelism run end to end on CPU, and report what they compared."""

import json
from pathlib import Path

import pytest

from splitserve.benchmarks.engine import tensor_parallel
from splitserve.benchmarks.kernels import all_reduce


def report(directory: Path) -> dict[str, object]:
    (file,) = directory.glob("*.json")
    content: dict[str, object] = json.loads(file.read_text())
    return content


def test_all_reduce(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--dtype", "float32", "--ranks", "2"]
    assert all_reduce.main([*options, "--result-dir", str(tmp_path)]) == 0
    results = report(tmp_path)["results"]
    assert [entry["num_bytes"] for entry in results] == [16384, 131072, 1048576]
    assert all(entry["best"] == "gloo" and entry["microseconds"]["gloo"] > 0 for entry in results)
    assert "gloo us" in capsys.readouterr().out


@pytest.mark.slow
def test_steps_of_one_rank_and_of_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--shape", "tiny", "--device", "cpu", "--batch", "1", "3", "--prefill", "33"]
    options += ["--context", "20", "--steps", "3", "--threads", "1", "--profile"]
    assert tensor_parallel.main([*options, "--result-dir", str(tmp_path)]) == 0
    results = report(tmp_path)["results"]
    assert [result["ranks"] for result in results] == [1, 2]
    for result in results:
        assert list(result["milliseconds"]) == ["decode 1 x 20", "decode 3 x 20", "prefill 33"]
    assert results[0]["tokens"] == results[1]["tokens"]
    assert "TP 2 speedup" in capsys.readouterr().out
