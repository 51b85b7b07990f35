"""The LMCache tier against LMCache's own server: right bytes or none, nothing held, servers that come and go."""

import mmap
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from lmcache_server import CHUNK_TOKENS, LAYOUT, SEGMENTS, ProbedServer, Side, probed_server, tokens
from splitserve.common.errors import ConfigError
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.lmcache.block_bytes import CudaBlockBytes
from splitserve.kvconnector.lmcache.tier import lmcache_tier
from splitserve.kvconnector.tiers.copies import PartialCopyError, ToldError
from splitserve.orchestration.hosts.addresses import free_port
from stopping import stop_process
from waiting import PATIENCE_SECONDS, wait_until

BLOCKS_PER_CHUNK = CHUNK_TOKENS // LAYOUT.block_size


@pytest.fixture(scope="module")
def server() -> Iterator[ProbedServer]:
    with probed_server() as running:
        yield running


# ---- what is in a chunk ----


def test_an_endpoint_elsewhere_is_refused() -> None:
    memory = KVMemory(LAYOUT, 4, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"must be on this machine"):
        lmcache_tier(memory, "tcp://10.1.2.3:5555", 1.0)


# ---- the real server ----


def test_blocks_come_back_as_they_went(server: ProbedServer) -> None:
    prompt = tokens(4)
    with Side(server.endpoint) as writer, Side(server.endpoint) as reader:
        writer.memory.blocks.normal_()
        expected = writer.memory.blocks[:16].clone()
        assert writer.put(prompt) == 16
        assert writer.put(prompt) == 0, "it's there"
        for first in (0, 3, BLOCKS_PER_CHUNK, 14):
            reader.memory.blocks.zero_()
            assert reader.get(prompt, first) == 16 - first
            assert torch.equal(reader.content(16 - first), expected[first:])
        longer = prompt[: 2 * CHUNK_TOKENS] + tokens(2, seed=1)
        assert reader.get(longer) == 8, "two chunks are the same, two aren't there"
        assert torch.equal(reader.content(16)[:8], expected[:8])
        assert reader.get(longer, 8) == 0
        assert reader.get(longer, 10) == 0
        assert reader.get(tokens(3, seed=2)) == 0
        assert server.is_quiet(), str(server.holds())
        assert server.holds()["instances"] == 2
    assert server.holds()["instances"] == 0, "a worker that leaves says so"


@pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14), reason="this kernel has no MADV_POPULATE_WRITE"
)
def test_a_worker_maps_all_memory_before_it_needs_it() -> None:
    with probed_server() as server, Side(server.endpoint) as side:
        segment = SEGMENTS / server.segment
        wait_until(lambda: segment.stat().st_blocks * 512 >= segment.stat().st_size, "not all pages are there")
        assert side.put(tokens(1)) == BLOCKS_PER_CHUNK


def test_models_do_not_mix(server: ProbedServer) -> None:
    prompt = tokens(2, seed=3)
    other = msgspec.structs.replace(LAYOUT, weights_version="weights-2")
    with Side(server.endpoint) as one, Side(server.endpoint, other) as two:
        one.memory.blocks.normal_()
        assert one.put(prompt) == 8
        assert two.get(prompt) == 0
        assert one.get(prompt) == 8


def test_ranks_and_sizes_do_not_mix(server: ProbedServer) -> None:
    """Each of four heads has a worker of its own size, or shares it: chunks of the same length, of other heads."""
    prompt = tokens(2, seed=9)
    two = msgspec.structs.replace(LAYOUT, num_kv_heads=2, tensor_parallel_size=2)
    four = msgspec.structs.replace(two, tensor_parallel_size=4)  # which hold each head twice
    with (
        Side(server.endpoint, two) as first,
        Side(server.endpoint, two, rank=1) as second,
        Side(server.endpoint, two, rank=1) as same,
        Side(server.endpoint, four, rank=1) as other,
    ):
        assert first.memory.block_bytes == second.memory.block_bytes == other.memory.block_bytes
        first.memory.blocks.fill_(1.0)
        second.memory.blocks.fill_(2.0)
        assert first.put(prompt) == 8
        assert second.get(prompt) == 0 and other.get(prompt) == 0
        assert second.put(prompt) == 8, "it's there for the other rank alone"
        assert same.get(prompt) == 8 and bool((same.content(8) == 2.0).all())
        assert other.get(prompt) == 0
        assert server.is_quiet(), str(server.holds())


