"""``splitserve tune --in-steps``: chooses launch parameters by the time of whole decode steps.

In a step kernels overlap, so parameters that are fastest alone may be slower there. For each number of rows the
parameters that the files list for any number of rows, and the default, take each shape's place in turn, while
everything else stays; what makes the step faster stays, too. ``--in-steps N`` searches for new ones, too, and tries the
N that are fastest alone. Results are written after each number of rows.
"""

import functools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from splitserve.benchmarks.engine import engine
from splitserve.benchmarks.engine.ceilings import measure_ceilings
from splitserve.benchmarks.kernels.tune_compile import CompilePool
from splitserve.benchmarks.kernels.tune_search import Search, first_line, record_found, right_calls
from splitserve.common.errors import ConfigError
from splitserve.kernels.tuning import parameters as tuning
from splitserve.kernels.tuning.parameters import Params
from splitserve.kernels.tuning.tunables import Tunable, TunableCase, TuneTarget, load_tunable
from splitserve.models.demo.published import named_config

MIN_GAIN = 0.003  # share of a step's time: a smaller gain is noise
_CONTEXT = 1024  # tokens of each sequence
_STEPS, _ROUNDS = 20, 3
_CONFIRMATIONS = 2  # times that a candidate and what it replaces are timed again, by turns

Place = tuple[str, str]  # operation, and key of a shape
StepSeconds = Callable[[int], float]  # of a decode step of so many sequences, with the parameters that apply now
FastestAlone = Callable[
    [str, str, int, TunableCase], Sequence[Params]
]  # of an operation, a shape, rows, and their case


def no_others(_operation: str, _key: str, _rows: int, _case: TunableCase) -> Sequence[Params]:
    """Search for nothing."""
    return ()


@dataclass(frozen=True, slots=True)
class Chosen:
    """Outcome for one number of rows: seconds of a step before and after, the parameters of all shapes, and the shapes
    that changed."""

    rows: int
    seconds_before: float
    seconds: float
    params: Mapping[Place, Params]
    changed: frozenset[Place]


class StepTuner:
    """Choice of the parameters of all ``tunables``, by operation, for one model."""

    def __init__(
        self,
        known: tuning.TunedConfigs,
        tunables: Mapping[str, Tunable],
        target: TuneTarget,
        seconds: StepSeconds,
        fastest_alone: FastestAlone = no_others,
    ) -> None:
        self._fastest_alone = fastest_alone
        self._known = known
        self._tunables = tunables
        self._target = target
        self._seconds = seconds

    def choose(self, rows: int) -> Chosen:
        """Choose for steps of ``rows`` sequences; prints each change."""
        places = [(name, key) for name, tunable in self._tunables.items() for key in tunable.shape_keys(self._target)]
        params = {place: self._known.find(*place, rows) or {} for place in places}
        before = best = self._timed(rows, params)
        changed: set[Place] = set()
        for place in places:
            for candidate in self._candidates(place, rows, params[place]):
                tried = {**params, place: candidate}
                if self._timed(rows, tried) > (1 - MIN_GAIN) * best:
                    continue
                seconds, now = self._confirmed(rows, tried, params)
                if seconds < (1 - MIN_GAIN) * now:
                    print(
                        f"  {rows} rows, {' '.join(place)}: {1e3 * now:.3f} -> {1e3 * seconds:.3f} ms a step",
                        flush=True,
                    )
                    params, best = tried, seconds
                    changed.add(place)
        after = self._timed(rows, params) if changed else before
        print(f"  {rows} rows: {1e3 * before:.3f} ms a step, now {1e3 * after:.3f}", flush=True)
        return Chosen(rows, before, after, params, frozenset(changed))

    def _candidates(self, place: Place, rows: int, current: Params) -> Iterable[Params]:
        """Return the parameters to try: those with right answers for ``rows``."""
        operation, key = place
        case = self._tunables[operation].case(self._target, key, rows)
        if case is None:
            return []
        found = [{}, *self._known.known(*place), *self._fastest_alone(operation, key, rows, case)]
        others = [each for index, each in enumerate(found) if each != current and each not in found[:index]]
        right, expected = [], case.expected()
        for candidate in others:
            try:
                with tuning.forced(operation, candidate, key):
                    right_calls(case, expected)
                right.append(candidate)
            except Exception as error:  # not every parameter suits every number of rows
                print(f"  {rows} rows, {operation} {key}, {dict(candidate)}: {first_line(error)}", flush=True)
        return right

    def _confirmed(self, rows: int, tried: Mapping[Place, Params], now: Mapping[Place, Params]) -> tuple[float, float]:
        """Return the medians of both, timed by turns."""
        times = [(self._timed(rows, tried), self._timed(rows, now)) for _ in range(_CONFIRMATIONS)]
        seconds, now_seconds = map(statistics.median, zip(*times, strict=True))
        return seconds, now_seconds

    def _timed(self, rows: int, params: Mapping[Place, Params]) -> float:
        with ExitStack() as stack:
            for (operation, key), each in params.items():
                stack.enter_context(tuning.forced(operation, each, key))
            return self._seconds(rows)


