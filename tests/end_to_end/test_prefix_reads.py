"""Real workers, real NIXL: a prefill worker reads the turns before from the decode worker that wrote them."""

import itertools
import random
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import complete_all, wait_for_news, wait_until_quiet, worker_metrics
from small_clusters import BLOCK_SIZE, body, cluster
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig, ProtocolConfig
from splitserve.protocol.request import Role
from splitserve.router.placement.policies import session_rank
from stopping import stop_process
from waiting import wait_until
from worker_views import view

TURN_TOKENS, ANSWER_TOKENS = 40, 200
STEP_TOKENS = 16  # so that computing takes much longer than reading
WARM_PROMPTS, WARM_TOKENS = 9, 31 * STEP_TOKENS  # for a model of the workers' own steps
FIRST, SECOND = ("prefill-0", "decode-0"), ("prefill-1", "decode-1")


@pytest.fixture(scope="module")
def pairs(tiny_qwen3: Path) -> Iterator[LocalCluster]:
    """Two pairs, which the session chooses. Nobody is started again who dies."""
    engine = EngineConfig(
        model=str(tiny_qwen3), dtype="float32", block_size=BLOCK_SIZE, kv_memory_bytes=64 << 20, max_model_len=1024,
        max_num_batched_tokens=STEP_TOKENS, max_num_seqs=8, tail_chunk_tokens=0,
    )  # fmt: skip
    protocol = ProtocolConfig(heartbeat_seconds=0.25, dead_after_seconds=8.0, read_deadline_seconds=30.0)
    spec = simple_spec(engine, port=0, num_prefill=2, num_decode=2, policy="session", protocol=protocol)
    with LocalCluster(spec, log_level="warning") as running:
        chosen = random.Random(1)
        for workers in (FIRST, SECOND):  # each its own prompts, of which the others have nothing to read
            prompts = [[chosen.randrange(300, 1500) for _ in range(WARM_TOKENS)] for _ in range(WARM_PROMPTS)]
            ask(running, tiny_qwen3, workers, *prompts, max_tokens=2)
        wait_for_news(running.url)
        yield running


@pytest.fixture(scope="module")
def alone(tiny_qwen3: Path) -> Iterator[LocalCluster]:
    with cluster(tiny_qwen3, "mixed", max_model_len=1024) as running:
        yield running


def session_of(workers: tuple[str, str]) -> str:
    """Return the name of a conversation that the policy places on these workers."""
    views = {role: [view(f"{role}-{number}", role) for number in (0, 1)] for role in (Role.PREFILL, Role.DECODE)}
    for name in map(str, itertools.count()):
        first = [min(each, key=lambda worker: session_rank(name, worker)) for each in views.values()]
        if tuple(worker.party.engine_id for worker in first) == workers:
            return name
    raise AssertionError


def ask(
    running: LocalCluster, model: Path, workers: tuple[str, str], *prompts: list[int], max_tokens: int = ANSWER_TOKENS
) -> list[list[int]]:
    """Return the tokens of answers, one after the other, by these workers."""
    session = {"max_tokens": max_tokens, "session_id": session_of(workers)}
    answers = complete_all(running.url, [body(model, prompt, **session) for prompt in prompts], at_once=False)
    for answer in answers:
        assert answer["status"] == 200, answer
    return [answer["choices"][0]["token_ids"] for answer in answers]


def new_turn(seed: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(300, 1500) for _ in range(TURN_TOKENS)]


def expected(alone: LocalCluster, model: Path, prompt: list[int]) -> list[int]:
    (answer,) = complete_all(alone.url, [body(model, prompt, max_tokens=ANSWER_TOKENS)], at_once=False)
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def connect(pairs: LocalCluster, model: Path, turn: list[int]) -> None:
    """Let the second prefill worker know the first decode worker: the first prompt that could be read is computed."""
    before = worker_metrics(pairs.url)["prefill-1"]
    if not before["peers_ready"]:
        (answer,) = ask(pairs, model, FIRST, turn)
        ask(pairs, model, SECOND, [*turn, *answer, *new_turn(99)], max_tokens=2)
        wait_until(lambda: worker_metrics(pairs.url)["prefill-1"]["peers_ready"] == 1, "a connection to decode-0")
        assert worker_metrics(pairs.url)["prefill-1"]["peer_prefixes_total"] == before["peer_prefixes_total"]


