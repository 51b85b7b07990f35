"""Twins of arms that run here: they propose the rate of an arm's first probe, and stand beside its measured figures.

An arm's twin has the step times that the workers of its own cluster fitted under a short load, and their limits.
"""

from pathlib import Path

import msgspec

from splitserve.benchmarks.goodput.arms import Arm
from splitserve.benchmarks.goodput.probe import ProbeResult, Setup
from splitserve.benchmarks.goodput.search import Search
from splitserve.benchmarks.twin.calibration import of_cluster
from splitserve.benchmarks.twin.loads import TwinProber
from splitserve.benchmarks.twin.setups import setups_of_cluster
from splitserve.protocol.cluster_report import ClusterReport

PRECISION = 0.05
"""Width of the bracket at which the search on a twin ends."""
MAX_PROBES = 16
MAX_FACTOR = 32.0
"""Highest rate that is simulated, in terms of the first one: a load of few requests may hold at any rate."""


class Twins:
    """The twins by arm, in files of a comparison's folder, so that a run that goes on has those of its begin."""

    def __init__(self, folder: Path, setup: Setup) -> None:
        self._folder = folder
        self._setup = setup
        self._probers: dict[str, TwinProber] = {}

    def keep(self, name: str, report: ClusterReport) -> None:
        """Keep what the cluster of an arm reports.

        Raises :class:`ConfigError` if its workers have fitted no steps, or have caches that the report lacks sizes of.
        """
        setups_of_cluster(report, of_cluster(report, name))
        self._folder.mkdir(exist_ok=True)
        self._file(name).write_bytes(msgspec.json.encode(report))

    def has(self, name: str) -> bool:
        """Return whether the arm has a twin."""
        return self._file(name).is_file()

    def proposed_rate(self, name: str, arm: Arm, first_rate: float, seed: int) -> float:
        """Return the arm's goodput on its twin, searched from ``first_rate`` on, in requests per second."""
        search = Search(first_rate, PRECISION, 1, MAX_PROBES)
        while (rate := search.next_rate()) is not None and rate <= MAX_FACTOR * first_rate:
            outcome = self._simulated(name, arm, rate, seed).outcome
            search.note(rate, outcome.pressure(self._setup.objectives))
        low, high = search.bracket()
        return low or high or first_rate

    def figures(self, name: str, arm: Arm, rate: float, seed: int) -> dict[str, float | None]:
        """Return the twin's figures for a probe: the percentiles that the objectives bound, in milliseconds."""
        return self._simulated(name, arm, rate, seed).outcome.judged_ms(self._setup.objectives)

    def _simulated(self, name: str, arm: Arm, rate: float, seed: int) -> ProbeResult:
        if name not in self._probers:
            report = msgspec.json.decode(self._file(name).read_bytes(), type=ClusterReport)
            calibration, setup = of_cluster(report, name), self._setup
            setups = setups_of_cluster(report, calibration)
            self._probers[name] = TwinProber(
                lambda _arm: setups, calibration, setup.source, setup.objectives, setup.num_requests_at
            )
        return self._probers[name](name, arm, rate, seed)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name.replace(':', '-')}.json"
