"""``splitserve tune``: finds the fastest launch parameters of each operation for the shapes of a model on this GPU.

Candidates are checked against the reference, then timed in a CUDA graph on cold weights and KV; the fastest few are
timed again, longer, beside the default. Results are written after each shape, so nothing is lost when the command is
interrupted. By default they go to the user's own directory, where every worker finds them at its next start.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

import torch

from splitserve.benchmarks.common.arguments import not_negative, positive
from splitserve.benchmarks.common.report import table
from splitserve.benchmarks.kernels.device_timing import TOLERANCE, copy_bandwidth, relative_error, seconds_per_call
from splitserve.benchmarks.kernels.tune_compile import CompilePool
from splitserve.common.errors import ConfigError
from splitserve.kernels.tuning import parameters as tuning
from splitserve.kernels.tuning.parameters import Params, TunedEntry, TuningError
from splitserve.kernels.tuning.tunables import OPERATIONS, Tunable, TunableCase, TuneTarget, load_tunable
from splitserve.models.config import ModelConfig
from splitserve.models.declared import check_tensor_parallel_size
from splitserve.models.demo.published import NAMES as SHAPES
from splitserve.models.demo.published import named_config
from splitserve.models.weights.shard import head_rows, local_config
from splitserve.orchestration.cli.command_parser import CommandParser

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_NUM_FINALISTS = 3
_REPEATS = 5
_FINAL_REPEATS = 21
_MIN_GAIN = 0.01  # share of the default's time: a smaller gain is noise, and the default stays
_HEADERS = ["rows", "us", "default us", "share of default", "share of copy", "candidates", "winner"]


@dataclass(frozen=True, slots=True)
class TunedRow:
    """Outcome for one number of rows."""

    rows: int
    params: Params  # {}: the operation's default
    seconds: float
    default_seconds: float
    num_bytes: int
    num_tried: int
    failures: tuple[str, ...]

    def cells(self, copy_bytes_per_second: float) -> list[object]:
        winner = " ".join(f"{name}={value}" for name, value in self.params.items()) or "default"
        share = f"{self.seconds / self.default_seconds:.3f}"
        of_copy = f"{self.num_bytes / self.seconds / copy_bytes_per_second:.3f}"
        tried = f"{self.num_tried}" + (f" ({len(self.failures)} failed)" if self.failures else "")
        return [self.rows, 1e6 * self.seconds, 1e6 * self.default_seconds, share, of_copy, tried, winner]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    device_name = tuning.current_device_name()
    if device_name is None:
        raise ConfigError("tune times kernels on a CUDA device, and there is none; run it on the GPU that will serve")
    directory = Path(arguments.output) if arguments.output else tuning.user_directory()
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        with tuning.tuner_lock(), CompilePool(arguments.jobs) as pool:
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
    parser.add_argument("--shape", nargs="+", default=["llama-3.1-8b", "qwen3-8b"], choices=sorted(SHAPES))
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
    return parser.parse_args(argv)


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
            entries = self._merged(operation, key, found)
            path = tuning.record(
                self._directory, self._device_name, operation, key, entries, chip_name=tuning.current_chip()
            )
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

    def _merged(self, operation: str, key: str, found: Sequence[TunedRow]) -> list[TunedEntry]:
        """Merge the results with those known for other numbers of rows, since a file's list replaces all others for a
        shape."""
        known = tuning.TunedConfigs(self._device_name, [self._directory, tuning.SHIPPED_DIRECTORY])
        entries = {entry.max_rows: entry for entry in known.entries(operation, key)}
        entries |= {row.rows: TunedEntry(row.rows, dict(row.params)) for row in found}
        return [entries[rows] for rows in sorted(entries)]


class Search:
    """Search for the fastest correct parameters of one case."""

    def __init__(
        self, operation: str, case: TunableCase, device: torch.device, compile_all: Callable[[Sequence[Params]], None]
    ) -> None:
        self._compile_all = compile_all
        self._operation = operation
        self._case = case
        self._device = device
        self._expected = case.expected()
        self._tried: list[Params] = []
        self._seconds: list[tuple[float, Params]] = []  # of candidates with correct answers
        self._failures: list[str] = []

    def run(self, rows: int) -> TunedRow:
        """Find the best parameters. Raises :class:`ConfigError` if the operation's own default is wrong or fails."""
        best: Params = {}
        self._default_seconds(_REPEATS)
        self._tried.append(best)
        while new := [candidate for candidate in self._case.candidates(best) if candidate not in self._tried]:
            self._compile_all(new)
            for candidate in new:
                self._attempt(candidate)
            best = self._fastest(1)[0] if self._seconds else {}
        default = self._default_seconds(_FINAL_REPEATS)
        final = [(self._time(candidate, _FINAL_REPEATS), candidate) for candidate in self._fastest(_NUM_FINALISTS)]
        seconds, winner = min(final, key=itemgetter(0), default=(default, {}))
        if seconds > (1 - _MIN_GAIN) * default:
            seconds, winner = default, {}
        return TunedRow(rows, winner, seconds, default, self._case.num_bytes, len(self._tried), tuple(self._failures))

    def _fastest(self, count: int) -> list[Params]:
        return [candidate for _, candidate in sorted(self._seconds, key=itemgetter(0))[:count]]

    def _attempt(self, candidate: Params) -> None:
        self._tried.append(candidate)
        try:
            self._seconds.append((self._time(candidate, _REPEATS), candidate))
        except Exception as error:  # a compiler or a launch may fail in many ways: then it is no candidate
            self._failures.append(f"{dict(candidate)}: {_first_line(error)}")

    def _default_seconds(self, repeats: int) -> float:
        try:
            return self._time({}, repeats)
        except Exception as error:
            failed = f"; {self._failures[-1]}" if self._failures else ""
            raise ConfigError(
                f"{self._operation} can't be tuned: its default fails: {_first_line(error)}{failed}"
            ) from error

    def _time(self, candidate: Params, repeats: int) -> float:
        """Return the seconds of one call with ``candidate``. Raises ValueError if its answer isn't the reference's."""
        expected = self._expected
        with tuning.forced(self._operation, candidate):
            calls = self._case.calls()
            actual = calls[0]()
            if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
                raise ValueError(f"{actual.dtype} {[*actual.shape]} instead of {expected.dtype} {[*expected.shape]}")
            tolerance = TOLERANCE[expected.dtype] if self._case.tolerance is None else self._case.tolerance
            if not (error := relative_error(actual, expected)) <= tolerance:
                raise ValueError(f"differs from the reference by {error:.3g}")
            return seconds_per_call(calls, self._device, repeats)


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:160]


if __name__ == "__main__":
    raise SystemExit(main())
