"""``splitserve bench tiers``: real workers, short."""

import json
from pathlib import Path

import pytest

from splitserve.benchmarks import tiers


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
