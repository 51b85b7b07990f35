"""``splitserve bench tiers``: real workers, short."""

import json
from pathlib import Path

import pytest

from splitserve.benchmarks import tier_copies, tiers


def test_whole_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--shape", "tiny", "--dtype", "float32", "--kv-memory-mib", "3", "--host-kv-memory-mib", "32"]
    load = ["--users", "3", "--turns", "3", "--rounds", "1", "--fresh-requests", "2", "--fresh-tokens", "40"]
    assert tiers.main([*sizes, *load, "--result-dir", str(tmp_path)]) == 0
    [path] = tmp_path.iterdir()
    result = json.loads(path.read_text())
    assert result["command"][:3] == ["splitserve", "bench", "tiers"]
    assert (result["chats"]["requests"], result["chats"]["different_answers"]) == (9, 0)
    assert result["chats"]["ttft_ratio"] > 0 and result["no_reuse"]["throughput_ratio"] > 0
    assert "0 of 9 answers differ" in capsys.readouterr().out


def test_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--device", "cpu", "--block-kib", "64", "512", "--mib", "8", "--rounds", "2"]
    assert tier_copies.main([*sizes, "--result-dir", str(tmp_path)]) == 0
    [path] = tmp_path.iterdir()
    results = json.loads(path.read_text())["results"]
    assert [(row["block_kib"], row["blocks"]) for row in results] == [(64, 128), (512, 16)]
    assert all(row["up_gb_per_s"] > 0 and row["both_ratio"] > 0 for row in results)
    assert "both_ratio" in capsys.readouterr().out
