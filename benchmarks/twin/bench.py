"""``splitserve bench twin``: real runs against their twins.

Each case is a load on an arrangement of workers, measured on real processes --repeats times. Its twin replays the same
requests, with step times, link and hosts fitted on runs of other cases. Devices are `cpu`, with real steps, and
`paced`: everything is real, but steps sleep for as long as a given model says, so that a core can have several workers.

The bench prints for each figure the error beside the difference of the repeats, and names the component that is off.
A run keeps each load in its folder: --continue FOLDER goes on after Ctrl-C or --max-seconds; --jobs N measures N loads
at once, each on cores of its own.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path

import msgspec

from splitserve.benchmarks.common.arguments import finite, positive, positive_seconds
from splitserve.benchmarks.common.report import results_directory, table, write_result
from splitserve.benchmarks.goodput.arms import FORMS, parse_arm
from splitserve.benchmarks.twin.calibration import CPU as CPU_RATES
from splitserve.benchmarks.twin.calibration import of_roofline
from splitserve.benchmarks.twin.cases import DEVICES, PACED, Case, Conditions, Measured, cases_of
from splitserve.benchmarks.twin.comparison import Compared, compare, plain
from splitserve.benchmarks.twin.fits import summary_of
from splitserve.benchmarks.twin.measure import Order
from splitserve.benchmarks.twin.setups import setups_of_arm
from splitserve.common.cores import usable_cpus
from splitserve.common.errors import ConfigError
from splitserve.models.config import load_model_config
from splitserve.models.demo.checkpoint import SHAPES, write_demo_model
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.orchestration.cli.option_types import bytes_option
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Role
from splitserve.simulation.twin.cluster import TwinCluster, TwinSpec
from splitserve.simulation.twin.models import Calibration
from splitserve.workloads.named import FORMS as WORKLOADS
from splitserve.workloads.named import parse_workload

EXIT_INTERRUPTED = 130
START_SECONDS = 25.0
"""Time of a cluster's start and end, for --max-seconds."""
QUEUE_FACTOR = 1.4
"""Factor for the time that an overloaded cluster needs for its queue: the capacity is estimated."""
POLL_SECONDS = 0.2
NUM_CAPACITY_REQUESTS = 300
PACED_STEPS = StepModel(8e-3, 3e-4, 5e-7, 1.2e-4, 2e-8, 1000)


def main(argv: Sequence[str]) -> int:
    """Measure and compare. Raises :class:`ConfigError`."""
    options = parser().parse_args(list(argv))
    ends_at = time.monotonic() + options.max_seconds if options.max_seconds else float("inf")
    run = Run.of(options)
    try:
        is_complete = run.measure(ends_at, options.jobs) and run.compare(ends_at, options.jobs)
    except KeyboardInterrupt:
        is_complete = False
    if not is_complete:
        print(f"not complete: go on with --continue {run.folder}")
        return EXIT_INTERRUPTED
    compared = run.compared()
    show(compared)
    data = {
        "conditions": msgspec.to_builtins(run.conditions),
        "cases": [plain(each) for each in compared],
        "runs": [summary(each) for each in run.measured()],
    }
    print(f"written to {write_result('twin', argv, data, options.result_dir)}")
    return 0


