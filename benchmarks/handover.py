"""``splitserve bench handover``: blocks read from another process by the production connector, against a memory copy.

A child process owns the source's KV memory and serves it, as a prefill worker does; this process reads, as a
decode worker
does: data, then generations, from the read's command to its result. The baseline copies the same blocks inside this
process, from memory of its own. The two alternate; the table shows medians and their ratio.
"""

import argparse
import multiprocessing
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from splitserve.benchmarks.report import table, write_result
from splitserve.handover import ReadCommand, ReadResult
from splitserve.kvconnector.connector import PeerConnected
from splitserve.kvconnector.layout import num_blocks_for
from splitserve.kvconnector.memory import KVMemory
from splitserve.kvconnector.nixl import NixlConnector
from splitserve.messages import LayoutRecord, PeerWelcome
from splitserve.models.demo import SHAPES
from splitserve.request import Party

SOURCE = Party("source", 1)
SINK = Party("sink", 2)
EVENT_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Arm:
    """One measurement: which local and remote blocks, in which order."""

    num_tokens: int
    block_size: int
    pool: str
    local: Sequence[int]
    remote: Sequence[int]


def layout_of(shape: str, dtype: str, block_size: int) -> LayoutRecord:
    sizes = SHAPES[shape]
    return LayoutRecord(shape, "random", dtype, block_size, sizes.num_layers, sizes.num_kv_heads, sizes.head_dim)


def serve_source(layout: LayoutRecord, num_blocks: int, pipe: Connection) -> None:
    """The child's main: KV memory with known bytes, served until the parent hangs up."""
    memory = KVMemory(layout, num_blocks)
    for block_id in range(num_blocks):
        memory.blocks[block_id] = float(block_id % 251)
        memory.generations[block_id] = 1000 + block_id
    connector = NixlConnector(SOURCE, memory, lambda: None)
    connector.serve(True)
    served = connector.served()
    pipe.send(PeerWelcome(layout, served.connector, served.generations_address, list(served.ranks)))
    pipe.recv()
    connector.close()


class Reader:
    """Reads through the connector and waits for each result."""

    def __init__(self, layout: LayoutRecord, num_blocks: int, welcome: PeerWelcome) -> None:
        self._woken = threading.Event()
        self.memory = KVMemory(layout, num_blocks)
        self._connector = NixlConnector(SINK, self.memory, self._woken.set)
        self._connector.connect(SOURCE, welcome)
        connected = self._wait()
        if not isinstance(connected, PeerConnected) or connected.error:
            raise RuntimeError(f"the reader couldn't connect: {connected}")
        self._num_reads = 0

    def read(self, local: Sequence[int], remote: Sequence[int]) -> float:
        """Seconds from command to verified result."""
        self._num_reads += 1
        started = time.perf_counter()
        self._connector.read(ReadCommand(self._num_reads, SOURCE, local, remote))
        result = self._wait()
        seconds = time.perf_counter() - started
        if not isinstance(result, ReadResult) or result.error:
            raise RuntimeError(f"a read failed: {result}")
        if list(result.generations) != [1000 + block_id for block_id in remote]:
            raise RuntimeError("a read returned the wrong generations")
        return seconds

    def check_bytes(self, local: Sequence[int], remote: Sequence[int]) -> None:
        for mine, theirs in zip(local, remote, strict=True):
            if not bool((self.memory.blocks[mine] == float(theirs % 251)).all()):
                raise RuntimeError(f"block {mine} hasn't the bytes of the source's block {theirs}")

    def close(self) -> None:
        self._connector.close()

    def _wait(self) -> ReadResult | PeerConnected:
        if not self._woken.wait(EVENT_TIMEOUT_SECONDS):
            raise RuntimeError(f"no answer from the connector within {EVENT_TIMEOUT_SECONDS:.0f} s")
        self._woken.clear()
        return self._connector.events()[0]


