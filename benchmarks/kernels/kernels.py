"""``splitserve bench kernels``: every operation on every backend that runs here, at the shapes of a model's steps.

Microseconds are the median of calls in a CUDA graph (sampling, prompts and the reference's attention, which copy from
the host, are launched one by one). The floor is the time to move a call's bytes at this device's measured copy
bandwidth, or to compute at its measured GEMM rate, whichever is longer. Errors are norms: of the difference from the
reference's answer, over that answer's own (or a tenth of the largest difference over its root mean square, if that is
more).
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from splitserve.benchmarks.common.arguments import positive
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.benchmarks.kernels.case import Case, Target
from splitserve.benchmarks.kernels.cases import cases
from splitserve.benchmarks.kernels.device_timing import (
    copy_bandwidth,
    eager_seconds,
    gemm_rate,
    relative_error,
    seconds_per_call,
)
from splitserve.common.errors import ConfigError
from splitserve.kernels.registry import OPERATIONS, backends, select_kernels
from splitserve.kernels.registry import Target as KernelTarget
from splitserve.models.demo.checkpoint import SHAPES, shape_config
from splitserve.orchestration.cli.command_parser import CommandParser

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "shape": ["llama-3.1-8b", "qwen3-8b"],
        "rows": [1, 8, 16, 64, 256, 1024, 8192],
        "context": 1024,
        "block_size": 64,
        "dtype": "bfloat16",
    },
    "cpu": {"shape": ["tiny"], "rows": [1, 16, 64], "context": 256, "block_size": 16, "dtype": "float32"},
}
_HEADERS = ["operation", "rows", "backend", "us", "floor share", "bound", "speed of reference", "error"]


@dataclass(frozen=True, slots=True)
class Figure:
    """Result of one case on one backend."""

    operation: str
    case: str
    rows: int
    backend: str
    us: float
    floor_share: float  # floor / time
    bound: str
    ratio: float  # the reference's time / this time
    error: float  # against the reference
    is_eager: bool  # launched one by one, so that a short call waits for the host

    def cells(self) -> list[object]:
        numbers = [self.us, f"{self.floor_share:.3f}", self.bound, self.ratio, f"{self.error:.2g}"]
        return [f"{self.operation} {self.case}", self.rows, self.backend, *numbers]


@dataclass(frozen=True, slots=True)
class Ceilings:
    copy_bytes_per_second: float
    gemm_flops_per_second: float

    def floor(self, case: Case) -> tuple[float, str]:
        """Return the least seconds of ``case``, and the resource that bounds them."""
        moving, computing = case.num_bytes / self.copy_bytes_per_second, case.flops / self.gemm_flops_per_second
        return max((moving, "memory"), (computing, "compute"))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    device = the_device(arguments.device)
    dtype = DTYPES[arguments.dtype]
    ceilings = Ceilings(copy_bandwidth(device), gemm_rate(device, dtype))
    print(
        f"copy {ceilings.copy_bytes_per_second / 1e9:,.0f} GB/s, {arguments.dtype} product "
        f"{ceilings.gemm_flops_per_second / 1e12:,.2f} TFLOP/s",
        flush=True,
    )
    results = {}
    for shape in arguments.shape:
        target = Target(shape_config(shape), dtype, device, arguments.block_size, arguments.context)
        print(f"\n{shape}", flush=True)
        figures = []
        for rows in arguments.rows:
            new = list(measure(target, rows, arguments.operation, ceilings))
            print(table([figure.cells() for figure in new], _HEADERS), flush=True)
            figures += new
        results[shape] = [asdict(figure) for figure in figures]
    data = {"ceilings": asdict(ceilings), "dtype": arguments.dtype, "device": device.type, "figures": results}
    keep_result("kernels", list(argv or ()), data, arguments)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(prog="splitserve bench kernels", description=__doc__)
    parser.add_argument(
        "--shape", nargs="+", choices=sorted(SHAPES), help="default: llama-3.1-8b and qwen3-8b; on a CPU tiny"
    )
    parser.add_argument(
        "--rows", type=positive, nargs="+", help="tokens of a step; default: 1 to 8192, on a CPU 1, 16 and 64"
    )
    parser.add_argument("--operation", nargs="+", default=list(OPERATIONS), choices=OPERATIONS)
    parser.add_argument(
        "--context",
        type=positive,
        metavar="TOKENS",
        help="context of sequences that decode; default: 1024, on a CPU 256",
    )
    parser.add_argument("--block-size", type=positive, metavar="TOKENS", help="default: 64, on a CPU 16")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default: bfloat16, on a CPU float32")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    add_result_options(parser, always=True)
    options = parser.parse_args(argv)
    for name, value in _DEFAULTS[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def the_device(name: str) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here; on a CPU try --device cpu")
    return torch.device("cuda", torch.cuda.current_device())


@torch.inference_mode()
def measure(target: Target, rows: int, operations: Sequence[str], ceilings: Ceilings) -> Iterator[Figure]:
    """Measure each case of ``operations`` on each backend that can run it, the reference first."""
    for case in cases(target, rows, operations):
        yield from _measure_case(case, target, ceilings)
        del case  # and its memory, before the next case allocates its own
        if target.device.type == "cuda":
            torch.cuda.empty_cache()


def _measure_case(case: Case, target: Target, ceilings: Ceilings) -> Iterator[Figure]:
    head_dim = target.config.head_dim
    reasons = backends(case.operation, KernelTarget(target.device, target.dtype, head_dim))
    usable = [name for name, reason in reversed(reasons.items()) if reason is None]
    expected, reference_seconds = None, 0.0
    for backend in usable:  # the reference is the last of the candidates
        kernels = select_kernels(target.device, target.dtype, {case.operation: backend}, head_dim)
        answer = case.make_calls(kernels)[0]().clone()
        calls = case.make_calls(kernels)
        is_attention = case.operation in ("make_attention", "make_latent_attention")
        is_eager = not case.can_be_captured or (is_attention and backend == "reference")
        is_eager = is_eager and target.device.type == "cuda"
        seconds = eager_seconds(calls) if is_eager else seconds_per_call(calls, target.device)
        if expected is None:
            expected, reference_seconds = answer, seconds
        floor, bound = ceilings.floor(case)
        error = relative_error(answer, expected)
        yield Figure(
            case.operation, case.name, case.rows, backend, 1e6 * seconds, floor / seconds, bound,
            reference_seconds / seconds, error, is_eager,
        )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