def test_many_workers_at_once(server: ProbedServer) -> None:
    """Threads that store and load the same and other prompts: what comes is right, and nothing is left held. The
    server's memory holds a third of it."""
    prompts = [tokens(3, seed=10 + n) for n in range(12)]
    wrong: list[object] = []

    def work(number: int) -> None:
        with Side(server.endpoint) as side:
            for turn in range(24):
                prompt = prompts[(turn * (number + 1)) % len(prompts)]
                side.memory.blocks[:12] = torch.arange(12).view(12, 1, 1, 1, 1, 1) + 100 * prompt[0]
                if turn % 2:
                    side.put(prompt)
                good = side.get(prompt)
                expected = side.memory.blocks[:good]
                if not torch.equal(side.content(12)[:good], expected):
                    wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert server.is_quiet(), str(server.holds())


def test_damaged_memory_is_a_miss_that_is_not_asked_for_again(server: ProbedServer) -> None:
    prompt = tokens(3, seed=4)
    with Side(server.endpoint) as side:
        side.memory.blocks.normal_()
        assert side.put(prompt) == 12
        damage(server, side, block=6)
        with pytest.raises(PartialCopyError, match="damaged") as caught:
            side.get(prompt)
        assert caught.value.num_good == 6
        assert torch.equal(side.content(12)[:6], side.memory.blocks[:6])
        assert side.get(prompt) == BLOCKS_PER_CHUNK, "up to the damaged chunk"
        assert side.get(prompt, BLOCKS_PER_CHUNK) == 0
        assert server.is_quiet(), str(server.holds())


def damage(server: ProbedServer, side: Side, block: int) -> None:
    """One byte of one block, wherever the server keeps it."""
    content = side.memory.blocks[block].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    path = SEGMENTS / server.segment
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        place = memory.find(content[:4096])
        assert place >= 0
        memory[place + 5000] ^= 1


def test_a_worker_that_dies_between_question_and_answer_leaves_no_lies(server: ProbedServer) -> None:
    """It had room given for a chunk, and dies. LMCache then takes the chunk for stored."""
    prompt = tokens(2, seed=5)
    with Side(server.endpoint) as reader:
        dying = Side(server.endpoint)
        dying.wait(is_available=True)
        dying.memory.blocks.normal_()

        def die(*_: object) -> None:
            raise KeyboardInterrupt

        dying.store._down.blocks.fetch = die  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            dying.put(prompt)
        dying.store.close()
        assert server.is_quiet(), str(server.holds())
        with pytest.raises(PartialCopyError) as caught:
            reader.get(prompt)
        assert caught.value.num_good == 0, "the server had it, and it was nobody's"
        assert reader.get(prompt) == 0
        assert server.is_quiet(), str(server.holds())


def test_a_server_that_comes_and_goes() -> None:
    prompt = tokens(2, seed=6)
    side = Side("tcp://127.0.0.1:1")
    side.wait(is_available=False)
    side.store.close()
    with probed_server() as first, Side(first.endpoint) as side:
        side.memory.blocks.normal_()
        assert side.put(prompt) == 8
        first.kill()
        with pytest.raises(ToldError):
            side.get(prompt)
        side.wait(is_available=False)
        with pytest.raises(ToldError):
            side.put(prompt)
        with probed_server(port=first.port) as second:
            side.wait(is_available=True)
            assert side.get(prompt) == 0, "a new one holds nothing"
            assert side.put(prompt) == 8
            assert side.get(prompt) == 8
            assert torch.equal(side.content(8), side.memory.blocks[:8])
            assert second.is_quiet(), second.holds()


def test_a_server_that_hangs_holds_up_one_copy(server: ProbedServer) -> None:
    with Side(server.endpoint) as side:
        assert side.put(tokens(1, seed=7)) == BLOCKS_PER_CHUNK
        stop_process(server.pid)
        try:
            seconds = []
            for _ in range(6):
                started = time.monotonic()
                with pytest.raises(ToldError):
                    side.get(tokens(1, seed=7))
                seconds.append(time.monotonic() - started)
            assert min(seconds[1:]) < 0.1, "nobody waits for it any more"
        finally:
            os.kill(server.pid, signal.SIGCONT)
        side.wait(is_available=False)
        side.wait(is_available=True)
        assert side.get(tokens(1, seed=7)) == BLOCKS_PER_CHUNK
    assert server.is_quiet(), str(server.holds())


