"""The run of a comparison: the arms take turns, probe by probe, until each search has ended."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from splitserve.benchmarks.goodput.arms import Arm
from splitserve.benchmarks.goodput.objectives import Objectives
from splitserve.benchmarks.goodput.probe import ProbeResult
from splitserve.benchmarks.goodput.search import Search, Sweep

USUAL_PROBES, USUAL_PROPOSED_PROBES = 7, 4
"""Probes of a search, and of one that begins at a proposed rate, for the time that remains."""
PROPOSED_STEP = 1.2
"""Least step from a proposed rate to the next one: three probes bracket a goodput that is within a fifth of it."""

Prober = Callable[[str, Arm | None, float, int], ProbeResult]  # arm's name, arm, rate, seed


@dataclass(slots=True)
class Comparison:
    """Searches of all arms. Those that an interrupted run kept are taken from its probes."""

    arms: Mapping[str, Arm | None]
    objectives: Objectives
    searches: Mapping[str, Search | Sweep]
    seed: int
    probes: list[ProbeResult] = field(default_factory=list)
    usual_probes: int = USUAL_PROBES

    def propose(self, name: str, rate: float) -> None:
        """Let an arm's search begin at ``rate``."""
        search = self.searches[name]
        assert isinstance(search, Search), "a sweep has its rates"
        search.first_rate, search.min_step = float(f"{rate:.3g}"), PROPOSED_STEP
        self.usual_probes = USUAL_PROPOSED_PROBES

    def resume(self, probes: Sequence[ProbeResult]) -> None:
        """Take the results of probes that ran before."""
        for probe in probes:
            self._note(probe)

    def run(self, probe: Prober) -> Iterator[ProbeResult]:
        """Run the probes that are left and yield each; every round has one probe of each arm."""
        while waiting := [name for name in self.arms if self.searches[name].next_rate() is not None]:
            fewest = min(self.searches[name].num_probes for name in waiting)
            for name in waiting:
                search = self.searches[name]
                rate = search.next_rate()
                if rate is None or search.num_probes > fewest:
                    continue
                repeat = len(search.pressures.get(rate, ()))
                result = probe(name, self.arms[name], rate, self.seed + repeat)  # all arms get the same requests
                self._note(result)
                yield result

    def seconds_left(self, seconds_per_probe: float) -> float:
        """Estimate the time that the rest takes."""
        left = sum(
            max(1, (self.usual_probes if isinstance(search, Search) else search.max_probes) - search.num_probes)
            for search in self.searches.values()
            if search.next_rate() is not None
        )
        return left * seconds_per_probe

    def _note(self, probe: ProbeResult) -> None:
        self.probes.append(probe)
        self.searches[probe.arm].note(probe.rate, probe.outcome.pressure(self.objectives))


def timed(probe: Prober) -> tuple[Prober, Callable[[], float]]:
    """Return ``probe``, and a function that returns the mean seconds of the calls so far."""
    taken: list[float] = []

    def run(name: str, arm: Arm | None, rate: float, seed: int) -> ProbeResult:
        began = time.monotonic()
        result = probe(name, arm, rate, seed)
        taken.append(time.monotonic() - began)
        return result

    return run, lambda: sum(taken) / max(1, len(taken))
