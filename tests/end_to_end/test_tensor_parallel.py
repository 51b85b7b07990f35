"""Clusters whose workers are several ranks, over HTTP: the tokens of one rank, and an end for all when one is lost."""

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from serving import PATIENT, complete_all, transformers_greedy, wait_until_quiet
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.cluster_spec import ClusterSpec
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig
from waiting import PATIENCE_SECONDS

MAX_TOKENS = 10
PROMPTS = [[300 + (7 * index + 3 * i) % 900 for i in range(length)] for index, length in enumerate((1, 16, 40, 150))]


def spec_of(model: Path, size: int, **workers: int) -> ClusterSpec:
    engine = EngineConfig(
        model=str(model),
        dtype="float32",
        kv_memory_bytes=16 << 20,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        tensor_parallel_size=size,
        threads=1,
    )
    return simple_spec(engine, port=0, protocol=PATIENT, **(workers or {"num_mixed": 1}))


def body(model: Path, prompt: list[int]) -> dict[str, object]:
    return {"model": model.name, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "return_route": True}  # fmt: skip


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_greedy_tokens_are_those_of_transformers(two_heads: Path, size: int) -> None:
    references = transformers_greedy(two_heads, PROMPTS, MAX_TOKENS)
    with LocalCluster(spec_of(two_heads, size), log_level="warning") as running:
        answers = complete_all(running.url, [body(two_heads, prompt) for prompt in PROMPTS], at_once=True)
        for prompt, reference, answer in zip(PROMPTS, references, answers, strict=True):
            assert answer["status"] == 200, answer
            tokens = answer["choices"][0]["token_ids"]
            assert reference.agrees(tokens), f"{size} ranks, prompt of {len(prompt)}: {tokens}"
        wait_until_quiet(running.url)


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"), [(2, 1), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((1, 4), (4, 2)))]
)
def test_prompts_are_handed_over_between_workers_of_different_sizes(
    two_heads: Path, prefill_tp: int, decode_tp: int
) -> None:
    """Two key/value heads: four ranks hold each of them twice."""
    references = transformers_greedy(two_heads, PROMPTS, MAX_TOKENS)
    spec = spec_of(two_heads, 1, num_prefill=1, num_decode=1, prefill_tp=prefill_tp, decode_tp=decode_tp)
    with LocalCluster(spec, log_level="warning") as running:
        for at_once in (True, False):  # the second time some blocks are found again
            bodies = [body(two_heads, prompt) for prompt in PROMPTS]
            answers = complete_all(running.url, bodies, at_once=at_once)
            for prompt, reference, answer in zip(PROMPTS, references, answers, strict=True):
                assert answer["status"] == 200, answer
                tokens = answer["choices"][0]["token_ids"]
                assert reference.agrees(tokens), f"prompt of {len(prompt)}: {tokens}"
                assert answer["splitserve"]["mode"] == "disaggregated"
        metrics = wait_until_quiet(running.url)
        assert sum(worker["handovers_total"] for worker in metrics.values()) == 2 * len(PROMPTS)
        assert all(worker["handover_failures_total"] == 0 for worker in metrics.values())


def test_a_worker_that_lost_a_rank_says_which_and_ends(two_heads: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with LocalCluster(spec_of(two_heads, 2), log_level="warning") as running:
        worker = psutil.Process(running.pids["mixed-0"])
        (rank,) = worker.children()
        os.kill(rank.pid, signal.SIGKILL)
        worker.wait(timeout=PATIENCE_SECONDS)
        with urllib.request.urlopen(f"{running.url}/metrics", timeout=PATIENCE_SECONDS) as metrics:
            assert re.search(r"^splitserve_workers_lost_total\S* 1\.0$", metrics.read().decode(), re.MULTILINE)
    said = capfd.readouterr().err
    assert "mixed-0 rank 1 was ended by SIGKILL" in said
    assert re.search(r"worker mixed-0@\w+ has ended: mixed-0 rank 1 was ended by SIGKILL", said), (
        "the router heard of it"
    )


def test_ranks_end_with_a_worker_that_is_killed(two_heads: Path) -> None:
    with LocalCluster(spec_of(two_heads, 2), log_level="warning") as running:
        worker = psutil.Process(running.pids["mixed-0"])
        (rank,) = worker.children()
        assert rank.cmdline() == worker.cmdline(), "it was forked, and has imported nothing again"
        assert rank.nice() == worker.nice() and rank.cpu_affinity() == worker.cpu_affinity()
        worker.kill()
        rank.wait(timeout=PATIENCE_SECONDS)


def test_sizes_that_cannot_work_are_said_in_words(two_heads: Path) -> None:
    command = [sys.executable, "-m", "splitserve.orchestration.cli.main", "serve", str(two_heads), "--mixed", "1"]
    command += ["--tensor-parallel-size", "3", "--port", "0", "--device", "cpu"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode in (1, 2)
    assert "can't be shared by 3 tensor-parallel ranks; 1, 2, 4, 8 work" in run.stderr
    assert "Traceback" not in run.stderr