def read_by_peer(url: str) -> dict[tuple[str, str], float]:
    """Return the blocks of prefixes by reader and source."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        text = response.read().decode()
    found = {}
    for labels, value in re.findall(r"^splitserve_link_prefix_blocks_total\{(.*)\} (\S+)$", text, re.MULTILINE):
        names = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        found[names["worker"], names["peer"]] = float(value)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("decode", [pytest.param("decode-1", marks=pytest.mark.slow), "decode-0"])
def test_the_turn_before_is_read_from_the_worker_that_wrote_it(
    pairs: LocalCluster, alone: LocalCluster, tiny_qwen3: Path, decode: str
) -> None:
    """The same decode worker lends the prefix and pulls the rest, or another one decodes."""
    connect(pairs, tiny_qwen3, new_turn(10))
    before, blocks = wait_until_quiet(pairs.url)["prefill-1"], read_by_peer(pairs.url)
    turn = new_turn(11 if decode == "decode-1" else 12)
    (answer,) = ask(pairs, tiny_qwen3, FIRST, turn)
    conversation = [*turn, *answer, *new_turn(13)]
    assert ask(pairs, tiny_qwen3, ("prefill-1", decode), conversation) == [expected(alone, tiny_qwen3, conversation)]
    after = wait_until_quiet(pairs.url)
    written = (TURN_TOKENS + ANSWER_TOKENS - 1) // BLOCK_SIZE
    reader = after["prefill-1"]
    assert reader["peer_prefixes_total"] == before["peer_prefixes_total"] + 1
    assert reader["peer_prefix_blocks_total"] == before["peer_prefix_blocks_total"] + written
    computed = reader["prompt_tokens_total"] - before["prompt_tokens_total"]
    assert computed == len(conversation) - written * BLOCK_SIZE
    link = ("prefill-1", "decode-0")
    assert read_by_peer(pairs.url)[link] == blocks[link] + written
    for worker in after.values():
        assert worker["handover_failures_total"] == worker["peer_prefix_failures_total"] == 0


@pytest.mark.timeout(300)
def test_a_source_that_dies_before_the_read_costs_time_only(
    pairs: LocalCluster, alone: LocalCluster, tiny_qwen3: Path
) -> None:
    """It is stopped, so that nobody knows, until prefill has asked it; then it is killed. The last test, since it stays
    dead."""
    connect(pairs, tiny_qwen3, new_turn(20))
    before, turn = worker_metrics(pairs.url)["prefill-1"], new_turn(21)
    (answer,) = ask(pairs, tiny_qwen3, FIRST, turn)
    conversation, answers = [*turn, *answer, *new_turn(22)], []
    wait_until_quiet(pairs.url)  # its last heartbeat stays for a while
    stop_process(pairs.pids["decode-0"])
    client = threading.Thread(target=lambda: answers.extend(ask(pairs, tiny_qwen3, SECOND, conversation)))
    client.start()
    wait_until(lambda: worker_metrics(pairs.url)["prefill-1"]["num_waiting"] == 1, "prefill waits for its prefix")
    pairs.send_signal("decode-0", signal.SIGKILL)
    client.join()
    assert answers == [expected(alone, tiny_qwen3, conversation)]
    after: dict[str, Any] = wait_until_quiet(pairs.url)["prefill-1"]
    assert after["peer_prefix_failures_total"] == before["peer_prefix_failures_total"] + 1
    assert after["peer_prefixes_total"] == before["peer_prefixes_total"]