@contextmanager
def two_processes(layout: LayoutRecord, num_blocks: int) -> Iterator[Reader]:
    """A source process and a connected reader; both are gone afterwards."""
    context = multiprocessing.get_context("spawn")
    pipe, child_pipe = context.Pipe()
    child = context.Process(target=serve_source, args=(layout, num_blocks, child_pipe), daemon=True)
    child.start()
    reader = Reader(layout, num_blocks, pipe.recv())
    try:
        yield reader
    finally:
        reader.close()
        pipe.send("done")
        child.join(10)


def copy_blocks(target: torch.Tensor, source: torch.Tensor, local: Sequence[int], remote: Sequence[int]) -> float:
    """Seconds for the same bytes by memory copies of whole blocks, in this process."""
    started = time.perf_counter()
    for mine, theirs in zip(local, remote, strict=True):
        target[mine].copy_(source[theirs])
    return time.perf_counter() - started


def arms(token_counts: Sequence[int], block_size: int, num_blocks: int, seed: int) -> list[Arm]:
    """Fresh pools (adjacent blocks on both sides) and shuffled ones (no two adjacent blocks belong together)."""
    chosen = random.Random(seed)
    made: list[Arm] = []
    for num_tokens in token_counts:
        count = num_blocks_for(num_tokens, block_size)
        made.append(Arm(num_tokens, block_size, "fresh", range(count), range(count)))
        local, remote = (chosen.sample(range(num_blocks), count) for _ in range(2))
        made.append(Arm(num_tokens, block_size, "shuffled", local, remote))
    return made


def measure(arm: Arm, reader: Reader, baseline: torch.Tensor, repeats: int) -> dict[str, Any]:
    """Alternate reads and copies; medians in seconds, and their ratio pair by pair."""
    reader.read(arm.local, arm.remote)
    reader.check_bytes(arm.local, arm.remote)
    pairs = []
    for _ in range(repeats):
        read = reader.read(arm.local, arm.remote)
        pairs.append((read, copy_blocks(reader.memory.blocks, baseline, arm.local, arm.remote)))
    num_bytes = len(arm.local) * reader.memory.block_bytes
    read_seconds, copy_seconds = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "prompt_tokens": arm.num_tokens,
        "block_size": arm.block_size,
        "pool": arm.pool,
        "bytes": num_bytes,
        "handover_ms": read_seconds * 1e3,
        "handover_gb_per_second": num_bytes / read_seconds / 1e9,
        "copy_gb_per_second": num_bytes / copy_seconds / 1e9,
        "share_of_copy": statistics.median(copy / read for read, copy in pairs),
    }


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every block size in a pair of processes of its own."""
    torch.set_num_threads(1)
    results = []
    for block_size in options.block_size:
        layout = layout_of(options.shape, options.dtype, block_size)
        num_blocks = num_blocks_for(max(options.prompt_tokens), block_size) + 2
        with two_processes(layout, num_blocks) as reader:
            baseline = KVMemory(layout, num_blocks).blocks
            for arm in arms(options.prompt_tokens, block_size, num_blocks, options.seed):
                results.append(measure(arm, reader, baseline, options.repeats))
    return results


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="splitserve bench handover", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b", help="whose KV is moved")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[128, 512, 2000])
    parser.add_argument("--block-size", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results/")
    options = parser.parse_args(list(argv))
    results = run(options)
    headers = ["prompt", "block", "pool", "MB", "hand-over ms", "GB/s", "copy GB/s", "share"]
    rows = [
        [
            result["prompt_tokens"],
            result["block_size"],
            result["pool"],
            f"{result['bytes'] / 1e6:.0f}",
            f"{result['handover_ms']:.1f}",
            f"{result['handover_gb_per_second']:.2f}",
            f"{result['copy_gb_per_second']:.2f}",
            f"{result['share_of_copy']:.0%}",
        ]
        for result in results
    ]
    print(table(rows, headers))
    if options.save:
        print(f"written to {write_result('handover', list(argv), {'results': results})}")
    return 0