@dataclass(slots=True)
class Run:
    """A run's folder, cases and conditions."""

    folder: Path
    cases: list[Case]
    conditions: Conditions
    model: str

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Run":
        """Make the run that the options describe, or go on with one. Raises :class:`ConfigError`."""
        for arm in options.arms:
            parse_arm(arm)
        for workload in options.workloads:
            parse_workload(workload)
        conditions = Conditions(
            seconds=options.seconds,
            shape=options.shape,
            max_num_seqs=options.max_num_seqs,
            kv_memory=options.kv_memory,
            steps=PACED_STEPS,
            seed=options.seed,
            num_repeats=options.repeats,
        )
        now = datetime.now(UTC)
        folder = Path(options.folder or results_directory() / f"twin-{now:%Y%m%dT%H%M%S}")
        for part in ("loads", "compared"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        file = folder / "conditions.json"
        if file.is_file() and msgspec.json.decode(file.read_bytes(), type=Conditions) != conditions:
            raise ConfigError(f"{folder} was measured under other conditions: give the same options, or begin anew")
        file.write_bytes(msgspec.json.format(msgspec.json.encode(conditions)))
        model = folder / "model" / options.shape
        if not (model / "config.json").is_file():
            write_demo_model(model, shape=options.shape)
        cases = list(cases_of(options.devices, options.arms, options.workloads, sorted(options.loads, reverse=True)))
        return cls(folder, cases, conditions, str(model))

    def measured(self) -> list[Measured]:
        """Return the loads that are kept, of these cases."""
        files = sorted((self.folder / "loads").glob("*.json"))
        found = [msgspec.json.decode(file.read_bytes(), type=Measured) for file in files]
        return [each for each in found if each.case in self.cases]

    def compared(self) -> list[Compared]:
        """Return the comparisons that are kept, of these cases."""
        files = [self._comparison(case) for case in self.cases]
        return [msgspec.json.decode(file.read_bytes(), type=Compared) for file in files if file.is_file()]

    def compare(self, ends_at: float, num_jobs: int) -> bool:
        """Compare the cases whose comparison is missing, ``num_jobs`` at once; returns whether all are there. Those of
        which no step times were fitted are left out."""
        runs = self.measured()
        waiting = [case for case in self.cases if not self._comparison(case).is_file()]
        with ProcessPoolExecutor(min(num_jobs, max(1, len(waiting))), mp_context=get_context("spawn")) as pool:
            while waiting and time.monotonic() < ends_at:
                batch, waiting = waiting[:num_jobs], waiting[num_jobs:]
                for case, found in zip(batch, pool.map(compare, batch, [runs] * len(batch)), strict=True):
                    if found is not None:
                        self._comparison(case).write_bytes(msgspec.json.encode(found))
                        print(f"{case.name}: {found.verdict}", flush=True)
        return not waiting

    def measure(self, ends_at: float, num_jobs: int) -> bool:
        """Measure the loads that are missing, ``num_jobs`` at once; returns whether all are there."""
        shares = shared_cpus(num_jobs)
        running: dict[int, tuple[subprocess.Popen[bytes], str]] = {}  # by the number of its share of the cores
        failed: set[str] = set()
        try:
            while True:
                self._collect(running, failed)
                names = {name for _, name in running.values()} | failed
                order = next((each for each in self._orders(names) if self._fits(each, ends_at)), None)
                free = next((number for number in range(num_jobs) if number not in running), None)
                if order is None and not running:
                    break
                if order is None or free is None:
                    time.sleep(POLL_SECONDS)
                    continue
                order.cpus = shares[free]
                command = [sys.executable, "-m", "splitserve.benchmarks.twin.measure"]
                process = subprocess.Popen([*command, msgspec.json.encode(order).decode()])
                running[free] = process, _name(order.case, order.repeat)
                print(f"{_name(order.case, order.repeat)}: {order.rate:.3g} requests/s", flush=True)
        finally:
            for process, _ in running.values():
                process.terminate()
            for process, _ in running.values():
                process.wait()
        left = sum(1 for _ in self._missing())
        if left:
            print(f"{left} loads are left")
        return not left

    def _collect(self, running: dict[int, tuple["subprocess.Popen[bytes]", str]], failed: set[str]) -> None:
        for number, (process, name) in list(running.items()):
            if process.poll() is not None:
                del running[number]
                if process.returncode:
                    failed.add(name)
                    print(f"{name}: failed", file=sys.stderr)

    def _fits(self, order: Order, ends_at: float) -> bool:
        seconds = self.conditions.seconds * max(1.0, QUEUE_FACTOR * order.case.load) + START_SECONDS
        return time.monotonic() + seconds <= ends_at

    def _missing(self) -> Iterator[tuple[Case, int]]:
        for case in self.cases:
            for repeat in range(self.conditions.num_repeats):
                if not self._file(case, repeat).is_file():
                    yield case, repeat

    def _orders(self, taken: set[str]) -> Iterator[Order]:
        """Yield orders of what is missing and not ``taken``. The highest load of a group comes first: its throughput is
        the capacity that the other loads are shares of."""
        kept = {each.name: each for each in self.measured()}
        highest = max(case.load for case in self.cases)
        for case, repeat in self._missing():
            if _name(case, repeat) in taken:
                continue
            first = kept.get(_name(msgspec.structs.replace(case, load=highest), 0))
            if first is not None:
                rate = first.rate if case.load == highest else case.load * first.figures["requests_per_second"]
            elif case.load == highest and repeat == 0:
                rate = case.load * self._estimated_capacity(case)
            else:
                continue
            yield Order(
                case=case,
                repeat=repeat,
                rate=float(f"{rate:.3g}"),
                conditions=self.conditions,
                model=self.model,
                cpus=[],
                result=str(self._file(case, repeat)),
            )

    def _file(self, case: Case, repeat: int) -> Path:
        return self.folder / "loads" / f"{_name(case, repeat)}.json"

    def _comparison(self, case: Case) -> Path:
        return self.folder / "compared" / f"{case.name}.json"

    def _estimated_capacity(self, case: Case) -> float:
        """Return the requests per second that a twin with estimated steps completes of a burst."""
        config, arm = load_model_config(self.model), parse_arm(case.arm)
        calibration = (
            Calibration(steps={Role.MIXED: self.conditions.steps})
            if case.device == PACED
            else of_roofline(config, CPU_RATES)
        )
        workers = setups_of_arm(arm, self._engine(), config, calibration, CPU_RATES)
        workload = parse_workload(case.workload).at(1e3, NUM_CAPACITY_REQUESTS, self.conditions.seed)
        result = TwinCluster(TwinSpec(workers, calibration, arm.policy)).run(workload)
        return float(summary_of(result)["requests_per_second"])

    def _engine(self) -> EngineConfig:
        return EngineConfig(
            model=self.model,
            device="cpu",
            threads=1,
            max_num_seqs=self.conditions.max_num_seqs,
            kv_memory_bytes=self.conditions.kv_memory,
        )


def shared_cpus(num_jobs: int) -> list[list[int]]:
    """Return the cores of each of ``num_jobs`` loads at once; a single one has no restriction. Raises
    :class:`ConfigError` if there are too few."""
    cpus = sorted(usable_cpus())
    if num_jobs == 1:
        return [[]]
    size = len(cpus) // num_jobs
    if size < 1:
        raise ConfigError(f"--jobs {num_jobs}: each load needs cores of its own, and there are {len(cpus)}")
    return [cpus[number * size : (number + 1) * size] for number in range(num_jobs)]


def show(compared: Sequence[Compared]) -> None:
    """Print the comparisons, and a summary."""
    rows = []
    for each in compared:
        for one in each.predictions:
            holds = {None: "", True: "yes", False: "NO"}[one.holds]
            inside = "inside" if one.is_inside else "outside"
            rows.append(
                [
                    f"{each.case.name}: {one.figure}", one.real, f"{100 * one.noise:.1f}%", one.twin,
                    f"{100 * one.error:+.1f}%", inside, holds,
                ]
            )  # fmt: skip
    if not rows:
        print("nothing to compare yet: a twin is fitted on runs of other cases")
        return
    print(table(rows, ("", "real", "repeats differ", "twin", "error", "interval", "within the bound")))
    for each in compared:
        print(f"{each.case.name}: {each.verdict}")
    predictions = [one for each in compared for one in each.predictions]
    bounded = [one for one in predictions if one.bound is not None]
    print(
        f"{sum(one.is_inside for one in predictions)} of {len(predictions)} figures are inside their interval of 90%; "
        f"{sum(bool(one.holds) for one in bounded)} of {len(bounded)} are within their bound"
    )


def summary(run: Measured) -> dict[str, object]:
    """Return what the result keeps of a measured load."""
    return {
        "load": run.name,
        "rate": run.rate,
        "offered_rate": run.offered_rate,
        "seed": run.seed,
        "cpus": run.num_cpus,
        "figures": run.figures,
        "stages_ms": {name: 1e3 * seconds for name, seconds in run.stages.items()},
    }


def _name(case: Case, repeat: int) -> str:
    return f"{case.name}_{repeat}"


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = CommandParser(prog="splitserve bench twin", description=__doc__.partition("\n\n")[2])
    add = parser.add_argument
    add("--devices", nargs="+", choices=DEVICES, default=[PACED])
    add("--arms", nargs="+", default=["2P1D", "1P2D", "2P2D", "4M"], metavar="ARM", help=FORMS)
    add("--workloads", nargs="+", default=["512/64", "chats"], metavar="WORKLOAD", help=WORKLOADS)
    add("--loads", nargs="+", type=positive_seconds, default=[0.5, 0.8, 0.95, 1.2], metavar="SHARE",
        help="rates, as shares of the capacity; the highest must be above 1, and is measured first")  # fmt: skip
    add("--seconds", type=positive_seconds, default=120.0, metavar="S", help="length of each load")
    add("--repeats", type=positive, default=2, metavar="N")
    add("--jobs", type=positive, default=1, metavar="N", help="loads at once, each on cores of its own")
    add("--max-seconds", type=finite, default=0.0, metavar="S", help="begin no load that would end later; 0: none")
    add("--continue", dest="folder", default="", metavar="FOLDER", help="go on with this run, or begin one there")
    add("--shape", choices=sorted(SHAPES), default="tiny")
    add("--max-num-seqs", type=positive, default=32, metavar="N")
    add("--kv-memory", type=bytes_option, default="256MiB", metavar="SIZE")
    add("--seed", type=int, default=0)
    add("--result-dir", default="", metavar="DIR", help="folder of the result")
    return parser
