"""Start of a worker's other ranks, and of the CUDA driver, before its imports."""

import queue
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from running import is_running
from splitserve.orchestration.cluster.host import ChildExited, ChildProgress, Event
from splitserve.orchestration.hosts.local import BEGIN_ON_GPU, ENTRIES
from splitserve.orchestration.hosts.process import ChildProcess
from splitserve.protocol.config import EngineConfig, WorkerConfig
from splitserve.worker.start.early import open_context
from waiting import PATIENCE_SECONDS, wait_until


class Driver:
    """Stands for CUDA's driver: each function returns the status that it is given, else success."""

    def __init__(self, **statuses: int) -> None:
        self.called: list[str] = []
        self._statuses = statuses

    def __getattr__(self, name: str) -> Any:
        def call(*_arguments: object) -> int:
            self.called.append(name)
            return self._statuses.get(name, 0)

        return call


def test_the_context_that_pytorch_uses_is_opened() -> None:
    driver = Driver()
    assert open_context(driver)
    assert driver.called == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_errors_of_the_driver_are_left_to_pytorch(failing: str) -> None:
    driver = Driver(**{failing: 100})
    assert not open_context(driver)
    assert driver.called[-1] == failing


def test_what_comes_before_the_imports_imports_little() -> None:
    program = f"import sys, {BEGIN_ON_GPU.partition(':')[0]}; print({{'numpy', 'torch'}} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"set()\n"


@pytest.fixture
def events() -> "queue.Queue[Event]":
    return queue.Queue()


def start(model: Path, events: "queue.Queue[Event]") -> ChildProcess:
    """Start a worker of two ranks on CPU as one on GPUs is started: it, and its other rank, import for themselves."""
    engine = EngineConfig(
        model=str(model), device="cpu", threads=2, kv_memory_bytes=8 << 20, tensor_parallel_size=2, dtype="float32"
    )
    config = WorkerConfig(
        engine_id="w-0", role="mixed", membership="tcp://127.0.0.1:9", engine=engine, secret="s3cret" * 4
    )
    return ChildProcess(
        name="w-0", entry=ENTRIES.worker, config=config, threads=1, log_level="warning", emit=events.put,
        early=BEGIN_ON_GPU,
    )  # fmt: skip


def wait_for(stage: str, events: "queue.Queue[Event]") -> dict[str, str]:
    while True:
        event = events.get(timeout=PATIENCE_SECONDS)
        assert isinstance(event, ChildProgress) and event.stage != "error", event
        if event.stage == stage:
            return event.detail


def test_a_rank_that_began_early_is_the_one_that_serves(tiny_qwen3: Path, events: "queue.Queue[Event]") -> None:
    child = start(tiny_qwen3, events)
    try:
        worker = psutil.Process(int(wait_for("started", events)["pid"]))
        wait_until(lambda: len(worker.children()) == 1, "the other rank's program runs")
        [rank] = worker.children()
        wait_for("placement", events)  # both ranks are ready
        assert worker.children() == [rank]
    finally:
        child.kill()
        assert child.join(PATIENCE_SECONDS)
    wait_until(lambda: not is_running(rank), "the rank has ended with its worker")


def test_a_rank_that_began_early_ends_with_a_worker_that_fails(tmp_path: Path, events: "queue.Queue[Event]") -> None:
    child = start(tmp_path / "no-model", events)
    worker = psutil.Process(int(wait_for("started", events)["pid"]))
    wait_until(lambda: len(worker.children()) == 1, "the other rank's program runs")
    [rank] = worker.children()
    while not isinstance(event := events.get(timeout=PATIENCE_SECONDS), ChildExited):
        pass
    assert "no-model" in child.describe_exit(event.returncode) and child.join(PATIENCE_SECONDS)
    wait_until(lambda: not is_running(rank), "the rank has ended with its worker")
