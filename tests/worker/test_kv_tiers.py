"""A worker's tiers by its config, and the NUMA node of the host tier's memory."""

import errno
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from splitserve.common.errors import ConfigError
from splitserve.kvconnector.layout import numa_memory
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.layout.numa_memory import HostMemory, cpus_of_node
from splitserve.protocol.config import EngineConfig, WorkerConfig
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.request import Role
from splitserve.worker.machine import threads
from splitserve.worker.start.kv_tiers import RankTiers, make_tiers
from splitserve.worker.start.registration import setup_of

LAYOUT = LayoutRecord("m", "sha", "float32", 16, 2, 2, 16)
MIB = 1 << 20


def tiers_of(folder: Path, **changes: Any) -> RankTiers:
    wanted = {"host_kv_memory_bytes": MIB, "disk_kv_dir": str(folder / "disk"), "disk_kv_bytes": MIB, **changes}
    return make_tiers(EngineConfig(model="m", **wanted), "mixed-0", KVMemory(LAYOUT, 8))


def close(tiers: RankTiers) -> None:
    for store in tiers.stores.values():
        store.close()


def test_a_worker_has_the_tiers_that_its_config_says(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path)
    assert [tier.name for tier in tiers.tiers] == list(tiers.stores) == ["host", "disk"]
    assert (
        tiers.host is not None and tiers.served is not None and tiers.host.address == tiers.served.slots.blocks_address
    )
    close(tiers)


def test_without_prefix_caching_there_are_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiers = tiers_of(tmp_path, enable_prefix_caching=False)
    assert not tiers.stores and tiers.host is None and not list(tmp_path.iterdir())
    assert "prefix caching is off" in caplog.text


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_already_leaves_the_others(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise OSError(code, "no room")

    monkeypatch.setattr(Path, "mkdir", fail)
    tiers = tiers_of(tmp_path)
    assert list(tiers.stores) == ["host"]
    assert "the disk tier is off until the next start" in caplog.text and "no room" in caplog.text
    close(tiers)
    with pytest.raises(ConfigError, match="no room"):  # ranks would have to agree
        tiers_of(tmp_path, tensor_parallel_size=2)


def test_every_page_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory(100 * mmap.PAGESIZE)
    monkeypatch.setattr(numa_memory, "PAGES_LOOKED_AT_ONCE", 7)
    again = numa_memory.pages_by_node(memory.address, len(memory.bytes))
    assert again == memory.placement
    assert not again or sum(again.values()) == 100


def test_memory_on_another_node_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(numa_memory, "_bind", lambda *_place: True)
    monkeypatch.setattr(numa_memory, "pages_by_node", lambda *_place: {0: 3, 1: 1})
    host = HostMemory(1 << 16, node=1)
    assert (
        host.num_remote_bytes == 3 << 14 and "49152 of 65536 bytes of host memory aren't on NUMA node 1" in caplog.text
    )
    config = WorkerConfig(
        engine_id="mixed-0", role=Role.MIXED, engine=EngineConfig(model="m"), membership="tcp://127.0.0.1:1", secret="s"
    )
    setup = setup_of(config, KVMemory(LAYOUT, 8), host, {})
    assert (setup.remote_bytes, setup.host_kv_bytes) == (3 << 14, 1 << 16)
    assert setup_of(config, KVMemory(LAYOUT, 8), None, {}).remote_bytes == 0
    assert HostMemory(1 << 16).num_remote_bytes == 0, "it may be anywhere"


def test_a_rank_stays_near_its_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text("2-3,8\n")
    assert cpus_of_node(1, tmp_path) == {2, 3, 8} and cpus_of_node(0, tmp_path) == set()
    moved: list[set[int]] = []

    def forbid(_pid: int, _cpus: object) -> None:
        raise OSError(errno.EINVAL, "the mask has changed")

    monkeypatch.setattr(threads, "node_of_gpu", lambda _device: 1)
    monkeypatch.setattr(threads, "cpus_of_node", lambda node: cpus_of_node(node, tmp_path))
    monkeypatch.setattr(threads, "usable_cpus", lambda: {0, 1, 2, 3})
    monkeypatch.setattr(threads.os, "sched_setaffinity", lambda _pid, cpus: moved.append(set(cpus)), raising=False)
    placement = threads.CoreAffinity(cpus=(0, 1, 2, 3))
    threads.keep_near(torch.device("cpu"), placement)
    threads.keep_near(torch.device("cuda", 1), threads.CoreAffinity())  # nothing is to be bound
    assert moved == []
    threads.keep_near(torch.device("cuda", 1), placement)
    assert moved == [{2, 3}]
    monkeypatch.setattr(threads.os, "sched_setaffinity", forbid)
    threads.keep_near(torch.device("cuda", 1), placement)  # it stays where it is
