"""The disk tier: real files through NIXL's POSIX backend; what is cut off, damaged, foreign, or in the way."""

import contextlib
import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from serving import complete_all, transformers_greedy, wait_until_quiet
from small_clusters import BLOCK_SIZE, body, cluster
from splitserve.common.errors import ConfigError
from splitserve.kvconnector.blocks.pool import BlockPool
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.tiers import disk as module
from splitserve.kvconnector.tiers.copies import LocalTierCopier, PartialCopyError, TierFullError, TierStore
from splitserve.kvconnector.tiers.disk import DiskStore, disk_tier, keep_common, rank_folder
from splitserve.kvconnector.tiers.slot_folder import HEADER_BYTES, Header, SlotFolder
from splitserve.kvconnector.tiers.tier import Tier
from splitserve.kvconnector.tiers.tiers import Tiers
from splitserve.protocol.block_hash import shard_root
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.memory_records import LayoutRecord
from tier_chats import BLOCK_BYTES
from waiting import PATIENCE_SECONDS

LAYOUT = LayoutRecord("m", "w", "float32", 16, 2, 2, 8)
ROOT, OTHER_ROOT = b"r" * 16, b"o" * 16
HASHES = [bytes([n]) * 16 for n in range(8)]


@contextlib.contextmanager
def store_in(path: Path, root: bytes = ROOT, num_slots: int = 6) -> Iterator[tuple[KVMemory, DiskStore, list[bytes]]]:
    """Memory of 8 blocks, the store, and the hashes that were found there."""
    memory = KVMemory(LAYOUT, 8)
    tier, store, _ = disk_tier(memory, path, num_slots * (memory.block_bytes + HEADER_BYTES), root)
    assert isinstance(store, DiskStore)
    yield memory, store, tier.index.hashes()
    tier.index.check_invariants()
    store.close()


def filled(memory: KVMemory) -> torch.Tensor:
    memory.blocks.copy_(torch.randn(memory.blocks.shape))
    return memory.blocks.clone()


def test_blocks_survive_a_restart(tmp_path: Path) -> None:
    with store_in(tmp_path / "kv") as (memory, store, found):
        assert found == []
        before = filled(memory)
        store.store([1, 2, 6], [0, 5, 3], HASHES[:3])
    with store_in(tmp_path / "kv") as (memory, store, found):
        assert set(found) == set(HASHES[:3])
        store.load([7, 0], [5, 3], HASHES[1:3])
        assert torch.equal(memory.blocks[[7, 0]], before[[2, 6]])
        assert not memory.blocks[1:7].any()


def test_what_was_used_last_is_youngest_after_a_restart(tmp_path: Path) -> None:
    with store_in(tmp_path) as (memory, store, _):
        filled(memory)
        for number in range(4):
            store.store([number], [number], [HASHES[number]])
        store.load([0, 1], [2, 0], [HASHES[2], HASHES[0]])
    with store_in(tmp_path) as (_, _, found):
        assert found == [HASHES[number] for number in (1, 3, 2, 0)]


def test_a_file_that_is_cut_off_or_damaged_is_a_miss_and_goes(tmp_path: Path) -> None:
    with store_in(tmp_path) as (memory, store, _):
        before = filled(memory)
        store.store(range(5), range(5), HASHES[:5])
        cut, damaged, gone, header = (tmp_path / f"{slot:08d}.kv" for slot in (1, 2, 3, 4))
        os.truncate(cut, 5000)
        for path, offset in ((damaged, HEADER_BYTES + 100), (header, 20)):
            data = bytearray(path.read_bytes())
            data[offset] ^= 1
            path.write_bytes(data)
        gone.unlink()
        memory.blocks.zero_()
        for slot, complaint in ((1, "truncated"), (2, "damaged"), (3, "No such file"), (4, "damaged")):
            with pytest.raises(PartialCopyError, match=complaint) as failure:
                store.load([0, slot, 7], [0, slot, 0], [HASHES[0], HASHES[slot], HASHES[0]])
            assert failure.value.num_good == 1
            assert torch.equal(memory.blocks[0], before[0])
            assert not memory.blocks[1:].any()
    with store_in(tmp_path) as (_, _, found):
        assert found == [HASHES[0]]


