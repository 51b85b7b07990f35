"""``splitserve bench tiers``: real workers, short."""

import json
from pathlib import Path

import pytest
import torch

from lmcache_server import python_with_lmcache
from splitserve.benchmarks.kv import tier_copies, tier_soak, tiers
from splitserve.benchmarks.kv.tier_hits import throughput_ratios
from splitserve.common.errors import ConfigError


def test_whole_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--shape", "tiny", "--dtype", "float32", "--kv-memory", "3MiB", "--host-kv-memory", "32MiB"]
    load = ["--users", "3", "--turns", "3", "--rounds", "1", "--fresh-requests", "2", "--fresh-tokens", "40"]
    assert tiers.main([*sizes, *load, "--result-dir", str(tmp_path)]) == 0
    [path] = tmp_path.iterdir()
    result = json.loads(path.read_text())
    assert result["command"][:3] == ["splitserve", "bench", "tiers"]
    assert (result["chats"]["requests"], result["chats"]["different_answers"]) == (9, 0)
    assert result["chats"]["ttft_ratio"] > 0 and result["no_reuse"]["throughput_ratio"] > 0
    assert "0 of 9 answers differ" in capsys.readouterr().out


@pytest.mark.slow
def test_the_parts_that_ask_for_single_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--shape", "tiny", "--dtype", "float32", "--kv-memory", "3MiB", "--host-kv-memory", "32MiB"]
    load = ["--parts", "fits", "hits", "pace", "--rounds", "1", "--fresh-requests", "2", "--fresh-tokens", "40"]
    single = ["--hit-tokens", "256", "--hit-rounds", "1", "--pace-streams", "2", "--pace-tokens", "128"]
    dirs = ["--disk-kv-dir", str(tmp_path / "kv"), "--result-dir", str(tmp_path / "results")]
    assert tiers.main([*sizes, *load, *single, "--pace-rounds", "1", *dirs]) == 0
    [path] = (tmp_path / "results").iterdir()
    result = json.loads(path.read_text())
    [hits] = result["hits"]
    assert (hits["tokens"], hits["without_cached_share"]) == (256, 0.0)
    assert hits["with_cached_share"] > 0.9 and hits["speedup"] > 0
    assert result["pace"]["loads"] == 1 and result["pace"]["cached_share"] > 0.8
    assert result["fits"]["throughput_ratio"] > 0
    assert "of prompts found on the device" in capsys.readouterr().out


@pytest.mark.slow
def test_the_part_with_lmcache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also that a worker is replaced in the middle, and that the answers are the same."""
    python_with_lmcache()
    sizes = ["--shape", "tiny", "--dtype", "float32", "--kv-memory", "3MiB", "--parts", "shared"]
    load = ["--users", "3", "--turns", "4", "--rounds", "1", "--fresh-requests", "2", "--fresh-tokens", "64"]
    lmcache = ["--lmcache-memory", "32MiB", "--lmcache-chunk-tokens", "32"]
    assert tiers.main([*sizes, *load, *lmcache, "--result-dir", str(tmp_path)]) == 0
    [path] = tmp_path.iterdir()
    result = json.loads(path.read_text())["shared"]
    assert (result["chats"]["requests"], result["chats"]["different_answers"]) == (12, 0)
    assert result["chats"]["after"]["ttft_ratio"] > 0 and result["no_reuse"]["throughput_ratio"] > 0
    assert "a worker replaced" in capsys.readouterr().out


def test_soak(tmp_path: Path) -> None:
    """The short form of ten thousand requests."""
    assert tier_soak.main(["--requests", "300", "--prompts", "100", "--result-dir", str(tmp_path)]) == 0
    [path] = tmp_path.iterdir()
    results = json.loads(path.read_text())
    assert (results["requests"], results["wrong"], results["problems"]) == (300, 0, [])
    assert results["damaged_files"] > 0
    for tier in results["tiers"].values():
        assert tier["evicted_blocks_total"] > 0 and tier["loaded_blocks_total"] > 0


def test_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--device", "cpu", "--block-memory", "64KiB", "512KiB", "--memory", "8MiB", "--rounds", "2"]
    assert tier_copies.main([*sizes, "--result-dir", str(tmp_path)]) == 0
    [path] = tmp_path.iterdir()
    results = json.loads(path.read_text())["results"]
    assert [(row["block_kib"], row["blocks"]) for row in results] == [(64, 128), (512, 16)]
    assert all(row["up_gb_per_s"] > 0 and row["both_ratio"] > 0 for row in results)
    assert "both_ratio" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_copies_of_a_gpu_need_one() -> None:
    with pytest.raises(ConfigError, match="there is no CUDA device here"):
        tier_copies.main(["--device", "cuda"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--turns", "1"], "--turns: must be a whole number from 2 on, got '1'"),
        (["--fresh-requests", "0"], "--fresh-requests: must be a whole number from 1 on, got '0'"),
        (["--pace-rounds", "0"], "--pace-rounds: must be a whole number from 1 on, got '0'"),
    ],
)
def test_parts_of_which_nothing_would_be_measured_are_refused_at_once(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tiers.main(arguments)
    assert words in capsys.readouterr().err


def test_shared_tiers_need_a_turn_before_and_one_after_the_replacement() -> None:
    with pytest.raises(ConfigError, match=r"--turns is 2, but the part shared .*: give 3 or more"):
        tiers.main(["--parts", "shared", "--turns", "2"])


def test_ratios_stand_beside_the_least_and_the_most_of_them() -> None:
    figures = throughput_ratios({"with": [2.0, 3.0, 4.0], "without": [4.0, 3.0, 5.0]})
    assert figures == {"throughput_ratio": 0.8, "throughput_ratios": [0.5, 1.0, 0.8]}
    rates = {"with_requests_per_second": 3.0, "without_requests_per_second": 4.0}
    hit = {"tokens": 9, "with_cached_share": 1.0, "without_ttft_ms": 8.0, "with_ttft_ms": 2.0, "speedup": 4.0}
    rows = tiers.rows_of({"fits": figures | rates, "hits": [hit | {"speedups": [2.0, 4.0, 5.0]}]})
    assert [row[-2:] for row in rows] == [[0.8, "0.50 to 1.00"], [0.25, "0.20 to 0.50"]]
