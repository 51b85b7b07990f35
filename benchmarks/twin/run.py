"""A run of ``splitserve bench twin``: a folder with loads and comparisons, filled by processes side by side."""

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path

import msgspec

from splitserve.benchmarks.common.children import start_child
from splitserve.benchmarks.common.report import results_directory
from splitserve.benchmarks.goodput.arms import parse_arm
from splitserve.benchmarks.twin.calibration import CPU as CPU_RATES
from splitserve.benchmarks.twin.calibration import of_roofline
from splitserve.benchmarks.twin.cases import PACED, Case, Conditions, Measured, cases_of
from splitserve.benchmarks.twin.comparison import Compared, compare
from splitserve.benchmarks.twin.fit.fits import summary_of
from splitserve.benchmarks.twin.measure import Order
from splitserve.benchmarks.twin.setups import setups_of_arm
from splitserve.common.cores import by_core, usable_cpus
from splitserve.common.errors import ConfigError
from splitserve.models.config import load_model_config
from splitserve.models.demo.checkpoint import write_demo_model
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Role
from splitserve.simulation.twin.cluster import TwinCluster, TwinSpec
from splitserve.simulation.twin.models import Calibration
from splitserve.workloads.named import parse_workload

START_SECONDS = 25.0
"""Time of a cluster's start and end, for --max-seconds."""
QUEUE_FACTOR = 1.4
"""Factor for the time that an overloaded cluster needs for its queue: the capacity is estimated."""
POLL_SECONDS = 0.2
NUM_CAPACITY_REQUESTS = 300
PACED_STEPS = StepModel(8e-3, 3e-4, 5e-7, 1.2e-4, 2e-8, 1000)

Running = dict[int, tuple["subprocess.Popen[str]", str]]
"""Processes of loads and the loads' names, by the number of their share of the cores."""


