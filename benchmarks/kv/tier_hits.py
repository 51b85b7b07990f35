"""Parts of ``splitserve bench tiers`` about single prompts: the gain of a hit, its cost for decoding requests, and the
cost of tiers for prompts that all fit in the block pool."""

import argparse
import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import numpy as np

from splitserve.benchmarks.kv.tier_client import ARMS, Answer, arms_in_turn, ask, complete, metrics, session
from splitserve.common.errors import SplitserveError
from splitserve.models.config import load_model_config
from splitserve.orchestration.cluster.launcher import LocalCluster

Clusters = Mapping[str, LocalCluster]
PAUSE_SECONDS = 0.05
HEARTBEATS_SECONDS = 2.2
STREAM_TOKENS = 128
"""Length of the prompts of measured streams: longer than a block of any size that a device has."""


def pool_tokens(clusters: Clusters, options: argparse.Namespace) -> int:
    """Return the tokens that fit a worker's block pool, from the size of its memory (ranks and FP8 aside)."""
    config = load_model_config(clusters["with"].spec.model.path)
    item = 4 if options.dtype == "float32" or (config.dtype == "float32" and options.dtype == "auto") else 2
    token_bytes = config.num_layers * config.num_kv_heads * 2 * config.head_dim * item
    return int(options.kv_memory) // token_bytes


