"""``splitserve bench tier-copies``: blocks between the device and host memory, against one plain copy of as many bytes.

Runs on a GPU (the worker's pinned memory and streams) and on a CPU (plain memory). Blocks are shuffled on both sides,
so hardly any of them merge. In each round, in turn: one contiguous copy in each direction, scattered loads
(onboarding), scattered stores (offloading), and both at once from two threads, as in a worker. Reported per block size:
GB/s, medians over the rounds; scattered against contiguous; both directions together against the better of one.
"""

import argparse
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from splitserve.benchmarks.common.arguments import positive
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.common.errors import ConfigError
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.layout.numa_memory import HostMemory, node_of_device
from splitserve.kvconnector.tiers.copies import TierStore
from splitserve.kvconnector.tiers.host import host_store
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.orchestration.cli.option_types import positive_bytes
from splitserve.protocol.memory_records import LayoutRecord

TOKENS, HEAD_DIM = 16, 64


def memory_of(block_bytes: int, num_blocks: int, device: torch.device) -> KVMemory:
    """Make blocks of that many bytes: a copy doesn't depend on their content."""
    layers = block_bytes // (2 * TOKENS * HEAD_DIM * 2)
    return KVMemory(LayoutRecord("bench", "", "bfloat16", TOKENS, layers, 1, HEAD_DIM), num_blocks, device)


def seconds_of(*works: Callable[[], None]) -> float:
    """Return the seconds until all works are done, each on a thread of its own if there are several."""
    threads = [threading.Thread(target=work) for work in works[1:]]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    works[0]()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def plain_copies(memory: KVMemory, host: HostMemory, half: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return PyTorch's contiguous copies: the first half of the blocks to the device, the second half to the host, each
    in one copy."""
    blocks = memory.blocks.view(-1).view(torch.uint8).view(memory.num_blocks, -1)
    slots = torch.from_numpy(host.bytes).view(-1, memory.block_bytes)

    def copy(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        def run() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(memory.device)

        return run

    up, down = slice(0, half), slice(half, 2 * half)
    return copy(blocks[up], slots[up]), copy(slots[down], blocks[down])


def arms(store: TierStore, num_blocks: int, seed: int) -> dict[str, tuple[int, tuple[Callable[[], None], ...]]]:
    """Return the timed arms: number of blocks, and the work. The first half of the blocks is onboarded, the second
    offloaded."""
    half = num_blocks // 2
    chosen = random.Random(seed)
    up, down = list(range(half)), list(range(half, 2 * half))
    shuffled = {name: chosen.sample(blocks, half) for name, blocks in (("up", up), ("down", down))}
    hashes = [b""] * half

    def load(block_ids: list[int], slots: list[int]) -> Callable[[], None]:
        return lambda: store.load(block_ids, slots, hashes)

    def save(block_ids: list[int], slots: list[int]) -> Callable[[], None]:
        return lambda: store.store(block_ids, slots, hashes)

    scattered_up = load(chosen.sample(up, half), shuffled["up"])
    scattered_down = save(chosen.sample(down, half), shuffled["down"])
    return {
        "plain_up": (half, (load(up, up),)),
        "plain_down": (half, (save(down, down),)),
        "up": (half, (scattered_up,)),
        "down": (half, (scattered_down,)),
        "both": (2 * half, (scattered_up, scattered_down)),
    }


def measure(block_bytes: int, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    num_blocks = max(4, options.memory // block_bytes)
    memory = memory_of(block_bytes, num_blocks, device)
    host = HostMemory(num_blocks * memory.block_bytes, node_of_device(device))
    store = host_store(memory, host)
    timed = arms(store, num_blocks, options.seed)
    if device.type == "cuda":
        half = num_blocks // 2
        plain_up, plain_down = plain_copies(memory, host, half)
        timed |= {"plain_up": (half, (plain_up,)), "plain_down": (half, (plain_down,))}
    rates: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(options.rounds + 1):
        for name, (count, works) in timed.items():
            seconds = seconds_of(*works)
            if number:  # the first round warms up
                rates[name].append(count * memory.block_bytes / seconds / 1e9)
    store.close()
    result: dict[str, Any] = {"block_kib": memory.block_bytes / 1024, "blocks": num_blocks, "host": host.describe()}
    result |= {f"{name}_gb_per_s": statistics.median(values) for name, values in rates.items()}
    result["up_share"] = result["up_gb_per_s"] / result["plain_up_gb_per_s"]
    result["down_share"] = result["down_gb_per_s"] / result["plain_down_gb_per_s"]
    result["both_ratio"] = result["both_gb_per_s"] / max(result["up_gb_per_s"], result["down_gb_per_s"])
    return result


def main(argv: Sequence[str]) -> int:
    parser = CommandParser(prog="splitserve bench tier-copies", description=__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--block-memory",
        type=positive_bytes,
        nargs="+",
        default=[64 << 10, 512 << 10, 2 << 20, 8 << 20],
        metavar="SIZE",
        help="size of a block",
    )
    parser.add_argument(
        "--memory",
        type=positive_bytes,
        default="1GiB",
        metavar="SIZE",
        help="size of the blocks on the device, and of the host memory",
    )
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--seed", type=int, default=0)
    add_result_options(parser, always=True)
    options = parser.parse_args(list(argv))
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here; on a CPU try --device cpu")
    has_gpu = options.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    results = [measure(block_bytes, options, device) for block_bytes in options.block_memory]
    columns = ["plain_up_gb_per_s", "up_share", "plain_down_gb_per_s", "down_share", "both_gb_per_s", "both_ratio"]
    print(table([[f"{r['block_kib']:.0f} KiB", *(r[c] for c in columns)] for r in results], ["block", *columns]))
    print(f"host memory: {results[0]['host']}")
    data = {"device": str(device), "results": results}
    keep_result("tier-copies", list(argv), data, options)
    return 0
