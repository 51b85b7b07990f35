"""Chats whose history is larger than the block pool, on real clusters with a host tier: the same tokens."""

import asyncio
import os
import random
import signal
import threading
import time
from pathlib import Path

import aiohttp
import pytest

from serving import complete, wait_until_quiet, worker_metrics
from splitserve.config import EngineConfig
from splitserve.orchestration.launcher import LocalCluster
from splitserve.orchestration.shorthand import simple_spec
from test_end_to_end import BLOCK_SIZE, body, cluster

NUM_USERS = 20
NUM_TURNS = 6
TURN_TOKENS = 40
ANSWER_TOKENS = 8
BLOCK_BYTES = 4 * 4 * 2 * BLOCK_SIZE * 32 * 4  # of the tiny model, in float32
SMALL_POOL = 48 * BLOCK_BYTES  # four users' last turns fill it

# Whole blocks of the turns before. The KV of an answer's last token was never needed, so it isn't there.
KEPT = NUM_USERS * sum(
    ((TURN_TOKENS + ANSWER_TOKENS) * turn - 1) // BLOCK_SIZE * BLOCK_SIZE for turn in range(1, NUM_TURNS)
)


def chat(url: str, model: Path) -> tuple[list[list[list[int]]], int]:
    """All users at once, each one turn after the other: tokens by user and turn; prompt tokens that were cached."""
    chosen = random.Random(11)
    said = [
        [[chosen.randrange(300, 1500) for _ in range(TURN_TOKENS)] for _ in range(NUM_TURNS)] for _ in range(NUM_USERS)
    ]

    async def user(session: aiohttp.ClientSession, turns: list[list[int]]) -> tuple[list[list[int]], int]:
        history: list[int] = []
        answers, num_cached = [], 0
        for turn in turns:
            history = history + turn
            answer = await complete(session, url, body(model, history, max_tokens=ANSWER_TOKENS))
            assert answer["status"] == 200, answer
            answers.append(answer["choices"][0]["token_ids"])
            num_cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            history = history + answers[-1]
        return answers, num_cached

    async def run() -> list[tuple[list[list[int]], int]]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            return list(await asyncio.gather(*(user(session, turns) for turns in said)))

    results = asyncio.run(run())
    return [answers for answers, _ in results], sum(num_cached for _, num_cached in results)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("shape", ["mixed", "1P1D"])
def test_chats_come_back_from_the_host_tier(shape: str, tiny_qwen3: Path) -> None:
    with cluster(tiny_qwen3, "mixed") as plenty:
        expected, _ = chat(plenty.url, tiny_qwen3)
    if shape == "mixed":  # the same without a tier, to see that the pool is too small
        with cluster(tiny_qwen3, shape, kv_memory_bytes=SMALL_POOL, max_model_len=512) as without:
            answers, cached = chat(without.url, tiny_qwen3)
            assert answers == expected
            assert cached < 0.7 * KEPT
            assert all(not load["tier_blocks"] for load in wait_until_quiet(without.url).values())
    tiers = {"host_kv_memory_bytes": 2000 * BLOCK_BYTES, "max_model_len": 512}
    with cluster(tiny_qwen3, shape, kv_memory_bytes=SMALL_POOL, **tiers) as running:
        answers, cached = chat(running.url, tiny_qwen3)
        assert answers == expected
        for load in wait_until_quiet(running.url).values():
            assert load["tier_failures_total"] == 0
            assert load["tier_loaded_blocks_total"] > NUM_USERS
            assert load["tier_blocks"] == load["tier_stored_blocks_total"], "the tier has room for all"
    assert 0.9 * KEPT <= cached <= KEPT  # a block that is evicted before its turn to go down is lost


@pytest.mark.timeout(180)
def test_chats_survive_the_death_of_a_worker_with_host_and_disk_tiers(tiny_qwen3: Path, tmp_path: Path) -> None:
    """The pool is too small for the chats, and so is the host tier; the worker that dies finds its files again."""
    with cluster(tiny_qwen3, "mixed") as plenty:
        expected, _ = chat(plenty.url, tiny_qwen3)
    engine = EngineConfig(
        model=str(tiny_qwen3),
        dtype="float32",
        block_size=BLOCK_SIZE,
        kv_memory_bytes=SMALL_POOL,
        max_model_len=512,
        host_kv_memory_bytes=100 * BLOCK_BYTES,
        disk_kv_dir=str(tmp_path),
    )
    with LocalCluster(simple_spec(engine, port=0, num_mixed=2), log_level="warning") as running:
        watcher = threading.Thread(target=running.watch, daemon=True)  # which starts the dead worker again
        killer = threading.Thread(target=kill_one, args=(running, "mixed-0", 30))
        watcher.start()
        killer.start()
        answers, _ = chat(running.url, tiny_qwen3)
        killer.join()
        assert answers == expected
        wait_until_quiet(running.url)
        again, cached = chat(running.url, tiny_qwen3)
        assert again == expected
        assert cached > KEPT / 2
        loads = wait_until_quiet(running.url)
        running.request_stop("the test is over")
        watcher.join()
    assert set(loads) == {"mixed-0", "mixed-1"}
    for load in loads.values():
        assert load["tier_failures_total"] == 0
        assert load["tier_loaded_blocks_total"] > NUM_USERS
        assert load["tier_blocks"] > 100, "more than the host tier holds"


def kill_one(running: LocalCluster, worker: str, num_requests: int) -> None:
    """SIGKILL once the cluster has drawn the tokens of that many requests."""
    while (
        sum(load["output_tokens_total"] for load in worker_metrics(running.url).values()) < num_requests * ANSWER_TOKENS
    ):
        time.sleep(0.05)
    os.kill(running.pids[worker], signal.SIGKILL)
