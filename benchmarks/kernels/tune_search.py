"""The search for the fastest right launch parameters of one case, alone: for ``splitserve tune``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor

from splitserve.benchmarks.kernels.device_timing import TOLERANCE, relative_error, seconds_per_call
from splitserve.common.errors import ConfigError
from splitserve.kernels.tuning import parameters as tuning
from splitserve.kernels.tuning.parameters import Params, TunedEntry
from splitserve.kernels.tuning.tunables import TunableCase

_NUM_FINALISTS = 3
_REPEATS = 5
_FINAL_REPEATS = 21
_MIN_GAIN = 0.01  # share of the default's time: a smaller gain is noise, and the default stays


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
            best = self.fastest(1)[0] if self._seconds else {}
        default = self._default_seconds(_FINAL_REPEATS)
        final = [(self._time(candidate, _FINAL_REPEATS), candidate) for candidate in self.fastest(_NUM_FINALISTS)]
        seconds, winner = min(final, key=itemgetter(0), default=(default, {}))
        if seconds > (1 - _MIN_GAIN) * default:
            seconds, winner = default, {}
        return TunedRow(rows, winner, seconds, default, self._case.num_bytes, len(self._tried), tuple(self._failures))

    def fastest(self, count: int) -> list[Params]:
        """Return the fastest right candidates so far, each timed briefly."""
        return [candidate for _, candidate in sorted(self._seconds, key=itemgetter(0))[:count]]

    def _attempt(self, candidate: Params) -> None:
        self._tried.append(candidate)
        try:
            self._seconds.append((self._time(candidate, _REPEATS), candidate))
        except Exception as error:  # a compiler or a launch may fail in many ways: then it is no candidate
            self._failures.append(f"{dict(candidate)}: {first_line(error)}")

    def _default_seconds(self, repeats: int) -> float:
        try:
            return self._time({}, repeats)
        except Exception as error:
            failed = f"; {self._failures[-1]}" if self._failures else ""
            raise ConfigError(
                f"{self._operation} can't be tuned: its default fails: {first_line(error)}{failed}"
            ) from error

    def _time(self, candidate: Params, repeats: int) -> float:
        """Return the seconds of one call with ``candidate``. Raises ValueError if its answer isn't the reference's."""
        with tuning.forced(self._operation, candidate):
            return seconds_per_call(right_calls(self._case, self._expected), self._device, repeats)


def right_calls(case: TunableCase, expected: Tensor) -> Sequence[Callable[[], Tensor]]:
    """Return the calls of ``case`` with the parameters that apply now. Raises ValueError if the first one's result
    isn't ``expected``."""
    calls = case.calls()
    actual = calls[0]()
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        raise ValueError(f"{actual.dtype} {[*actual.shape]} instead of {expected.dtype} {[*expected.shape]}")
    tolerance = TOLERANCE[expected.dtype] if case.tolerance is None else case.tolerance
    if not (error := relative_error(actual, expected)) <= tolerance:
        raise ValueError(f"differs from the reference by {error:.3g}")
    return calls


def record_found(directory: Path, device_name: str, operation: str, key: str, found: Mapping[int, Params]) -> Path:
    """Put the parameters of a shape that were ``found``, by number of rows, into the device's file in ``directory``;
    return its path. Those known for other numbers of rows come along, since a file's list replaces all others, those of
    another device with the same chip as well."""
    chip_name = tuning.current_chip()
    known = tuning.TunedConfigs(device_name, [directory, tuning.SHIPPED_DIRECTORY], chip_name)
    entries = {entry.max_rows: entry for entry in known.entries(operation, key)}
    entries |= {rows: TunedEntry(rows, dict(params)) for rows, params in found.items()}
    return tuning.record(directory, device_name, operation, key, list(entries.values()), chip_name=chip_name)


def first_line(error: Exception) -> str:
    """Return the start of an error's text."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:160]
