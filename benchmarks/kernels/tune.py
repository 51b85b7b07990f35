"""``splitserve tune``: finds the fastest launch parameters of each operation for the shapes of a model on this GPU.

Candidates are checked against the reference, then timed in a CUDA graph on cold weights and KV; the fastest few are
timed again, longer, beside the default. Results are written after each shape, so nothing is lost when the command is
interrupted. By default they go to the user's own directory, where every worker finds them at its next start.

With ``--in-steps`` whole steps are timed, and results are written after each number of rows: see :mod:`.tune_steps`.
"""

import argparse
import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from splitserve.benchmarks.common.arguments import not_negative, positive
from splitserve.benchmarks.common.report import table
from splitserve.benchmarks.common.shapes import SHAPE_HELP, model_shape
from splitserve.benchmarks.kernels.device_timing import copy_bandwidth
from splitserve.benchmarks.kernels.tune_compile import CompilePool
from splitserve.benchmarks.kernels.tune_search import Search, TunedRow, record_found
from splitserve.benchmarks.kernels.tune_steps import tune_in_steps
from splitserve.common.errors import ConfigError
from splitserve.kernels.tuning import parameters as tuning
from splitserve.kernels.tuning.parameters import TuningError
from splitserve.kernels.tuning.tunables import OPERATIONS, Tunable, TuneTarget, load_tunable
from splitserve.models.config import ModelConfig
from splitserve.models.declared import check_tensor_parallel_size
from splitserve.models.demo.published import named_config
from splitserve.models.weights.shard import head_rows, local_config
from splitserve.orchestration.cli.command_parser import CommandParser

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_HEADERS = ["rows", "us", "default us", "share of default", "share of copy", "candidates", "winner"]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    device_name = tuning.current_device_name()
    if device_name is None:
        raise ConfigError("tune times kernels on a CUDA device, and there is none; run it on the GPU that will serve")
    directory = Path(arguments.output) if arguments.output else tuning.user_directory()
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        with tuning.tuner_lock(), CompilePool(arguments.jobs) as pool:
            if arguments.in_steps is not None:
                for shape in arguments.shape:
                    target = TuneTarget(named_config(shape), DTYPES[arguments.dtype], device, arguments.block_size)
                    tune_in_steps(
                        shape, target, arguments.operation, arguments.rows, directory,
                        num_searched=arguments.in_steps, pool=pool,
                    )  # fmt: skip
                return 0
            bandwidth = copy_bandwidth(device)
            print(f"{device_name}, copy {bandwidth / 1e12:.3f} TB/s", flush=True)
            tuner = Tuner(device_name, directory, bandwidth, pool)
            for operation in arguments.operation:
                done: set[str] = set()
                for shape, size in itertools.product(arguments.shape, arguments.tensor_parallel_size):
                    model = rank_config(named_config(shape), size)
                    target = TuneTarget(model, DTYPES[arguments.dtype], device, arguments.block_size, is_shard=size > 1)
                    done |= tuner.tune(operation, load_tunable(operation), target, arguments.rows, done)
    except TuningError as error:
        raise ConfigError(str(error)) from error
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(prog="splitserve tune", description=__doc__)
    parser.add_argument("--shape", nargs="+", default=["llama-3.1-8b", "qwen3-8b"], type=model_shape, help=SHAPE_HELP)
    parser.add_argument("--operation", nargs="+", default=list(OPERATIONS), choices=OPERATIONS)
    parser.add_argument("--rows", type=positive, nargs="+", default=list(ROWS), help="tokens or sequences of a step")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--block-size", type=positive, default=64, metavar="TOKENS")
    parser.add_argument(
        "--tensor-parallel-size", type=positive, nargs="+", default=[1], metavar="N", help="ranks that share a model"
    )
    parser.add_argument("--jobs", type=not_negative, default=0, help="processes that compile; 0: one for each core")
    parser.add_argument(
        "--output",
        default="",
        metavar="DIR",
        help=f"directory of the results; empty: ${tuning.DIRECTORY_VARIABLE}, else the user's cache",
    )
    parser.add_argument(
        "--in-steps",
        type=not_negative,
        nargs="?",
        const=0,
        metavar="N",
        help="choose by the time of decode steps, among the parameters in the files and the N that are fastest alone",
    )
    arguments = parser.parse_args(argv)
    if arguments.in_steps is not None and arguments.tensor_parallel_size != [1]:
        parser.error(
            f"--in-steps times the steps of one rank, but --tensor-parallel-size is {arguments.tensor_parallel_size}; "
            "leave one of them out"
        )
    return arguments


def rank_config(config: ModelConfig, size: int) -> ModelConfig:
    """Return the sizes of one of ``size`` ranks, its part of the head included. Raises :class:`ConfigError`."""
    check_tensor_parallel_size(config, size)
    return replace(local_config(config, size), vocab_size=head_rows(config.vocab_size, size))


class Tuner:
    """Tuner of shapes one after another, which writes its results to the device's file in ``directory``."""

    def __init__(self, device_name: str, directory: Path, copy_bytes_per_second: float, pool: CompilePool) -> None:
        self._pool = pool
        self._device_name = device_name
        self._directory = directory
        self._copy_bytes_per_second = copy_bytes_per_second

    def tune(
        self, operation: str, tunable: Tunable, target: TuneTarget, rows: Sequence[int], done: set[str]
    ) -> set[str]:
        """Tune all shapes of ``target`` except those in ``done``; returns their keys."""
        keys = [key for key in tunable.shape_keys(target) if key not in done]
        for key in keys:
            print(f"\n{operation}, {key}", flush=True)
            found = [row for count in sorted(set(rows)) if (row := self._row(operation, tunable, target, key, count))]
            if not found:
                continue
            winners = {row.rows: row.params for row in found}
            path = record_found(self._directory, self._device_name, operation, key, winners)
            print(table([row.cells(self._copy_bytes_per_second) for row in found], _HEADERS))
            for row in found:
                for failure in row.failures:
                    print(f"  {row.rows} rows, {failure}")
            print(f"written to {path}", flush=True)
        return set(keys)

    def _row(self, operation: str, tunable: Tunable, target: TuneTarget, key: str, rows: int) -> TunedRow | None:
        case = tunable.case(target, key, rows)
        if case is None:
            print(f"  {rows} rows don't fit this device's memory", flush=True)
            return None
        compile_all = functools.partial(self._pool.compile, operation, target, key, rows)
        found = Search(operation, case, target.device, compile_all).run(rows)
        print(f"  {rows} rows: {1e6 * found.seconds:.1f} us, default {1e6 * found.default_seconds:.1f}", flush=True)
        del case
        if target.device.type == "cuda":
            torch.cuda.empty_cache()
        return found


if __name__ == "__main__":
    raise SystemExit(main())
