"""``splitserve bench all-reduce``: each all-reduce over the GPUs of this machine, by size.

Microseconds of one call, of the slowest rank, in a CUDA graph of consecutive calls, as in a decode step. The
implementations are those that a worker tries at start, of which it uses the fastest for each size. Without GPUs: gloo,
by wall time.
"""

import argparse
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict

import torch

from splitserve.benchmarks.common.arguments import positive
from splitserve.benchmarks.common.children import start_child
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.common.errors import ConfigError
from splitserve.models.parallel.all_reduce import Measured, sizes_to_measure
from splitserve.models.parallel.process_group import find_store, join_group, open_store
from splitserve.models.parallel.ranks import Collectives
from splitserve.models.weights.shard import Shard
from splitserve.orchestration.cli.command_parser import CommandParser

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_GLOO_CALLS = 20


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    if arguments.rank:
        _measure(arguments, arguments.rank)
        os._exit(0)  # skips the device's shutdown
    if arguments.ranks < 2:
        raise ConfigError(f"--ranks is {arguments.ranks}; an all-reduce needs 2 or more")
    if arguments.device == "cuda" and arguments.ranks > torch.cuda.device_count():
        raise ConfigError(f"--ranks is {arguments.ranks}, but PyTorch sees {torch.cuda.device_count()} CUDA devices")
    measured = _measure(arguments, 0)
    names = list(measured[0].microseconds)
    rows = [[f"{entry.num_bytes / 1024:g}", *(entry.microseconds.get(n, "") for n in names), entry.best, _rate(entry)]
            for entry in measured]  # fmt: skip
    print(table(rows, ["KiB", *(f"{name} us" for name in names), "best", "GB/s"]), flush=True)
    data = {"ranks": arguments.ranks, "dtype": arguments.dtype, "hidden_size": arguments.hidden_size,
            "results": [{**asdict(entry), "best": entry.best} for entry in measured]}  # fmt: skip
    keep_result("all-reduce", list(argv or ()), data, arguments)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(prog="splitserve bench all-reduce", description=__doc__)
    cuda = torch.cuda.is_available()
    parser.add_argument("--ranks", type=positive, default=max(2, torch.cuda.device_count()), metavar="N")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--hidden-size", type=positive, default=4096, metavar="N", help="elements of a token's row")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="bfloat16" if cuda else "float32")
    add_result_options(parser, always=True)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _rate(entry: Measured) -> float:
    """Return the bytes of the tensor over the best time."""
    return entry.num_bytes / entry.microseconds[entry.best] / 1e3


def _measure(arguments: argparse.Namespace, rank: int) -> list[Measured]:
    """Measure as one of the ranks; rank 0 starts the others."""
    device = torch.device("cuda", rank) if arguments.device == "cuda" else torch.device("cpu")
    size = arguments.ranks
    if rank:
        group = join_group(find_store(arguments.port, size), Shard(rank, size), device)
        return _times(group, arguments, device)
    store, port = open_store(size)
    others = [_start(arguments, other, port) for other in range(1, size)]
    try:
        group = join_group(store, Shard(0, size), device)
        measured = _times(group, arguments, device)
        for other in others:
            other.wait(timeout=60)
        group.close()
        return measured
    finally:
        for other in others:
            other.kill()
            with other:  # waits for its end, and closes its standard input
                pass


def _start(arguments: argparse.Namespace, rank: int, port: int) -> "subprocess.Popen[str]":
    options = {"rank": rank, "port": port, "ranks": arguments.ranks, "device": arguments.device,
               "hidden-size": arguments.hidden_size, "dtype": arguments.dtype}  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return start_child("splitserve.benchmarks.kernels.all_reduce", *words)


def _times(group: Collectives, arguments: argparse.Namespace, device: torch.device) -> list[Measured]:
    dtype = _DTYPES[arguments.dtype]
    group.prepare(arguments.hidden_size, dtype)
    if device.type == "cpu":
        return [_gloo_time(group, num_bytes, dtype) for num_bytes in sizes_to_measure(arguments.hidden_size * 4)[::3]]
    from splitserve.models.parallel.cuda_group import CudaCollectives

    assert isinstance(group, CudaCollectives) and group.all_reduce is not None
    if group.shard.rank == 0:
        print(f"{arguments.ranks} ranks: {group.all_reduce.describe()}")
    return list(group.all_reduce.measured)


def _gloo_time(group: Collectives, num_bytes: int, dtype: torch.dtype) -> Measured:
    residual, parts = (torch.zeros((1, num_bytes // dtype.itemsize), dtype=dtype) for _ in range(2))
    group.add_reduced(residual[0], parts)
    started = time.perf_counter()
    for _ in range(_GLOO_CALLS):
        group.add_reduced(residual[0], parts)
    return Measured(num_bytes, {"gloo": 1e6 * (time.perf_counter() - started) / _GLOO_CALLS})


if __name__ == "__main__":
    raise SystemExit(main())