def test_files_of_others_and_unfinished_ones_are_removed(tmp_path: Path) -> None:
    with store_in(tmp_path) as (memory, store, _):
        filled(memory)
        store.store([0, 1, 2], [0, 1, 5], HASHES[:3])
    (tmp_path / "00000002.kv.new").write_bytes(b"half")
    (tmp_path / "00000003.kv").write_bytes(b"x" * 100)
    with store_in(tmp_path, num_slots=2) as (_, _, found):
        assert set(found) == set(HASHES[:2])
    with store_in(tmp_path, root=OTHER_ROOT) as (_, _, found):
        assert found == []
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_each_rank_has_files_of_its_own(tmp_path: Path) -> None:
    """A worker of two ranks, then of one: nothing of another rank, or size, is taken for one's own."""
    two = msgspec.structs.replace(LAYOUT, num_kv_heads=2 * LAYOUT.num_kv_heads, tensor_parallel_size=2)
    size = 16 * (KVMemory(two, 1).block_bytes + HEADER_BYTES)

    def tier(rank: int, layout: LayoutRecord = two) -> tuple[KVMemory, Tier, TierStore]:
        memory = KVMemory(layout, 8)
        found, store, words = disk_tier(memory, tmp_path, size, shard_root(layout, rank), rank=rank)
        assert words == f"{found.index.num_slots} blocks in {tmp_path}"
        return memory, found, store

    for rank in (0, 1):
        memory, found, store = tier(rank)
        assert found.index.num_slots == 8, "half of it"
        memory.blocks.fill_(float(rank))
        store.store([0, 1, 2], [0, 1, 2], HASHES[:3])
        store.close()
    (rank_folder(tmp_path, 1) / "00000001.kv").unlink()
    (rank_folder(tmp_path, 0) / "00000002.kv").replace(rank_folder(tmp_path, 1) / "00000002.kv")
    (_, first, store), (memory, second, other) = tier(0), tier(1)
    assert first.index.contents() == [(HASHES[0], 0), (HASHES[1], 1)]
    assert second.index.contents() == [(HASHES[0], 0)], "what was rank 0's isn't rank 1's"
    other.load([5], [0], HASHES[:1])
    assert bool((memory.blocks[5] == 1.0).all())
    keep_common(first.index, [second.index.contents()])
    assert first.index.contents() == [(HASHES[0], 0)]
    first.index.check_invariants()
    store.close()
    other.close()
    one = msgspec.structs.replace(two, num_kv_heads=LAYOUT.num_kv_heads, tensor_parallel_size=1)
    _, found, store = tier(0, one)
    assert not found.index.contents() and [path.name for path in tmp_path.iterdir()] == ["lock"]
    store.close()


