"""Chats whose history is larger than the block pool, on real clusters with a host tier: the same tokens."""

import re
import signal
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from serving import complete_all, transformers_greedy, wait_until_quiet, worker_metrics
from small_clusters import BLOCK_SIZE, body, cluster
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig
from tier_chats import ANSWER_TOKENS, BLOCK_BYTES, KEPT, NUM_TURNS, NUM_USERS, SMALL_POOL, chat
from waiting import PATIENCE_SECONDS, wait_until


@pytest.mark.parametrize("shape", ["mixed", pytest.param("1P1D", marks=pytest.mark.slow)])
def test_chats_come_back_from_the_host_tier(shape: str, tiny_qwen3: Path, chat_tokens: list[list[list[int]]]) -> None:
    if shape == "mixed":  # the same without a tier, to see that the pool is too small
        with cluster(tiny_qwen3, shape, kv_memory_bytes=SMALL_POOL, max_model_len=512) as without:
            answers, cached = chat(without.url, tiny_qwen3)
            assert answers == chat_tokens
            assert cached < 0.7 * KEPT
            assert all(not load["tier_blocks"] for load in wait_until_quiet(without.url).values())
    tiers = {"host_kv_memory_bytes": 2000 * BLOCK_BYTES, "max_model_len": 512}
    with cluster(tiny_qwen3, shape, kv_memory_bytes=SMALL_POOL, **tiers) as running:
        answers, cached = chat(running.url, tiny_qwen3)
        assert answers == chat_tokens
        for load in wait_until_quiet(running.url).values():
            assert load["tier_failures_total"] == 0
            assert load["tier_loaded_blocks_total"] > NUM_USERS
            assert load["tier_blocks"] == load["tier_stored_blocks_total"], "the tier has room for all"
        for tier in tier_metrics(running.url).values():
            assert (tier["slots"], tier["evicted_blocks_total"], tier["failures_total"]) == (2000, 0, 0)
            assert tier["hits_total"] == tier["loaded_blocks_total"] > NUM_USERS
            assert tier["misses_total"] > 0 and tier["blocks"] == tier["stored_blocks_total"]
            assert tier["loaded_bytes_total"] == tier["loaded_blocks_total"] * BLOCK_BYTES
            assert tier["load_seconds_total"] > 0 and tier["store_seconds_total"] > 0
    assert 0.9 * KEPT <= cached <= KEPT  # a block that is evicted before its turn to go down is lost


def test_chats_survive_the_death_of_a_worker_with_host_and_disk_tiers(
    tiny_qwen3: Path, chat_tokens: list[list[list[int]]], tmp_path: Path
) -> None:
    """The pool is too small for the chats, and so is the host tier; the worker that dies finds its files again."""
    engine = EngineConfig(
        model=str(tiny_qwen3),
        dtype="float32",
        block_size=BLOCK_SIZE,
        kv_memory_bytes=SMALL_POOL,
        max_model_len=512,
        host_kv_memory_bytes=30 * BLOCK_BYTES,
        disk_kv_dir=str(tmp_path),
    )
    with LocalCluster(simple_spec(engine, port=0, num_mixed=2), log_level="warning") as running:
        watcher = threading.Thread(target=running.watch, daemon=True)  # which starts the dead worker again
        killer = threading.Thread(target=kill_one, args=(running, "mixed-0", 20))
        watcher.start()
        killer.start()
        answers, _ = chat(running.url, tiny_qwen3)
        killer.join()
        assert answers == chat_tokens
        assert running.wait_ready("mixed-0", PATIENCE_SECONDS)
        wait_until(lambda: [each["ready"] for each in worker_metrics(running.url).values()] == [1, 1])
        wait_until_quiet(running.url)
        again, cached = chat(running.url, tiny_qwen3)
        assert again == chat_tokens
        assert cached > KEPT / 2
        loads = wait_until_quiet(running.url)
        running.request_stop("the test is over")
        watcher.join()
    assert set(loads) == {"mixed-0", "mixed-1"}
    for load in loads.values():
        assert load["tier_failures_total"] == 0
        assert load["tier_loaded_blocks_total"] > NUM_USERS
        assert load["tier_blocks"] > 30, "more than the host tier holds"


def test_workers_read_prefixes_from_each_other(tiny_qwen3: Path, chat_tokens: list[list[list[int]]]) -> None:
    """The router follows what each of two workers holds; one dies, and is there again, while they read."""
    shared = [300 + 7 * position % 1200 for position in range(20 * BLOCK_SIZE)]
    prompts = [[*shared, *range(400, 401 + number)] for number in range(10)]
    bodies = [body(tiny_qwen3, prompt, max_tokens=4) for prompt in prompts]
    engine = EngineConfig(
        model=str(tiny_qwen3),
        dtype="float32",
        block_size=BLOCK_SIZE,
        kv_memory_bytes=SMALL_POOL,
        max_model_len=512,
        max_num_seqs=4,
        host_kv_memory_bytes=2000 * BLOCK_BYTES,
        kv_events=True,
    )
    with LocalCluster(simple_spec(engine, port=0, num_mixed=2), log_level="warning") as running:
        complete_all(running.url, bodies[:1], at_once=False)
        answers, cached = chat(running.url, tiny_qwen3)  # which drives the first prompt from the device
        assert answers == chat_tokens
        found = complete_all(running.url, bodies, at_once=True)
        for answer, reference in zip(found, transformers_greedy(tiny_qwen3, prompts, 4), strict=True):
            assert reference.agrees(answer["choices"][0]["token_ids"])
        loads = wait_until_quiet(running.url).values()
        assert sum(load["peer_prefix_blocks_total"] for load in loads) >= 20, "nobody read from the other one"
        assert sum(load["tier_failures_total"] + load["peer_prefix_failures_total"] for load in loads) == 0
        assert cached > 0.8 * KEPT
        watcher = threading.Thread(target=running.watch, daemon=True)  # which starts the dead worker again
        killer = threading.Thread(target=kill_one, args=(running, "mixed-0", NUM_USERS * NUM_TURNS + 30))
        watcher.start()
        killer.start()
        answers, _ = chat(running.url, tiny_qwen3)
        killer.join()
        assert answers == chat_tokens
        wait_until_quiet(running.url)
        running.request_stop("the test is over")
        watcher.join()


def tier_metrics(url: str) -> dict[tuple[str, str], dict[str, float]]:
    """By worker and tier."""
    with urllib.request.urlopen(f"{url}/metrics") as page:
        text = page.read().decode()
    found: dict[tuple[str, str], dict[str, float]] = {}
    for name, labels, value in re.findall(r"^splitserve_tier_(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        where = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        found.setdefault((where["worker"], where["tier"]), {})[name] = float(value)
    assert found
    return found


def kill_one(running: LocalCluster, worker: str, num_requests: int) -> None:
    """SIGKILL once the cluster has drawn the tokens of that many requests."""
    while (
        sum(load["output_tokens_total"] for load in worker_metrics(running.url).values()) < num_requests * ANSWER_TOKENS
    ):
        time.sleep(0.05)
    running.send_signal(worker, signal.SIGKILL)
