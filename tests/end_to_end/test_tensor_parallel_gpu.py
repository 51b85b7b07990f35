"""Workers of several ranks on GPUs: the tokens of one rank, and an end in time when one is lost in a step."""

import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig
from waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.gpu2

PROMPTS = [[300 + (7 * index + 3 * i) % 900 for i in range(length)] for index, length in enumerate((1, 17, 64, 300))]


@contextmanager
def cluster(model: Path, size: int, **engine: Any) -> Iterator[LocalCluster]:
    settings: dict[str, Any] = {"dtype": "float32", "kv_memory_bytes": 64 << 20, "max_num_seqs": 8}
    config = EngineConfig(model=str(model), device="cuda", tensor_parallel_size=size, **{**settings, **engine})
    with LocalCluster(simple_spec(config, port=0, num_mixed=1), log_level="info") as running:
        yield running


def complete(url: str, model: Path, prompt: list[int], max_tokens: int) -> list[int]:
    body = {"model": model.name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}  # fmt: skip
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        tokens: list[int] = json.loads(answer.read())["choices"][0]["token_ids"]
    return tokens


@pytest.fixture(scope="module")
def tokens_of_one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    from splitserve.models.demo.checkpoint import write_demo_model

    model = write_demo_model(tmp_path_factory.mktemp("checkpoints") / "tiny", architecture="qwen3")
    with cluster(model, 1) as running:
        return model, [complete(running.url, model, prompt, 24) for prompt in PROMPTS]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_tokens_are_those_of_one_rank(
    tokens_of_one: tuple[Path, list[list[int]]], size: int, enforce_eager: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    model, expected = tokens_of_one
    with cluster(model, size, enforce_eager=enforce_eager) as running:
        assert [complete(running.url, model, prompt, 24) for prompt in PROMPTS] == expected
    chosen = re.search(r"all-reduce over \d ranks: (.*)", capfd.readouterr().err)
    assert chosen is not None
    print(chosen.group(0))


def test_a_rank_killed_in_a_step_takes_its_worker_down(
    tokens_of_one: tuple[Path, list[list[int]]], capfd: pytest.CaptureFixture[str]
) -> None:
    model, _ = tokens_of_one
    with cluster(model, 2) as running:
        worker = psutil.Process(running.pids["mixed-0"])
        (rank,) = worker.children()

        def ask() -> None:
            with suppress(Exception):
                complete(running.url, model, PROMPTS[1], 3000)

        client = threading.Thread(target=ask, daemon=True)
        client.start()
        time.sleep(1.0)
        os.kill(rank.pid, signal.SIGKILL)
        worker.wait(timeout=PATIENCE_SECONDS)
    assert "mixed-0 rank 1 was ended by SIGKILL" in capfd.readouterr().err


def test_loading_takes_no_copy_of_the_model_in_host_memory(tmp_path: Path) -> None:
    import subprocess
    import sys

    from splitserve.models.demo.checkpoint import write_demo_model

    model = write_demo_model(tmp_path / "m", shape="qwen3-0.6b", max_shard_bytes=200_000_000)
    code = """
import sys, threading, time, torch
from splitserve.models.config import load_model_config
from splitserve.models.weights.loader import load_model
def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))
torch.zeros(1, device="cuda")
pinned = torch.empty(1 << 20, pin_memory=True)
config = load_model_config(sys.argv[1])
before, peak, stop = resident(), 0, threading.Event()
def watch():
    global peak
    while not stop.wait(0.002):
        peak = max(peak, resident())
watcher = threading.Thread(target=watch); watcher.start()
started = time.time()
model = load_model(sys.argv[1], config, dtype=torch.bfloat16, device=torch.device("cuda", 0))
torch.cuda.synchronize(); seconds = time.time() - started
stop.set(); watcher.join()
print(peak - before, torch.cuda.max_memory_allocated(), seconds)
"""
    run = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True, check=True)
    host, device, seconds = map(float, run.stdout.split())
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    print(f"{size / 1e9:.2f} GB in {seconds:.2f} s; host {host / 1e6:.0f} MB, device {device / 1e9:.2f} GB")
    assert host < 0.5 * size
    assert device < 1.1 * size