def test_a_clear_is_not_lost_while_the_server_is_unreachable(server: ProbedServer) -> None:
    prompt = tokens(2, seed=61)
    with Side(server.endpoint) as side, Side(server.endpoint) as other:
        assert side.put(prompt) == 8
        stop_process(server.pid)
        try:
            side.store._link.fail(side.store._link.epoch, "it hangs")
            side.wait(is_available=False)
            side.store.clear()
        finally:
            os.kill(server.pid, signal.SIGCONT)
        side.wait(is_available=True)
        assert side.states[-1].num_clears == 1
        assert side.get(prompt) == 0
        assert other.get(prompt) == 0, "it's cleared for all"
        assert side.put(prompt) == 8, "once"
        assert other.get(prompt) == 8


def test_a_server_that_responds_is_cleared_at_once(server: ProbedServer) -> None:
    prompt = tokens(2, seed=62)
    with Side(server.endpoint) as side, Side(server.endpoint) as other:
        assert side.put(prompt) == 8
        assert side.states[-1].num_clears == 0
        side.store.clear()
        side.wait(is_available=False)
        assert other.get(prompt) == 0
        side.wait(is_available=True)
        assert side.states[-1].num_clears == 1
        assert side.get(prompt) == 0
        assert side.put(prompt) == 8


@contextmanager
def redis() -> Iterator[int]:
    """A Redis server of its own, for as long as the test lasts: its port."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("there is no redis-server here")
    port = free_port()
    process = subprocess.Popen(
        [program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""], stdout=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: redis_says(port, b"PING") == b"+PONG\r\n", "Redis doesn't answer")
        yield port
    finally:
        process.kill()
        process.wait()


def redis_says(port: int, command: bytes) -> bytes:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as connection:
            connection.sendall(command + b"\r\n")
            return connection.recv(100)
    except ConnectionError:
        return b""


@pytest.mark.parametrize("kind", ["fs", "resp"])
def test_another_server_finds_what_the_first_left_in_its_back_end(kind: str, tmp_path: Path) -> None:
    prompt = tokens(3, seed=8)
    with ExitStack() as stack:
        if kind == "fs":
            backend = {"type": "fs", "base_path": str(tmp_path)}
        else:
            backend = {"type": "resp", "host": "127.0.0.1", "port": stack.enter_context(redis())}

        def is_kept() -> bool:
            if kind == "fs":
                return len(list(tmp_path.rglob("*.data"))) == 3
            return redis_says(int(backend["port"]), b"DBSIZE") == b":3\r\n"

        expected = put_and_wait(backend, prompt, is_kept)
        with probed_server(backend) as second, Side(second.endpoint) as side:
            assert side.get(prompt) == 12
            assert torch.equal(side.content(12), expected)
            assert second.is_quiet(), str(second.holds())


def put_and_wait(backend: dict[str, Any], prompt: list[int], is_kept: Callable[[], bool]) -> torch.Tensor:
    """Store a prompt of three chunks in a server that ends when its back end has them; what is in the blocks."""
    with probed_server(backend) as first, Side(first.endpoint) as side:
        side.memory.blocks.normal_()
        expected = side.memory.blocks[:12].clone()
        assert side.put(prompt) == 12
        wait_until(is_kept, "not all is written")
    return expected


@pytest.mark.parametrize("most", [1, 3, 4, 7])
def test_blocks_go_through_staging_in_parts(server: ProbedServer, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with less room than a chunk takes; here the device is host memory."""
    monkeypatch.setattr("splitserve.kvconnector.lmcache.lane.block_bytes_of", CudaBlockBytes)
    monkeypatch.setattr("splitserve.kvconnector.lmcache.block_bytes.STAGING_BYTES", most * 65536)
    prompt = tokens(4, seed=40 + most)
    with Side(server.endpoint) as side:
        assert side.memory.block_bytes == 65536
        side.memory.blocks.normal_()
        expected = side.memory.blocks[:16].clone()
        assert side.put(prompt) == 16
        for first in (0, 3, 9, 14):
            side.memory.blocks[16:].zero_()
            assert side.get(prompt, first) == 16 - first
            assert torch.equal(side.content(16 - first), expected[first:])
        damage(server, side, block=9)
        side.memory.blocks[16:].zero_()
        with pytest.raises(PartialCopyError) as caught:
            side.get(prompt, 2)
        assert caught.value.num_good == 7
        assert torch.equal(side.content(14)[:7], expected[2:9])
        assert not side.content(14)[7:].any(), "what isn't right doesn't reach the device"