def test_of_two_files_with_the_same_content_the_younger_stays(tmp_path: Path) -> None:
    with store_in(tmp_path) as (memory, store, _):
        filled(memory)
        for slot in (3, 1, 5, 2):
            store.store([0], [slot], HASHES[:1])
    with store_in(tmp_path) as (_, _, found):
        assert found == HASHES[:1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000002.kv", "lock"]


def test_a_rank_waits_for_the_one_before_it(tmp_path: Path) -> None:
    before = SlotFolder(tmp_path, ROOT, 1, 64)
    ended = threading.Timer(0.3, before.close)
    ended.start()
    SlotFolder(tmp_path, ROOT, 1, 64, lock_seconds=60).close()
    ended.join()


def test_clearing_leaves_nothing_for_the_next_incarnation(tmp_path: Path) -> None:
    with store_in(tmp_path) as (_, store, _):
        store.store([0, 1], [0, 1], HASHES[:2])
        store.clear()
    with store_in(tmp_path) as (_, _, found):
        assert found == []


def test_a_full_disk_fails_the_store_and_leaves_nothing_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with store_in(tmp_path) as (memory, store, _):
        before = filled(memory)
        store.store([3], [0], [HASHES[0]])
        real = os.posix_fallocate

        def full(file: int, offset: int, length: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(module.os, "posix_fallocate", full)
        with pytest.raises(TierFullError, match="No space left"):
            store.store([4, 5], [1, 2], HASHES[4:6])
        monkeypatch.setattr(module.os, "posix_fallocate", real)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["00000000.kv", "lock"]
        store.load([0], [0], [HASHES[0]])
        assert torch.equal(memory.blocks[0], before[3])
        store.store([4, 5], [0, 1], HASHES[4:6])


def test_on_a_disk_smaller_than_the_tier_the_latest_blocks_take_the_place_of_the_oldest(small_disk: Path) -> None:
    memory, pool = KVMemory(LAYOUT, 8), BlockPool(np.zeros(8, dtype=np.uint64), first_generation=1)
    tier, store, _ = disk_tier(memory, small_disk / "w", 10 << 20, ROOT)
    tiers, woken = Tiers(pool, [tier]), threading.Semaphore(0)
    copies, hashes = LocalTierCopier({"disk": store}, woken.release), [n.to_bytes(16, "big") for n in range(800)]
    for begin in range(0, len(hashes), 8):
        block_ids = pool.allocate(8)
        assert block_ids is not None
        for block_id, block_hash in zip(block_ids, hashes[begin : begin + 8], strict=True):
            pool.publish(block_id, block_hash)
            tiers.on_complete(block_id, block_hash, is_prompt=True)
        pool.release(block_ids)
        tiers.start_stores()
        [command] = tiers.take_commands()
        copies.start(command)
        assert woken.acquire(timeout=PATIENCE_SECONDS)
        [result] = copies.results()
        tiers.on_result(result)
        tiers.check_invariants()
    found = [block_hash in tier.index for block_hash in hashes]
    assert all(found[-8:]) and not any(found[:8]) and sum(found) > 100
    assert 0 < tiers.counters.tier_failures < 8, "it tries again whether there is more room, but rarely"
    copies.close(PATIENCE_SECONDS)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 2 MiB, where one may be mounted. It goes with this process, however that ends: pytest can't
    clean up around one that stays."""
    path = tmp_path / "small"
    path.mkdir()
    script = 'mount -t tmpfs -o size=2m tmpfs "$0" && echo mounted && cat; umount -l "$0"'
    command = ["sh", "-c", script, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(  # its standard input ends with this process
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
    ) as mounting:
        assert mounting.stdin is not None and mounting.stdout is not None
        if mounting.stdout.readline() != b"mounted\n":
            pytest.skip("nothing can be mounted here")
        yield path
    assert not os.path.ismount(path)


def test_a_full_disk_is_a_warning_and_every_request_is_right(
    small_disk: Path, tiny_qwen3: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = [[300 + 7 * (user * 160 + position) % 1100 for position in range(160)] for user in range(12)]
    bodies = [body(tiny_qwen3, prompt, max_tokens=4) for prompt in prompts]
    references = transformers_greedy(tiny_qwen3, prompts, 4)
    sizes = {"kv_memory_bytes": 24 * BLOCK_BYTES, "host_kv_memory_bytes": 30 * BLOCK_BYTES, "max_model_len": 256}
    with cluster(tiny_qwen3, "mixed", **sizes, disk_kv_dir=str(small_disk), disk_kv_bytes=64 << 20) as running:
        for _ in range(2):
            answers = complete_all(running.url, bodies, at_once=False)
            for answer, reference in zip(answers, references, strict=True):
                assert reference.agrees(answer["choices"][0]["token_ids"])
        [load] = wait_until_quiet(running.url).values()
    assert load["tier_failures_total"] > 0 and load["tier_blocks"] > 30, "some are on the disk, and some had no room"
    warnings = [line for line in capfd.readouterr().err.splitlines() if "stores to disk fail" in line]
    assert len(warnings) == 1 and "No space left" in warnings[0], warnings
    assert not list(small_disk.glob("*/*.new"))


def test_a_failed_transfer_is_told_and_the_store_goes_on(tmp_path: Path) -> None:
    with store_in(tmp_path) as (memory, store, _):
        before = filled(memory)
        real = store._up.ranges
        store._up.ranges = lambda files: real([99 for _ in files])  # type: ignore[method-assign]  # no such descriptor
        store.store([3], [0], [HASHES[0]])
        with pytest.raises(Exception, match="READ of 1 files"):
            store.load([0], [0], [HASHES[0]])
        store._up.ranges = real  # type: ignore[method-assign]
        store.load([0], [0], [HASHES[0]])
        assert torch.equal(memory.blocks[0], before[3])


def test_a_folder_belongs_to_one_process(tmp_path: Path) -> None:
    folder = SlotFolder(tmp_path, ROOT, 1, 64)
    with pytest.raises(ConfigError, match="another process uses"):
        SlotFolder(tmp_path, ROOT, 1, 64)
    folder.close()
    SlotFolder(tmp_path, ROOT, 1, 64).close()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't write to"):
        SlotFolder(tmp_path / "file" / "x", ROOT, 1, 64)
    with pytest.raises(ConfigError, match="less than one KV block"):
        disk_tier(KVMemory(LAYOUT, 1), tmp_path, 100, ROOT)


def test_a_folder_is_private_to_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kv" / "decode-0"
    with store_in(folder):
        assert [path.stat().st_mode & 0o777 for path in (folder.parent, folder, folder / "lock")] == [
            0o700, 0o700, 0o600,
        ]  # fmt: skip
    folder.chmod(0o777)
    SlotFolder(folder, ROOT, 1, 64).close()
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(
        ConfigError, match=r"decode-0 belongs to user \d+, this process to user \d+; choose a directory"
    ):
        SlotFolder(folder, ROOT, 1, 64)


def test_links_are_not_followed(tmp_path: Path) -> None:
    target, outside = tmp_path / "elsewhere", tmp_path / "precious"
    target.mkdir()
    outside.write_bytes(b"precious")
    folder = tmp_path / "kv"
    folder.symlink_to(target)
    with pytest.raises(ConfigError, match=r"kv is a link; remove it"):
        SlotFolder(folder, ROOT, 1, 64)
    assert not list(target.iterdir())
    folder.unlink()
    folder.mkdir()
    (folder / "lock").symlink_to(tmp_path / "new")
    with pytest.raises(ConfigError, match="can't write to"):
        SlotFolder(folder, ROOT, 1, 64)
    assert not (tmp_path / "new").exists()
    (folder / "lock").unlink()
    with store_in(folder) as (memory, store, _):
        before = filled(memory)
        store.store([5], [2], [HASHES[5]])
        (folder / "00000002.kv").rename(tmp_path / "taken")
        (folder / "00000002.kv").symlink_to(tmp_path / "taken")
        with pytest.raises(PartialCopyError, match=r"00000002.kv can't be opened"):
            store.load([0], [2], [HASHES[5]])
        (folder / "00000000.kv.new").symlink_to(outside)  # where the next copy writes
        (folder / "00000001.kv.new").hardlink_to(outside)
        store.store([3, 4], [0, 1], [HASHES[3], HASHES[4]])
        assert outside.read_bytes() == b"precious"
        (folder / "00000004.kv").symlink_to(folder / "00000001.kv")
    with store_in(folder) as (memory, store, found):
        assert set(found) == {HASHES[3], HASHES[4]}
        store.load([0], [1], [HASHES[4]])
        assert torch.equal(memory.blocks[0], before[4])
    assert not (folder / "00000004.kv").is_symlink()


def test_a_folder_that_is_replaced_meanwhile_is_not_used(tmp_path: Path) -> None:
    with store_in(tmp_path / "kv") as (memory, store, _):
        filled(memory)
        (tmp_path / "kv").rename(tmp_path / "old")
        (tmp_path / "kv").mkdir()
        store.store([0], [0], [HASHES[0]])
        assert not list((tmp_path / "kv").iterdir()) and (tmp_path / "old" / "00000000.kv").is_file()


def test_a_backend_that_nixl_lacks_is_named(tmp_path: Path) -> None:
    memory = KVMemory(LAYOUT, 2)
    try:
        _, store, _ = disk_tier(memory, tmp_path, 1 << 20, ROOT, "gds")
    except ConfigError as error:
        assert "--disk-kv-backend gds: NIXL doesn't have its GDS backend here" in str(error)
        assert "or use posix" in str(error)
    else:  # where it is installed
        store.close()
    _, store, _ = disk_tier(memory, tmp_path, 1 << 20, ROOT)  # the folder is free again
    store.close()
    with pytest.raises(ConfigError, match="choose one of posix, gds"):
        EngineConfig(model="m", disk_kv_backend="nfs")


def test_headers() -> None:
    memory = KVMemory(LAYOUT, 1)
    data = memory.blocks.view(-1).view(torch.uint8).numpy()
    header = Header.of(ROOT, HASHES[1], data)
    assert len(header.encode()) == HEADER_BYTES
    assert Header.parse(header.encode()) == header
    assert Header.parse(b"no") is None and Header.parse(bytes(HEADER_BYTES)) is None
    assert Header.of(OTHER_ROOT, HASHES[1], data).checksum != header.checksum


def test_a_restarted_cluster_finds_its_prompts_on_disk(tiny_qwen3: Path, tmp_path: Path) -> None:
    prompts = [[300 + (7 * user + position) % 1000 for position in range(8 * BLOCK_SIZE)] for user in range(12)]
    bodies = [body(tiny_qwen3, prompt, max_tokens=8) for prompt in prompts]
    settings = {"kv_memory_bytes": 24 * BLOCK_BYTES, "max_model_len": 256, "disk_kv_dir": str(tmp_path / "kv")}
    with cluster(tiny_qwen3, "1P1D", **settings) as first:
        expected = [answer["choices"][0]["token_ids"] for answer in complete_all(first.url, bodies, at_once=False)]
        stored = {name: load["tier_blocks"] for name, load in wait_until_quiet(first.url).items()}
    assert all(stored.values())
    damaged = sorted((tmp_path / "kv" / "decode-0").glob("*.kv"))[3]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    with cluster(tiny_qwen3, "1P1D", **settings) as second:
        assert {name: load["tier_blocks"] for name, load in wait_until_quiet(second.url).items()} == stored
        answers = complete_all(second.url, bodies, at_once=True)
        assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
        loads = wait_until_quiet(second.url)
    assert loads["decode-0"]["tier_loaded_blocks_total"] > 40
    assert loads["decode-0"]["tier_failures_total"] == 1
