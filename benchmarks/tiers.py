"""``splitserve bench tiers``: what KV beyond the device is worth, and what it costs where nothing comes back.

Two workers side by side on the same checkpoint, one with a host tier. First chats whose history is larger than the
block pool: all users take turn 1, then all take turn 2, and so on, one request at a time and each on both workers in
turn, so a noisy machine disturbs both alike. Reported: TTFT of turns 2 and later, and the median of the ratios, pair by
pair; whether both gave the same tokens. Then prompts that share nothing, in rounds that alternate between the two:
requests per second, and the median of the ratios.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from splitserve.benchmarks.report import table, write_result
from splitserve.config import KEEP_POLICIES, EngineConfig
from splitserve.errors import SplitserveError
from splitserve.models.config import load_model_config
from splitserve.models.demo import SHAPES, write_demo_model
from splitserve.orchestration.launcher import LocalCluster
from splitserve.orchestration.shorthand import simple_spec

ARMS = ("without", "with")


def start_cluster(options: argparse.Namespace, model: str, host_bytes: int) -> LocalCluster:
    """One mixed worker."""
    engine = EngineConfig(
        model=model,
        dtype=options.dtype,
        device=options.device,
        load_format=options.load_format,
        threads=options.threads,
        kv_memory_bytes=options.kv_memory_mib << 20,
        host_kv_memory_bytes=host_bytes,
        kv_keep=options.kv_keep,
    )
    return LocalCluster(simple_spec(engine, port=0, num_mixed=1), log_level="warning")


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: list[int]
    ttft_seconds: float


def ask(cluster: LocalCluster, prompts: list[list[int]], output_tokens: int) -> list[Answer]:
    """All at once, greedily. Raises :class:`SplitserveError` if one failed."""

    async def one(session: aiohttp.ClientSession, prompt: list[int]) -> Answer:
        body = {
            "model": cluster.spec.served_model_name,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        token_ids: list[int] = []
        sent, first = time.perf_counter(), 0.0
        async with session.post(f"{cluster.url}/v1/completions", json=body) as response:
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                if not data or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "choices" not in event:
                    raise SplitserveError(f"a request failed: {data.decode()}")
                first = first or time.perf_counter()
                token_ids += [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
        if len(token_ids) != output_tokens:
            raise SplitserveError(f"a request ended after {len(token_ids)} of {output_tokens} tokens")
        return Answer(token_ids, first - sent)

    async def run_all() -> list[Answer]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
            return list(await asyncio.gather(*(one(session, prompt) for prompt in prompts)))

    return asyncio.run(run_all())


def arms_in_turn(number: int) -> Iterator[str]:
    """Both, a different one first each time."""
    yield from ARMS if number % 2 else reversed(ARMS)


def chats(clusters: dict[str, LocalCluster], options: argparse.Namespace, vocab_size: int) -> dict[str, Any]:
    chosen = random.Random(options.seed)
    histories: dict[str, list[list[int]]] = {arm: [[] for _ in range(options.users)] for arm in ARMS}
    ttft: dict[str, list[float]] = {arm: [] for arm in ARMS}
    num_different = 0
    for turn in range(options.turns):
        for user in range(options.users):
            said = [chosen.randrange(vocab_size) for _ in range(options.turn_tokens)]
            answers = {}
            for arm in arms_in_turn(user):
                history = histories[arm][user] = histories[arm][user] + said
                [answer] = ask(clusters[arm], [history], options.output_tokens)
                answers[arm] = answer.token_ids
                if turn:
                    ttft[arm].append(answer.ttft_seconds)
            num_different += answers["with"] != answers["without"]
            for arm in ARMS:  # what was answered without a tier is what was said, in both
                histories[arm][user] = histories[arm][user] + answers["without"]
    ratios = [w / wo for w, wo in zip(ttft["with"], ttft["without"], strict=True)]
    return {
        "requests": options.users * options.turns,
        "different_answers": num_different,
        **{f"{arm}_ttft_ms": statistics.median(ttft[arm]) * 1e3 for arm in ARMS},
        "ttft_ratio": statistics.median(ratios),
        "ttft_mean_ratio": sum(ttft["with"]) / sum(ttft["without"]),
    }


def no_reuse(clusters: dict[str, LocalCluster], options: argparse.Namespace, vocab_size: int) -> dict[str, Any]:
    chosen = random.Random(options.seed + 1)
    rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for number in range(options.rounds + 1):
        for arm in arms_in_turn(number):
            prompts = [
                [chosen.randrange(vocab_size) for _ in range(options.fresh_tokens)]
                for _ in range(options.fresh_requests)
            ]
            started = time.perf_counter()
            ask(clusters[arm], prompts, options.output_tokens)
            if number:  # the first round warms up
                rates[arm].append(len(prompts) / (time.perf_counter() - started))
    ratios = [w / wo for w, wo in zip(rates["with"], rates["without"], strict=True)]
    return {
        "requests": options.rounds * options.fresh_requests,
        **{f"{arm}_requests_per_second": statistics.median(rates[arm]) for arm in ARMS},
        "throughput_ratio": statistics.median(ratios),
        "throughput_ratios": ratios,
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as stack:
        model = options.model
        if not model:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="splitserve-bench-"))
            model = str(write_demo_model(Path(directory) / options.shape, shape=options.shape))
        vocab_size = min(load_model_config(model).vocab_size, 2000)
        sizes = {"without": 0, "with": options.host_kv_memory_mib << 20}
        clusters = {arm: stack.enter_context(start_cluster(options, model, sizes[arm])) for arm in ARMS}
        return {
            "chats": chats(clusters, options, vocab_size),
            "no_reuse": no_reuse(clusters, options, vocab_size),
        }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="splitserve bench tiers", description=__doc__)
    parser.add_argument("--model", default="", help="a checkpoint; without it one of --shape is made")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--kv-memory-mib", type=int, default=128, help="of each worker: fewer than the chats need")
    parser.add_argument("--host-kv-memory-mib", type=int, default=2048, help="of the worker that has a host tier")
    parser.add_argument("--kv-keep", choices=KEEP_POLICIES, default="all")
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--turn-tokens", type=int, default=64, help="new ones of each turn")
    parser.add_argument("--output-tokens", type=int, default=4)
    parser.add_argument("--fresh-requests", type=int, default=8, help="at once, in each round without reuse")
    parser.add_argument("--fresh-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result-dir", type=Path, default=None, metavar="DIR", help="default: benchmarks/results")
    options = parser.parse_args(list(argv))
    results = run(options)
    chat, fresh = results["chats"], results["no_reuse"]
    rows = [
        ["TTFT of turns 2+, ms", chat["without_ttft_ms"], chat["with_ttft_ms"], chat["ttft_ratio"]],
        [
            "requests/s without reuse",
            fresh["without_requests_per_second"],
            fresh["with_requests_per_second"],
            fresh["throughput_ratio"],
        ],
    ]
    print(table(rows, ["", *(f"{arm} host tier" for arm in ARMS), "ratio"]))
    print(f"{chat['different_answers']} of {chat['requests']} answers differ")
    print(f"written to {write_result('tiers', list(argv), results, options.result_dir)}")
    return 0