@dataclass(slots=True)
class Run:
    """A run's folder, cases and conditions."""

    folder: Path
    cases: list[Case]
    conditions: Conditions
    model: str
    _kept: dict[str, Measured] = field(default_factory=dict)  # loads of these cases, by name
    _capacities: dict[Case, float] = field(default_factory=dict)  # estimated ones, by the case with the highest load

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
        run = cls(folder, cases, conditions, str(model))
        for case in cases:
            for repeat in range(options.repeats):
                run._read(f"{case.name}_{repeat}")
        return run

    def measured(self) -> list[Measured]:
        """Return the loads that are kept, of these cases, in the order of their names."""
        return [self._kept[name] for name in sorted(self._kept)]

    def compared(self) -> list[Compared]:
        """Return the comparisons that are kept, of these cases, and know all loads that are."""
        files = [file for case in self.cases if (file := self._comparison(case)).is_file()]
        found = [msgspec.json.decode(file.read_bytes(), type=Compared) for file in files]
        return [each for each in found if each.num_runs == len(self._kept)]

    def compare(self, ends_at: float, num_jobs: int) -> bool:
        """Compare the cases whose comparison is missing, ``num_jobs`` at once; returns whether all are there. Those of
        which no step times were fitted are left out."""
        runs = self.measured()
        known = {each.case for each in self.compared()}
        waiting = [case for case in self.cases if case not in known]
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
        if not any(True for _ in self._missing()):
            return True
        shares = shared_cpus(num_jobs)
        running: Running = {}
        begun: set[str] = set()
        try:
            while True:
                self._collect(running)
                self._begin(running, begun, shares, ends_at)
                if not running:
                    break
                time.sleep(POLL_SECONDS)
        finally:
            for process, _ in running.values():
                process.terminate()
            for process, _ in running.values():
                process.communicate()  # closes its standard input, and waits for its end
        left = sum(1 for _ in self._missing())
        if left:
            print(f"{left} loads are left")
        return not left

    def _begin(self, running: Running, begun: set[str], shares: list[list[int]], ends_at: float) -> None:
        """Begin loads on shares of the cores that are free, as far as they end in time. A load is begun once: one that
        fails is left to the next call."""
        for number, cpus in enumerate(shares):
            if number in running:
                continue
            order = next(self.orders(begun, ends_at), None)
            if order is None:
                return
            order.cpus = cpus
            name = f"{order.case.name}_{order.repeat}"
            text = msgspec.json.encode(order).decode()
            running[number] = start_child("splitserve.benchmarks.twin.measure", text), name
            begun.add(name)
            print(f"{name}: {order.rate:.3g} requests/s", flush=True)

    def _collect(self, running: Running) -> None:
        for number, (process, name) in list(running.items()):
            if process.poll() is not None:
                process.communicate()  # closes its standard input
                del running[number]
                self._read(name)
                if process.returncode:
                    print(f"{name}: failed", file=sys.stderr)

    def _read(self, name: str) -> None:
        file = self._file(name)
        if file.is_file():
            self._kept[name] = msgspec.json.decode(file.read_bytes(), type=Measured)

    def _fits(self, case: Case, ends_at: float) -> bool:
        seconds = self.conditions.seconds * max(1.0, QUEUE_FACTOR * case.load) + START_SECONDS
        return time.monotonic() + seconds <= ends_at

    def _missing(self) -> Iterator[tuple[Case, int]]:
        """Yield cases and numbers of repeats that are missing: of each repeat the highest loads, which take longest,
        first. Repeats of a case are apart in time, so that their difference shows how the machine's speed varies."""
        for repeat in range(self.conditions.num_repeats):
            for case in sorted(self.cases, key=lambda case: -case.load):
                if f"{case.name}_{repeat}" not in self._kept:
                    yield case, repeat

    def orders(self, begun: set[str], ends_at: float = math.inf) -> Iterator[Order]:
        """Yield orders of what is missing, not ``begun``, and ends by ``ends_at`` if it begins now. The other loads of
        an arrangement await the highest one: its throughput is the capacity that they are shares of."""
        for case, repeat in self._missing():
            if f"{case.name}_{repeat}" in begun or not self._fits(case, ends_at):
                continue
            if (rate := self._rate(case)) is not None:
                yield Order(
                    case=case,
                    repeat=repeat,
                    rate=float(f"{rate:.3g}"),
                    conditions=self.conditions,
                    model=self.model,
                    cpus=[],
                    result=str(self._file(f"{case.name}_{repeat}")),
                )

    def _rate(self, case: Case) -> float | None:
        """Return a case's requests per second; None until the capacity of its arrangement is known."""
        highest = msgspec.structs.replace(case, load=max(each.load for each in self.cases))
        kept = [run for run in self._kept.values() if run.case == highest]
        if case != highest:
            return case.load * kept[0].figures["requests_per_second"] if kept else None
        return kept[0].rate if kept else case.load * self._estimated_capacity(case)

    def _file(self, name: str) -> Path:
        return self.folder / "loads" / f"{name}.json"

    def _comparison(self, case: Case) -> Path:
        return self.folder / "compared" / f"{case.name}.json"

    def _estimated_capacity(self, case: Case) -> float:
        """Return the requests per second that a twin with estimated steps completes of a burst."""
        if case not in self._capacities:
            self._capacities[case] = self._burst_rate(case)
        return self._capacities[case]

    def _burst_rate(self, case: Case) -> float:
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
    """Return the hardware threads of each of ``num_jobs`` loads at once, those of one core together; a single load has
    no restriction. Raises :class:`ConfigError` if there are too few."""
    cpus = by_core(usable_cpus())
    if num_jobs == 1:
        return [[]]
    size = len(cpus) // num_jobs
    if size < 1:
        raise ConfigError(f"--jobs {num_jobs}: each load needs cores of its own, and there are {len(cpus)}")
    return [cpus[number * size : (number + 1) * size] for number in range(num_jobs)]
