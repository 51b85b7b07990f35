"""Part ``shared`` of ``splitserve bench tiers``: two prefill workers with an LMCache server, against two without.

The chats of part ``chats``, on clusters of two prefill workers and one decode worker. Half-way one prefill worker of
each cluster is killed and replaced by a new one with an empty cache. Then prompts that share nothing, as in
``no_reuse``.
"""

import argparse
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from splitserve.benchmarks.common.arguments import positive
from splitserve.benchmarks.engine.engine_options import engine_config
from splitserve.benchmarks.kv.tier_client import ARMS, arms_in_turn, ask
from splitserve.common.errors import SplitserveError
from splitserve.orchestration.cli.option_types import positive_bytes
from splitserve.orchestration.cluster.host import LMCACHE, ChildProgress
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.cluster_spec import LMCacheSpec
from splitserve.orchestration.spec.shorthand import simple_spec

REPLACED = "prefill-0"
START_SECONDS = 300.0
FIND_SECONDS = 3.0  # longest time until a worker has found the server
LEAST_SHARED_TURNS = 3
"""The first isn't measured; of the others one at least comes before the replacement, and one after it."""

NoReuse = Callable[[dict[str, LocalCluster], argparse.Namespace, int], dict[str, Any]]


def add_shared_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("part shared")
    group.add_argument(
        "--lmcache-memory", type=positive_bytes, default="4GiB", metavar="SIZE", help="memory of the server"
    )
    group.add_argument(
        "--lmcache-chunk-tokens", type=positive, default=64, help="length of the chunks in which it keeps KV"
    )


def shared(options: argparse.Namespace, model: str, vocab_size: int, no_reuse: NoReuse) -> dict[str, Any]:
    """Return the figures of the chats, before and after the replacement, and of ``no_reuse``."""
    with ExitStack() as stack:
        clusters: dict[str, LocalCluster] = {}
        for arm in ARMS:
            cluster = _cluster(options, model, has_lmcache=arm == "with")
            clusters[arm] = stack.enter_context(cluster)
            stack.enter_context(cluster.supervised())
        _wait_for_lmcache(cluster)
        chats = _chats(clusters, options, vocab_size)
        return {"chats": chats, "no_reuse": no_reuse(clusters, options, vocab_size)}


class _Cluster(LocalCluster):
    """Cluster with a flag for the start of its LMCache server."""

    has_server = False


def _cluster(options: argparse.Namespace, model: str, *, has_lmcache: bool) -> _Cluster:
    engine = engine_config(options, model, kv_keep=options.kv_keep)
    lmcache = LMCacheSpec(memory=options.lmcache_memory, chunk_tokens=options.lmcache_chunk_tokens)
    spec = simple_spec(engine, port=0, num_prefill=2, num_decode=1, lmcache=lmcache if has_lmcache else None)

    def note(progress: ChildProgress) -> None:
        cluster.has_server |= (progress.name, progress.stage) == (LMCACHE, "ready")

    cluster = _Cluster(spec, show=note, log_level="warning")
    return cluster


def _wait_for_lmcache(cluster: _Cluster) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not cluster.has_server:
        if time.monotonic() > deadline:
            raise SplitserveError(f"LMCache's server isn't there after {START_SECONDS:g} s")
        time.sleep(0.1)
    time.sleep(FIND_SECONDS)


def _replace(cluster: LocalCluster) -> None:
    os.kill(cluster.pids[REPLACED], signal.SIGKILL)
    time.sleep(0.5)
    if not cluster.wait_ready(REPLACED, START_SECONDS):
        raise SplitserveError(f"{REPLACED} isn't there again after {START_SECONDS:g} s")


def _chats(clusters: dict[str, LocalCluster], options: argparse.Namespace, vocab_size: int) -> dict[str, Any]:
    chosen = random.Random(options.seed)
    histories: list[list[int]] = [[] for _ in range(options.users)]
    pairs: dict[str, list[tuple[float, float]]] = {"before": [], "after": []}  # TTFT without and with
    replaced_at, num_different = (options.turns + 1) // 2, 0
    for turn in range(options.turns):
        if turn == replaced_at:
            for cluster in clusters.values():
                _replace(cluster)
            time.sleep(FIND_SECONDS)
        for user in range(options.users):
            history = histories[user] + [chosen.randrange(vocab_size) for _ in range(options.turn_tokens)]
            answers = {arm: ask(clusters[arm], [history], options.output_tokens)[0] for arm in arms_in_turn(user)}
            num_different += answers["with"].token_ids != answers["without"].token_ids
            histories[user] = history + answers["without"].token_ids
            if turn:
                phase = "after" if turn >= replaced_at else "before"
                pairs[phase].append((answers["without"].ttft_seconds, answers["with"].ttft_seconds))
    figures = {phase: _figures(each) for phase, each in {**pairs, "all": pairs["before"] + pairs["after"]}.items()}
    return {"requests": options.users * options.turns, "different_answers": num_different, **figures}


def _figures(pairs: list[tuple[float, float]]) -> dict[str, float]:
    return {
        "without_ttft_ms": statistics.median(without for without, _ in pairs) * 1e3,
        "with_ttft_ms": statistics.median(with_ for _, with_ in pairs) * 1e3,
        "ttft_ratio": statistics.median(with_ / without for without, with_ in pairs),
        "ttft_mean_ratio": sum(with_ for _, with_ in pairs) / sum(without for without, _ in pairs),
    }


def shared_rows(part: dict[str, Any]) -> list[list[Any]]:
    """Return a line for each figure: its name, without, with, ratio."""
    chats, fresh = part["chats"], part["no_reuse"]
    texts = {"before": "TTFT with LMCache, ms", "after": "TTFT with LMCache, a worker replaced, ms"}
    rows = [
        [text, *(chats[at][f"{arm}_ttft_ms"] for arm in ARMS), chats[at]["ttft_ratio"]] for at, text in texts.items()
    ]
    rates = (fresh[f"{arm}_requests_per_second"] for arm in ARMS)
    return [*rows, ["requests/s with LMCache, without reuse", *rates, fresh["throughput_ratio"]]]
