"""Two workers in PID namespaces of their own, as in two containers: what UCX does between them is told, and right."""

import multiprocessing
import multiprocessing.spawn
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitserve.benchmarks.kv.handover import devices, layout_of
from splitserve.benchmarks.kv.handover_ranks import RankSetup, two_workers
from splitserve.kvconnector.transfer.connector import Link
from splitserve.kvconnector.transfer.read_settings import ReadSettings
from splitserve.protocol.memory_records import MemoryKind

UNSHARE = ("unshare", "--pid", "--mount-proc", "--fork", "--kill-child")
NUM_BLOCKS = 32


def can_unshare() -> bool:
    return (
        bool(shutil.which("unshare"))
        and subprocess.run((*UNSHARE, "true"), check=False, capture_output=True).returncode == 0
    )


pytestmark = pytest.mark.skipif(not can_unshare(), reason="needs root, or the right to make PID namespaces")


@pytest.fixture
def namespaces(tmp_path: Path) -> Iterator[None]:
    """Processes that are spawned get one each."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {" ".join(UNSHARE)} {sys.executable} "$@"\n')
    python.chmod(0o755)
    before = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(str(python))
    yield
    multiprocessing.set_executable(before)


def read_all(device: str, kind: MemoryKind) -> Link:
    """Reads some blocks of one worker by another, and checks them."""
    layouts = [layout_of("llama-3.2-1b", "bfloat16", 64)] * 2
    [source], [sink] = (
        [RankSetup(layout, rank, NUM_BLOCKS, name) for rank, name in enumerate(names)]
        for layout, names in zip(layouts, devices(device, *layouts), strict=True)
    )
    with two_workers([source], [sink], 0.0) as sinks:
        [link] = sinks.call("connect", sinks.welcome, ReadSettings.of(kind))
        chosen = random.Random(1)
        local, remote = (chosen.sample(range(NUM_BLOCKS), 20) for _ in range(2))
        sinks.call("read", local, remote)
        sinks.call("check", local, remote)
    assert isinstance(link, Link)
    return link


@pytest.mark.usefixtures("namespaces")
def test_host_memory_is_read_by_tcp() -> None:
    assert read_all("cpu", MemoryKind.DRAM).transport.startswith("tcp")


@pytest.mark.usefixtures("namespaces")
@pytest.mark.gpu2
def test_gpu_memory_is_read_by_a_named_fallback_and_shouted_about() -> None:
    link = read_all("cuda", MemoryKind.VRAM)
    assert "cuda_ipc" not in link.transport
    assert f"is read by {link.transport} at {link.bytes_per_second / 1e9:.2f} GB/s" in link.problem
    assert "CUDA IPC isn't used. Are both processes in one PID namespace" in link.problem
