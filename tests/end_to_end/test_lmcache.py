"""Clusters whose workers share an LMCache server: chats go on when a worker is replaced, and whatever becomes of it."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmcache_metrics import CHUNK_TOKENS, availability, total
from lmcache_server import python_with_lmcache, segments_of
from serving import wait_for_news, wait_until_quiet, worker_metrics
from small_clusters import BLOCK_SIZE
from splitserve.orchestration.cluster.host import LMCACHE, ChildProgress
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.cluster_spec import LMCacheSpec
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig
from tier_chats import BLOCK_BYTES, KEPT, NUM_USERS, SMALL_POOL, chat
from waiting import PATIENCE_SECONDS, wait_until


class Watched:
    """A cluster with an LMCache server that it has started. ``servers``: their process ids, as they come."""

    def __init__(self, model: Path, shape: dict[str, int], **engine: Any) -> None:
        python_with_lmcache()
        config = EngineConfig(
            model=str(model), dtype="float32", block_size=BLOCK_SIZE, kv_memory_bytes=SMALL_POOL, max_model_len=512,
            **engine,
        )  # fmt: skip
        lmcache = LMCacheSpec(memory="64MiB", chunk_tokens=CHUNK_TOKENS)
        self.servers: list[int] = []
        self.cluster = LocalCluster(
            simple_spec(config, port=0, lmcache=lmcache, **shape), show=self._note, log_level="warning"
        )

    def _note(self, progress: ChildProgress) -> None:
        if progress.name == LMCACHE and progress.stage == "ready":
            self.servers.append(int(progress.detail["pid"]))

    def wait_for_server(self, number: int) -> None:
        """The first, the second, ...; and until workers have found it, as far as they were told to look for it."""
        wait_until(lambda: len(self.servers) >= number, "LMCache's server isn't there")
        self.wait_for_workers()

    def wait_for_workers(self) -> None:
        wait_for_news(self.cluster.url)
        wait_until(
            lambda: set(availability(self.cluster.url).values()) == {True}, "workers don't find LMCache's server"
        )


@contextmanager
def watched(model: Path, shape: dict[str, int], **engine: Any) -> Iterator[Watched]:
    made = Watched(model, shape, **engine)
    with made.cluster as running, running.supervised():
        made.wait_for_server(1)
        keepers = {running.pids[LMCACHE]}
        assert segments_of(keepers)
        yield made
        keepers.add(running.pids[LMCACHE])
    assert not segments_of(keepers), "its shared memory is still there"
    assert not any(is_alive(pid) for pid in made.servers)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_chats_go_on_after_a_worker_is_replaced(tiny_qwen3: Path, chat_tokens: list[list[list[int]]]) -> None:
    """Two prefill workers, one of which is killed between the turns of the chats: the other, and its successor, find
    what it had computed."""
    with watched(tiny_qwen3, {"num_prefill": 2, "num_decode": 1}) as made:
        url = made.cluster.url
        answers, cached = chat(url, tiny_qwen3)
        assert answers == chat_tokens
        assert cached > KEPT / 2
        wait_until_quiet(url)
        made.cluster.send_signal("prefill-0", signal.SIGKILL)
        assert made.cluster.wait_ready("prefill-0", PATIENCE_SECONDS)
        made.wait_for_workers()
        before = worker_metrics(url)
        again, cached = chat(url, tiny_qwen3)
        assert again == chat_tokens
        assert cached > 0.8 * KEPT, "all of it was computed before"
        loads = wait_until_quiet(url)
        assert total(loads, "tier_failures_total") == 0
        assert loads["prefill-0"]["tier_loaded_blocks_total"] > NUM_USERS
        assert total(loads, "tier_loaded_blocks_total") > total(before, "tier_loaded_blocks_total")
        kill_keeper(made)


def kill_keeper(made: Watched) -> None:
    """Kill the process that watches LMCache's server: the server dies with it."""
    server, number = made.servers[-1], len(made.servers)
    os.kill(made.cluster.pids[LMCACHE], signal.SIGKILL)
    wait_until(lambda: not is_alive(server), "the server outlives the one that watches it")
    made.wait_for_server(number + 1)


def test_requests_are_right_while_the_server_is_killed_again_and_again(
    tiny_qwen3: Path, chat_tokens: list[list[list[int]]]
) -> None:
    with watched(tiny_qwen3, {"num_mixed": 1}, host_kv_memory_bytes=20 * BLOCK_BYTES) as made:

        def kill_servers() -> None:
            """Two of them, as they come. Freeze the second first: it shows no error at all."""
            for number in range(2):
                wait_until(lambda number=number: len(made.servers) > number, "LMCache's server isn't there again")
                time.sleep(1.0)
                if number == 1:
                    os.kill(made.servers[number], signal.SIGSTOP)
                    time.sleep(3.0)
                os.kill(made.servers[number], signal.SIGKILL)

        killer = threading.Thread(target=kill_servers)
        killer.start()
        while killer.is_alive():
            answers, _ = chat(made.cluster.url, tiny_qwen3)
            assert answers == chat_tokens
        made.wait_for_server(3)
        before = total(worker_metrics(made.cluster.url), "tier_stored_blocks_total")

        def is_used_again() -> bool:
            answers, _ = chat(made.cluster.url, tiny_qwen3)
            assert answers == chat_tokens
            return total(worker_metrics(made.cluster.url), "tier_stored_blocks_total") > before + NUM_USERS

        wait_until(is_used_again, "it isn't used again")
        wait_until_quiet(made.cluster.url)
