"""``splitserve bench tiers``: the gain of KV tiers beyond the device, and their cost for prompts without reuse.

Two workers side by side on the same checkpoint, one with a host tier. ``chats``: their history is larger than the block
pool; all users take turn 1, then all take turn 2, and so on, one request at a time and each on both workers in turn, so
that a noisy machine disturbs both alike. Reported: TTFT of turns 2 and later, and the median of the ratios, pair by
pair; whether both gave the same tokens. ``no_reuse``: prompts that share nothing, in rounds that alternate between the
two: requests per second, and the median of the ratios. ``fits``: the same with prompts that stay in the block pool.
``hits``: TTFT of prompts that are found in the tier, against computing them. ``pace``: effect of loads on the tokens of
other requests. ``shared``: an LMCache server for two prefill workers (:mod:`.tier_shared`).
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from splitserve.benchmarks.common.arguments import positive
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.benchmarks.engine.engine_options import add_engine_options, engine_config, model_of
from splitserve.benchmarks.kv.tier_client import ARMS, arms_in_turn, ask
from splitserve.benchmarks.kv.tier_hits import fits, hits, pace, throughput_ratios
from splitserve.benchmarks.kv.tier_shared import LEAST_SHARED_TURNS, add_shared_options, shared, shared_rows
from splitserve.common.errors import ConfigError
from splitserve.models.config import load_model_config
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.orchestration.cli.option_types import positive_bytes, whole_number
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.engine_config import KEEP_POLICIES

PARTS = ("chats", "no_reuse", "fits", "hits", "pace", "shared")


def start_cluster(options: argparse.Namespace, model: str, host_bytes: int, disk_dir: str) -> LocalCluster:
    """Start one mixed worker."""
    engine = engine_config(
        options,
        model,
        host_kv_memory_bytes=host_bytes,
        disk_kv_dir=disk_dir,
        kv_keep=options.kv_keep,
    )
    return LocalCluster(simple_spec(engine, port=0, num_mixed=1), log_level="warning")


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
            for arm in ARMS:  # the history of both arms has the answers given without a tier
                histories[arm][user] = histories[arm][user] + answers["without"]
    ratios = [w / wo for w, wo in zip(ttft["with"], ttft["without"], strict=True)]
    return {
        "requests": options.users * options.turns,
        "different_answers": num_different,
        **{f"{arm}_ttft_ms": statistics.median(ttft[arm]) * 1e3 for arm in ARMS},
        "ttft_ratio": statistics.median(ratios),
        "ttft_ratios": ratios,
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
    return {
        "requests": options.rounds * options.fresh_requests,
        **{f"{arm}_requests_per_second": statistics.median(rates[arm]) for arm in ARMS},
        **throughput_ratios(rates),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as stack:
        model = stack.enter_context(model_of(options))
        vocab_size = min(load_model_config(model).vocab_size, 2000)
        results = {}
        if "shared" in options.parts:
            results["shared"] = shared(options, model, vocab_size, no_reuse)
            if len(options.parts) == 1:
                return results
        below = {"without": (0, ""), "with": (options.host_kv_memory, options.disk_kv_dir)}
        clusters = {arm: stack.enter_context(start_cluster(options, model, *below[arm])) for arm in ARMS}
        parts = {"chats": chats, "no_reuse": no_reuse, "fits": fits, "hits": hits, "pace": pace}
        return {
            **results,
            **{name: parts[name](clusters, options, vocab_size) for name in options.parts if name in parts},
        }


def rows_of(results: dict[str, Any]) -> list[list[Any]]:
    """Return a line for each figure of the parts that compare both workers."""
    rows: list[list[Any]] = []
    if "chats" in results:
        part = results["chats"]
        times = part["without_ttft_ms"], part["with_ttft_ms"]
        rows.append(["TTFT of turns 2+, ms", *times, part["ttft_ratio"], _spread(part["ttft_ratios"])])
    for name, text in (("no_reuse", "requests/s without reuse"), ("fits", "requests/s, all fits the block pool")):
        if name in results:
            part = results[name]
            rates = (part[f"{arm}_requests_per_second"] for arm in ARMS)
            rows.append([text, *rates, part["throughput_ratio"], _spread(part["throughput_ratios"])])
    if "shared" in results:
        rows += [[*row, "-"] for row in shared_rows(results["shared"])]
    for part in results.get("hits", ()):
        text = f"TTFT of {part['tokens']} tokens, {part['with_cached_share']:.0%} found, ms"
        ratios = [1 / each for each in part["speedups"]]
        times = part["without_ttft_ms"], part["with_ttft_ms"]
        rows.append([text, *times, 1 / part["speedup"], _spread(ratios)])
    return rows


def _spread(ratios: Sequence[float]) -> str:
    """Format the least and the most of the ratios of pairs or rounds."""
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def print_results(results: dict[str, Any]) -> None:
    print(table(rows_of(results), ["", "without tiers", "with tiers", "ratio", "of single ones"]))
    for part in [results.get("chats"), results.get("shared", {}).get("chats")]:
        if part:
            print(f"{part['different_answers']} of {part['requests']} answers differ")
    for part in results.get("hits", ()):
        ways = f"copies {part['load_ms']:.1f} ms, {part['resident_ttft_ms']:.1f} ms if it's on the device"
        print(f"{part['tokens']} tokens: a hit's first token comes {part['speedup']:.1f} times as soon ({ways})")
    if "pace" in results:
        part = results["pace"]
        names = ("quiet", "resident", "loads")
        rows = [[name, part[f"{name}_itl_ms"], part[f"{name}_itl_p99_ms"]] for name in names]
        print(table(rows, [f"{part['streams']} streams beside", "mean ITL, ms", "p99, ms"]))
        ratios = (
            f"{part['loads_over_resident']:.3f} of prompts found on the device, {part['loads_over_quiet']:.3f} of quiet"
        )
        print(f"ITL beside {part['loads']} loads ({part['cached_share']:.0%} found): {ratios}")


def main(argv: Sequence[str]) -> int:
    parser = CommandParser(prog="splitserve bench tiers", description=__doc__)
    add_engine_options(parser, shape="qwen3-0.6b", dtype="float32", kv_memory="128MiB")  # less than the chats need
    parser.add_argument(
        "--host-kv-memory",
        type=positive_bytes,
        default="2GiB",
        metavar="SIZE",
        help="host tier of the worker that has one",
    )
    parser.add_argument("--disk-kv-dir", default="", metavar="DIR", help="the same worker has a disk tier there, too")
    parser.add_argument("--kv-keep", choices=KEEP_POLICIES, default="all")
    parser.add_argument("--users", type=positive, default=20)
    parser.add_argument("--turns", type=whole_number(2), default=6, help="of each user; the first isn't measured")
    parser.add_argument("--turn-tokens", type=positive, default=64, help="new tokens of each turn")
    parser.add_argument("--output-tokens", type=positive, default=4)
    parser.add_argument(
        "--fresh-requests", type=positive, default=8, help="requests at once in each round without reuse"
    )
    parser.add_argument("--fresh-tokens", type=positive, default=256)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--hit-tokens", type=positive, nargs="+", default=[4096], help="lengths of the prompts of hits")
    parser.add_argument("--hit-rounds", type=positive, default=3, help="number of times that each of them is repeated")
    parser.add_argument(
        "--pace-streams", type=positive, default=16, help="streams that decode while prompts are onboarded"
    )
    parser.add_argument("--pace-tokens", type=positive, default=4096, help="length of each of these prompts")
    parser.add_argument("--pace-rounds", type=positive, default=40, help="number of these prompts")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:2], help="what to measure")
    add_shared_options(parser)
    parser.add_argument("--seed", type=int, default=0)
    add_result_options(parser, always=True)
    options = parser.parse_args(list(argv))
    if "shared" in options.parts and options.turns < LEAST_SHARED_TURNS:
        raise ConfigError(
            f"--turns is {options.turns}, but the part shared measures turns before and after a worker is replaced: "
            f"give {LEAST_SHARED_TURNS} or more"
        )
    results = run(options)
    print_results(results)
    keep_result("tiers", list(argv), results, options)
    return 0
