"""Tiers below workers of two ranks, on real clusters: each rank keeps its own heads, and what one lacks is nowhere."""

import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmcache_metrics import availability, total
from lmcache_server import CHUNK_TOKENS, SEGMENTS, ProbedServer, probed_server
from serving import complete_all, wait_until_quiet
from splitserve.common.errors import SplitserveError
from splitserve.kvconnector.tiers.slot_folder import Header
from splitserve.models.weights.checkpoint import weights_version
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.block_hash import extend_hashes, root_hash, shard_root
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.memory_records import LayoutRecord

BLOCK_SIZE = 16
BLOCK_BYTES = 2 * 2 * 2 * BLOCK_SIZE * 32 * 4  # of all heads: two layers, two heads, keys and values, float32
PROMPTS = [[300 + 7 * (user * 160 + position) % 1100 for position in range(161 + user)] for user in range(8)]
IN_CHUNKS = sum(len(prompt) // CHUNK_TOKENS * CHUNK_TOKENS for prompt in PROMPTS)
NUM_BLOCKS = sum((len(prompt) + 3) // BLOCK_SIZE for prompt in PROMPTS)  # of which KV is kept, answers included
PATIENCE_SECONDS = 250.0


@contextmanager
def running(model: Path, size: int, **engine: Any) -> Iterator[LocalCluster]:
    """One worker of so many ranks, whose blocks are too few for the prompts."""
    config = EngineConfig(
        model=str(model), dtype="float32", block_size=BLOCK_SIZE, max_num_batched_tokens=64, max_num_seqs=8, threads=1,
        kv_memory_bytes=32 * BLOCK_BYTES, max_model_len=256, tensor_parallel_size=size, kv_load_seconds=60.0, **engine,
    )  # fmt: skip
    with LocalCluster(simple_spec(config, port=0, num_mixed=1), log_level="warning") as cluster:
        yield cluster


def ask(cluster: LocalCluster, model: Path, *, at_once: bool = False) -> tuple[list[list[int]], int]:
    """Tokens, and how many of the prompts' were cached."""
    options = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    bodies = [{"model": model.name, "prompt": prompt, **options} for prompt in PROMPTS]
    answers = complete_all(cluster.url, bodies, at_once=at_once)
    cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    return [answer["choices"][0]["token_ids"] for answer in answers], cached


def wait_for_lmcache(cluster: LocalCluster) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while list(availability(cluster.url).values()) != [True]:
        assert time.monotonic() < deadline, "the worker doesn't find LMCache's server"
        time.sleep(0.1)


def damage(server: ProbedServer, root: bytes) -> int:
    """One byte of each chunk that some rank has put there; how many those are."""
    path, start, found = SEGMENTS / server.segment, 0, 0
    head = b"SPLITLM2" + root
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        while (start := memory.find(head, start)) >= 0:
            memory[start + 4096 + 100] ^= 1
            start, found = start + len(head), found + 1
    return found


@pytest.mark.slow
def test_ranks_share_their_heads_through_lmcache(two_heads: Path) -> None:
    """By workers of one rank, and of two, and again of two: each finds what its like has stored, and nothing else."""
    with probed_server() as server:
        settings = {"lmcache_endpoint": server.endpoint}
        with running(two_heads, 1, **settings) as cluster:
            wait_for_lmcache(cluster)
            expected, _ = ask(cluster, two_heads)
            wait_until_quiet(cluster.url)
        with running(two_heads, 2, **settings) as cluster:
            wait_for_lmcache(cluster)
            assert ask(cluster, two_heads) == (expected, 0), "what the worker of one rank has stored has both heads"
            wait_until_used(cluster, two_heads, expected)
            assert ask(cluster, two_heads, at_once=True)[0] == expected
            wait_until_quiet(cluster.url)
        with running(two_heads, 2, **settings) as cluster:
            wait_for_lmcache(cluster)
            answers, cached = ask(cluster, two_heads)
            assert answers == expected and cached > 0.4 * IN_CHUNKS
            assert server.is_quiet(PATIENCE_SECONDS), str(server.holds())
            failures = total(wait_until_quiet(cluster.url), "tier_failures_total")
            assert damage(server, shard_root(layout_of(two_heads), 1)) >= IN_CHUNKS / CHUNK_TOKENS
            answers, cached = ask(cluster, two_heads)
            assert answers == expected
            assert cached < 0.2 * IN_CHUNKS, "what one rank can't use, none does"
            assert total(wait_until_quiet(cluster.url), "tier_failures_total") > failures
            server.kill()
            assert ask(cluster, two_heads)[0] == expected


def wait_until_used(cluster: LocalCluster, model: Path, expected: list[list[int]]) -> None:
    """The server holds all chunks in the end; one that is evicted before its turn to go down goes the next time."""
    deadline, cached = time.monotonic() + PATIENCE_SECONDS, 0
    while cached < 0.8 * IN_CHUNKS:
        assert time.monotonic() < deadline, "it isn't used again"
        answers, cached = ask(cluster, model)
        assert answers == expected
        wait_until_quiet(cluster.url)


def layout_of(model: Path) -> LayoutRecord:
    """Return the layout of a worker of two ranks."""
    version = weights_version(str(model), "auto")
    return LayoutRecord(model.name, version, "float32", BLOCK_SIZE, 2, 2, 32, tensor_parallel_size=2)


@pytest.mark.slow
def test_ranks_find_their_files_again(two_heads: Path, tmp_path: Path) -> None:
    """One file of a rank is gone when the worker starts again, and one is damaged when it's read."""
    settings = {"disk_kv_dir": str(tmp_path)}
    with running(two_heads, 2, **settings) as cluster:
        expected, _ = ask(cluster, two_heads)
        deadline, stored = time.monotonic() + PATIENCE_SECONDS, 0.0
        while stored < NUM_BLOCKS:
            assert time.monotonic() < deadline, f"only {stored} blocks have gone down"
            assert ask(cluster, two_heads)[0] == expected
            stored = total(wait_until_quiet(cluster.url), "tier_blocks")
    folder, rank_1 = tmp_path / "mixed-0", tmp_path / "mixed-0" / "rank-1"
    assert {path.name for path in folder.glob("*.kv")} == {path.name for path in rank_1.glob("*.kv")}
    file_of(two_heads, rank_1, PROMPTS[0], 3).unlink()
    damaged = file_of(two_heads, rank_1, PROMPTS[2], 5)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    with running(two_heads, 2, **settings) as cluster:
        assert total(wait_until_quiet(cluster.url), "tier_blocks") == NUM_BLOCKS - 1, "it's nowhere"
        answers, cached = ask(cluster, two_heads)
        assert answers == expected and cached == (NUM_BLOCKS - 7 - 5) * BLOCK_SIZE
        assert total(wait_until_quiet(cluster.url), "tier_failures_total") == 1


def file_of(model: Path, folder: Path, prompt: list[int], block: int) -> Path:
    """That has this block of the prompt."""
    hashes: list[bytes] = []
    extend_hashes(hashes, root_hash(layout_of(model)), prompt, BLOCK_SIZE)
    headers = {path: Header.parse(path.read_bytes()) for path in folder.glob("*.kv")}
    [found] = [path for path, header in headers.items() if header is not None and header.block_hash == hashes[block]]
    return found


def test_a_rank_that_cannot_have_its_files_says_so(two_heads: Path, tmp_path: Path) -> None:
    (tmp_path / "mixed-0").mkdir()
    (tmp_path / "mixed-0" / "rank-1").touch()
    said = pytest.raises(SplitserveError, match=r"rank 1: --disk-kv-dir: can't write to .*/rank-1")
    with said, running(two_heads, 2, disk_kv_dir=str(tmp_path)):
        pass