def tune_in_steps(
    name: str,
    target: TuneTarget,
    operations: Sequence[str],
    rows: Sequence[int],
    directory: Path,
    *,
    num_searched: int,
    pool: CompilePool,
) -> None:
    """Choose for ``rows`` of the model called ``name``, and write what changed into the device's file in ``directory``.
    ``num_searched``: of each shape, that many of a search's fastest take part; 0: there is none.

    Raises :class:`splitserve.kernels.tuning.parameters.TuningError` if the file can't be written.
    """

    def fastest_alone(operation: str, key: str, count: int, case: TunableCase) -> Sequence[Params]:
        if not num_searched:
            return ()
        search = Search(operation, case, target.device, functools.partial(pool.compile, operation, target, key, count))
        try:
            search.run(count)
        except ConfigError as error:  # its default fails; what is known may do
            print(f"  {count} rows, {operation} {key}: {error}", flush=True)
        return search.fastest(num_searched)

    options = ["--shape", name, "--batch", *map(str, rows), "--context", str(_CONTEXT), "--prefill", "--no-busy"]
    options += ["--steps", str(_STEPS), "--repeat", str(_ROUNDS), "--block-size", str(target.block_size)]
    options += ["--dtype", str(target.dtype).removeprefix("torch."), "--attention-backend", "triton"]
    bench = engine.EngineBench(named_config(name), measure_ceilings(), engine.parse(options))

    def seconds(count: int) -> float:
        bench.capture([count])
        (figure,) = bench.decode(count, _CONTEXT)
        return figure.step_ms / 1e3

    device_name = tuning.current_device_name()
    assert device_name is not None
    known = tuning.TunedConfigs(device_name, [directory, tuning.SHIPPED_DIRECTORY], tuning.current_chip())
    tuner = StepTuner(known, {each: load_tunable(each) for each in operations}, target, seconds, fastest_alone)
    print(f"\n{name}, steps of {_CONTEXT} tokens of context", flush=True)
    results = StepResults(directory, device_name)
    try:
        for count in sorted(set(rows)):
            if bench.has_room(count, _CONTEXT):
                results.add(tuner.choose(count))
            else:
                print(f"  {count} rows don't fit this device's memory", flush=True)
    finally:
        bench.close()


class StepResults:
    """Writer of what was chosen into the device's file in ``directory``: of a shape that has changed for one number of
    rows, the parameters of all numbers so far, since an entry applies to fewer rows as well."""

    def __init__(self, directory: Path, device_name: str) -> None:
        self._directory = directory
        self._device_name = device_name
        self._chosen: list[Chosen] = []

    def add(self, chosen: Chosen) -> None:
        """Write what is new."""
        self._chosen.append(chosen)
        for place in sorted(frozenset().union(*(each.changed for each in self._chosen))):
            found = {each.rows: each.params[place] for each in self._chosen}
            print(f"written to {record_found(self._directory, self._device_name, *place, found)}", flush=True)
