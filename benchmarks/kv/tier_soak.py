"""``splitserve bench tier-soak``: many requests against tiers that are far too small, while files are damaged.

Two workers with a block pool, a host tier and a disk tier that hold a part of the prompts each, so blocks are evicted
all the time, and each worker reads blocks from the other. Prompts share prefixes; some clients disconnect; every half
second a file of the disk tier is truncated or damaged. Every answer must have the tokens of a worker without tiers, and
when no request is left every block must be free or cached, and none held.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp

from splitserve.benchmarks.common.arguments import positive, share
from splitserve.benchmarks.common.report import add_result_options, keep_result
from splitserve.benchmarks.kv.tier_client import ask, complete, metrics, session
from splitserve.common.errors import SplitserveError
from splitserve.kvconnector.blocks.pool import BlockState
from splitserve.models.demo.checkpoint import write_demo_model
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.orchestration.cli.option_types import positive_bytes
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig

BLOCK_SIZE = 16
NUM_PREFIXES = 40
MAX_PREFIX_BLOCKS = 12
OUTPUT_TOKENS = 4
DAMAGE_SECONDS = 0.5
QUIET_SECONDS = 60.0
MUST_BE_ZERO = ("blocks_referenced", "blocks_quarantined", "reads_in_flight", "requests_tracked")


def make_prompts(count: int, chosen: random.Random) -> list[list[int]]:
    """Make prompts of a prefix that few or many of them share, in whole blocks, and a tail of their own."""
    prefixes = [[chosen.randrange(1500) for _ in range(MAX_PREFIX_BLOCKS * BLOCK_SIZE)] for _ in range(NUM_PREFIXES)]
    prompts = []
    for _ in range(count):
        prefix = prefixes[min(int(chosen.expovariate(0.1)), NUM_PREFIXES - 1)]
        length = chosen.randint(1, MAX_PREFIX_BLOCKS) * BLOCK_SIZE
        prompts.append(prefix[:length] + [chosen.randrange(1500) for _ in range(chosen.randint(1, 2 * BLOCK_SIZE))])
    return prompts


def engine_of(options: argparse.Namespace, model: str, **tiers: Any) -> EngineConfig:
    return EngineConfig(
        model=model,
        dtype="float32",
        device=options.device,
        block_size=BLOCK_SIZE,
        threads=1,
        max_model_len=512,
        max_num_batched_tokens=256,
        max_num_seqs=16,
        **tiers,
    )


async def damage(directory: Path, chosen: random.Random, damaged: list[Path]) -> None:
    """Truncate or damage files of the disk tier until cancelled."""
    while True:
        await asyncio.sleep(DAMAGE_SECONDS)
        files = sorted(directory.glob("*/*.kv"))
        if not files:
            continue
        path = chosen.choice(files)
        with suppress(OSError), path.open("r+b") as file:  # the file may have been replaced or removed
            size = path.stat().st_size
            if chosen.random() < 0.5:
                file.truncate(chosen.randrange(size))
            else:
                file.seek(chosen.randrange(size))
                file.write(chosen.randbytes(64))
            damaged.append(path)


async def load(
    options: argparse.Namespace, cluster: LocalCluster, prompts: list[list[int]], expected: list[list[int]], disk: Path
) -> dict[str, Any]:
    chosen = random.Random(options.seed + 1)
    numbers = [chosen.randrange(len(prompts)) for _ in range(options.requests)]
    gate = asyncio.Semaphore(options.concurrency)
    wrong: list[int] = []
    num_hung_up = 0

    async def one(http: aiohttp.ClientSession, number: int, patience: float | None) -> None:
        nonlocal num_hung_up
        async with gate:
            try:
                async with asyncio.timeout(patience):
                    answer = await complete(http, cluster, prompts[number], OUTPUT_TOKENS)
            except TimeoutError:
                if patience is None:
                    raise
                num_hung_up += 1
                return
        if answer.token_ids != expected[number]:
            wrong.append(number)

    damaged: list[Path] = []
    vandal = asyncio.create_task(damage(disk, chosen, damaged))
    started = time.perf_counter()
    patiences = [chosen.uniform(0.0, 0.05) if chosen.random() < options.abort_share else None for _ in numbers]
    async with session() as http:
        await asyncio.gather(*(one(http, n, p) for n, p in zip(numbers, patiences, strict=True)))
    vandal.cancel()
    return {
        "requests": len(numbers),
        "hung_up": num_hung_up,
        "wrong": len(wrong),
        "damaged_files": len(damaged),
        "seconds": time.perf_counter() - started,
    }


def blocks_of_workers(cluster: LocalCluster) -> dict[tuple[str, ...], float]:
    """Return the number of each worker's blocks, in whatever state they are.

    A worker that is ready has not always sent a heartbeat with its counts: they are 0 until then.
    """
    deadline = time.monotonic() + QUIET_SECONDS
    while True:
        found = {
            worker: sum(values[f"blocks_{state.value}"] for state in BlockState)
            for worker, values in metrics(cluster.url, "worker").items()
        }
        if all(found.values()) or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def wait_until_quiet(cluster: LocalCluster, num_blocks: dict[tuple[str, ...], float]) -> list[str]:
    """Wait until the cluster is idle; describes the blocks that are still held or lost at the deadline."""
    time.sleep(2.0)
    deadline = time.monotonic() + QUIET_SECONDS
    while True:
        problems = []
        for worker, values in metrics(cluster.url, "worker").items():
            problems += [f"{worker[0]}: {name} is {values[name]:.0f}" for name in MUST_BE_ZERO if values[name]]
            if values["blocks_free"] + values["blocks_cached"] != num_blocks[worker]:
                problems.append(f"{worker[0]}: blocks are in no state")
        for where, values in metrics(cluster.url, "tier").items():
            if values["blocks"] > values["slots"]:
                problems.append(f"{where}: more blocks than slots")
        if not problems or time.monotonic() > deadline:
            return problems
        time.sleep(0.5)


def run(options: argparse.Namespace) -> dict[str, Any]:
    prompts = make_prompts(options.prompts, random.Random(options.seed))
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="splitserve-soak-")))
        model = str(write_demo_model(directory / "tiny", shape="tiny"))
        with LocalCluster(simple_spec(engine_of(options, model), port=0, num_mixed=1), log_level="warning") as plain:
            answers = [ask(plain, prompts[at : at + 8], OUTPUT_TOKENS) for at in range(0, len(prompts), 8)]
        expected = [answer.token_ids for part in answers for answer in part]
        engine = engine_of(
            options,
            model,
            kv_memory_bytes=options.kv_memory,
            host_kv_memory_bytes=options.host_kv_memory,
            disk_kv_dir=str(directory / "kv"),
            disk_kv_bytes=options.disk_kv_size,
            kv_events=True,
        )
        spec = simple_spec(engine, port=0, num_mixed=options.workers)
        cluster = stack.enter_context(LocalCluster(spec, log_level="error"))
        num_blocks = blocks_of_workers(cluster)
        results = asyncio.run(load(options, cluster, prompts, expected, directory / "kv"))
        results["problems"] = wait_until_quiet(cluster, num_blocks)
        results["workers"] = {w[0]: values for w, values in metrics(cluster.url, "worker").items()}
        results["tiers"] = {" ".join(where): values for where, values in metrics(cluster.url, "tier").items()}
        return results


def main(argv: Sequence[str]) -> int:
    parser = CommandParser(prog="splitserve bench tier-soak", description=__doc__)
    parser.add_argument("--requests", type=positive, default=10_000)
    parser.add_argument("--prompts", type=positive, default=600, help="different ones")
    parser.add_argument("--concurrency", type=positive, default=16)
    parser.add_argument("--abort-share", type=share, default=0.05, help="share of clients that disconnect")
    parser.add_argument("--workers", type=positive, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kv-memory", type=positive_bytes, default="4MiB", metavar="SIZE")
    parser.add_argument("--host-kv-memory", type=positive_bytes, default="6MiB", metavar="SIZE")
    parser.add_argument("--disk-kv-size", type=positive_bytes, default="12MiB", metavar="SIZE")
    parser.add_argument("--seed", type=int, default=0)
    add_result_options(parser, always=True)
    options = parser.parse_args(list(argv))
    results = run(options)
    for name, values in sorted(results["tiers"].items()):
        print(f"{name}: " + ", ".join(f"{key} {value:.0f}" for key, value in values.items() if "seconds" not in key))
    peers = sum(values["peer_prefix_blocks_total"] for values in results["workers"].values())
    print(
        f"{results['requests']} requests in {results['seconds']:.0f} s, {results['hung_up']} hung up, "
        f"{results['damaged_files']} files damaged, {peers:.0f} blocks read from the other worker"
    )
    print(f"{results['wrong']} answers were wrong; {len(results['problems'])} counts are off")
    keep_result("tier-soak", list(argv), results, options)
    if results["wrong"] or results["problems"]:
        raise SplitserveError("; ".join([f"{results['wrong']} answers were wrong", *results["problems"]]))
    return 0
