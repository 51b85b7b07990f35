"""The engine benchmark runs end to end on a tiny checkpoint and reports what it compared."""

import json
from pathlib import Path

import pytest
import torch

from splitserve.benchmarks.engine.engine_vs_transformers import main

pytestmark = pytest.mark.usefixtures("one_thread")


def test_report(tiny_qwen3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    threads = torch.get_num_threads()
    arguments = ["--prefill-tokens", "33", "--context", "17", "--steps", "3", "--rounds", "2", "--batch", "1", "3"]
    assert main(["--model", str(tiny_qwen3), "--json", str(report), *arguments]) == 0
    assert torch.get_num_threads() == threads
    content = json.loads(report.read_text())
    assert content["sequences_identical"] == [5, 5]
    cases = [(row["case"], row["samples"]) for row in content["results"]]
    assert cases == [
        ("prefill, batch 1, 33 tokens", 2),
        ("decode, batch 1, 17 tokens", 6),
        ("decode, batch 3, 17 tokens", 6),
    ]
    assert all(row["ours_ms"] > 0 and row["ratio"] > 0 for row in content["results"])
    assert "ratio" in capsys.readouterr().out