def prompts_beyond(num_tokens: int, capacity: int, chosen: random.Random, vocab_size: int) -> list[list[int]]:
    """Make so many prompts that, if sent in turn, each has left the pool before it is sent again."""
    count = capacity // num_tokens + 2
    return [[chosen.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(count)]


def hits(clusters: Clusters, options: argparse.Namespace, vocab_size: int) -> list[dict[str, Any]]:
    """Measure hits of each length: prompts of that many tokens, all of them once, then again ``hit_rounds`` times; pair
    by pair.

    The worker with tiers gets each twice: the second time the prompt is on the device. ``load_ms`` is the time of
    copies.
    """
    chosen = random.Random(options.seed + 2)
    return [_hits_of(clusters, options, length, chosen, vocab_size) for length in options.hit_tokens]


def _hits_of(
    clusters: Clusters, options: argparse.Namespace, length: int, chosen: random.Random, vocab_size: int
) -> dict[str, Any]:
    prompts = prompts_beyond(length, pool_tokens(clusters, options), chosen, vocab_size)
    ttft: dict[str, list[float]] = {arm: [] for arm in ARMS}
    cached: dict[str, list[int]] = {arm: [] for arm in ARMS}
    resident: list[float] = []
    load_seconds = 0.0
    for number in range(options.hit_rounds + 1):
        if number == 1:
            load_seconds = _load_seconds(clusters["with"])
        for prompt in prompts:
            for arm in arms_in_turn(number):
                [answer] = ask(clusters[arm], [prompt], 1)
                if number:  # nothing of the prompts is cached before that
                    ttft[arm].append(answer.ttft_seconds)
                    cached[arm].append(answer.num_cached_tokens)
            if number:
                [again] = ask(clusters["with"], [prompt], 1)
                resident.append(again.ttft_seconds)
    load_seconds = _load_seconds(clusters["with"]) - load_seconds
    speedups = [without / found for found, without in zip(ttft["with"], ttft["without"], strict=True)]
    return {
        "tokens": length,
        "requests": len(ttft["with"]),
        **{f"{arm}_ttft_ms": statistics.median(ttft[arm]) * 1e3 for arm in ARMS},
        **{f"{arm}_cached_share": statistics.mean(cached[arm]) / length for arm in ARMS},
        "resident_ttft_ms": statistics.median(resident) * 1e3,
        "load_ms": load_seconds / len(ttft["with"]) * 1e3,
        "speedup": statistics.median(speedups),
        "speedups": speedups,
    }


def _load_seconds(cluster: LocalCluster) -> float:
    """Return the seconds of all loads so far, from a heartbeat after the last one."""
    time.sleep(HEARTBEATS_SECONDS)
    return sum(values["load_seconds_total"] for values in metrics(cluster.url, "tier").values())


def fits(clusters: Clusters, options: argparse.Namespace, vocab_size: int) -> dict[str, Any]:
    """Send the same few prompts again and again, which never leave the pool: requests per second of both arms, in
    turn."""
    chosen = random.Random(options.seed + 3)
    prompts = [
        [chosen.randrange(vocab_size) for _ in range(options.fresh_tokens)] for _ in range(options.fresh_requests)
    ]
    rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for number in range(options.rounds + 1):
        for arm in arms_in_turn(number):
            started = time.perf_counter()
            ask(clusters[arm], prompts, options.output_tokens)
            if number:  # the first round computes the prompts
                rates[arm].append(len(prompts) / (time.perf_counter() - started))
    return {
        "requests": options.rounds * len(prompts),
        **{f"{arm}_requests_per_second": statistics.median(rates[arm]) for arm in ARMS},
        **throughput_ratios(rates),
    }


def throughput_ratios(rates: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the median of the ratios, round by round, and all of them."""
    ratios = [with_tiers / without for with_tiers, without in zip(rates["with"], rates["without"], strict=True)]
    return {"throughput_ratio": statistics.median(ratios), "throughput_ratios": ratios}


# ---- the pace of those that decode ----


def pace(clusters: Clusters, options: argparse.Namespace, vocab_size: int) -> dict[str, Any]:
    """Measure streams that decode on the worker with tiers while prompts are onboarded there, one after the other. Each
    prompt is sent twice: the second time it's on the device, so that the load is the only difference. Between prompts
    there are pauses.

    Tokens' gaps, in milliseconds: ``quiet``, beside prompts found on the device, and beside loads.
    """
    return asyncio.run(_pace(clusters, options, vocab_size))


async def _pace(clusters: Clusters, options: argparse.Namespace, vocab_size: int) -> dict[str, Any]:
    cluster, chosen = clusters["with"], random.Random(options.seed + 4)
    room = pool_tokens(clusters, options)
    prompts = prompts_beyond(options.pace_tokens, room, chosen, vocab_size)
    streams = [[chosen.randrange(vocab_size) for _ in range(STREAM_TOKENS)] for _ in range(options.pace_streams)]
    per_stream = max(64, room // 4 // max(1, options.pace_streams) - STREAM_TOKENS)
    async with session() as http:
        for prompt in prompts:
            await complete(http, cluster, prompt, 1)
        running: list[Answer] = []
        tasks = [asyncio.create_task(_stream(http, cluster, prompt, per_stream, running)) for prompt in streams]
        while len(running) < len(tasks):
            await asyncio.sleep(PAUSE_SECONDS)
            _raise_failure(tasks)
        spans: dict[str, list[tuple[float, float]]] = {"quiet": [], "resident": [], "loads": []}
        cached: list[int] = []
        for prompt in itertools.cycle(prompts):
            if any(task.done() for task in tasks) or len(spans["loads"]) >= options.pace_rounds:
                break
            for name in ("loads", "resident"):
                answer = await complete(http, cluster, prompt, 1)
                spans[name].append((answer.sent, answer.arrivals[0]))
                cached.append(answer.num_cached_tokens)
            started = time.perf_counter()
            await asyncio.sleep(4 * PAUSE_SECONDS)
            spans["quiet"].append((started, time.perf_counter()))
        _raise_failure(tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return _paces(running, spans) | {"cached_share": statistics.mean(cached) / options.pace_tokens}


async def _stream(
    http: aiohttp.ClientSession, cluster: LocalCluster, prompt: list[int], output_tokens: int, running: list[Answer]
) -> None:
    """Run a stream; its arrivals are added to ``running`` as they come, since it is stopped before its end."""
    answer = Answer(time.perf_counter())

    def note() -> None:
        if not answer.arrivals:
            running.append(answer)
        answer.arrivals.append(time.perf_counter())

    await complete(http, cluster, prompt, output_tokens, note)


def _raise_failure(tasks: list["asyncio.Task[None]"]) -> None:
    for task in tasks:
        if task.done() and task.exception() is not None:
            raise SplitserveError(f"a stream failed: {task.exception()}") from task.exception()


def _paces(running: list[Answer], spans: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Compute the gaps between tokens that ended in one of the spans."""
    gaps: dict[str, list[float]] = {name: [] for name in spans}
    for answer in running:
        for before, after in itertools.pairwise(answer.arrivals):
            for name, times in spans.items():
                if any(low <= after <= high for low, high in times):
                    gaps[name].append(after - before)
    if not all(gaps.values()):
        raise SplitserveError("the streams ended before anything could be measured: give --kv-memory more")
    result: dict[str, Any] = {"loads": len(spans["loads"]), "streams": len(running)}
    for name, values in gaps.items():
        result[f"{name}_itl_ms"] = statistics.mean(values) * 1e3
        result[f"{name}_itl_p99_ms"] = float(np.percentile(values, 99)) * 1e3
    result["loads_over_resident"] = result["loads_itl_ms"] / result["resident_itl_ms"]
    result["loads_over_quiet"] = result["loads_itl_ms"] / result["quiet_itl_ms"]
    return result
