"""Accuracy of twins over many cases: errors beside the difference of repeats, intervals, rankings. Pure."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.benchmarks.twin.comparison import Compared, Prediction

THROUGHPUT = "requests/s"


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Errors of one figure over the cases with one device and load, relative to the real figure."""

    device: str
    load: float
    figure: str
    num_cases: int
    median_error: float  # without signs
    worst_error: float  # with its sign
    noise: float  # difference of the repeats, the median over the cases
    num_inside: int  # cases whose real figure is inside the interval of 90%
    num_within: int | None  # cases within their bound; None: the figure has no bound

    @property
    def cells(self) -> list[str]:
        """The accuracy as a line of a table: see :data:`ACCURACY_HEADERS`."""
        within = "no bound" if self.num_within is None else f"{self.num_within} of {self.num_cases}"
        return [
            f"{self.device}, load {self.load:g}: {self.figure}",
            str(self.num_cases),
            f"{100 * self.median_error:.1f}%",
            f"{100 * self.worst_error:+.1f}%",
            f"{100 * self.noise:.1f}%",
            f"{self.num_inside} of {self.num_cases}",
            within,
        ]


ACCURACY_HEADERS = ("", "cases", "error, median", "worst", "repeats differ", "inside the interval", "within the bound")


@dataclass(frozen=True, slots=True)
class Ranking:
    """Arrangements by their throughput when overloaded, the highest first, in the real system and in the twin."""

    device: str
    workload: str
    real: list[str]
    twin: list[str]
    num_pairs: int  # whose real difference exceeds the noise of its repeats
    wrong: list[tuple[str, str]]  # those of them that the twin has the other way round, the really higher one first

    @property
    def words(self) -> str:
        """The ranking in words."""
        wrong = "".join(f"; wrong: {higher} above {lower}" for higher, lower in self.wrong)
        return (
            f"{self.device}, {self.workload}: real {' > '.join(self.real)}; twin {' > '.join(self.twin)}; "
            f"{self.num_pairs - len(self.wrong)} of {self.num_pairs} pairs that differ by more than their noise are "
            f"right{wrong}"
        )


def accuracy_of(compared: Sequence[Compared]) -> list[Accuracy]:
    """Return the accuracy of each figure at each load, in the order of the cases."""
    groups: dict[tuple[str, float, str], list[Prediction]] = {}
    for each in compared:
        for one in each.predictions:
            groups.setdefault((each.case.device, each.case.load, one.figure), []).append(one)
    return [
        Accuracy(
            device=device,
            load=load,
            figure=figure,
            num_cases=len(found),
            median_error=statistics.median(abs(one.error) for one in found),
            worst_error=max((one.error for one in found), key=abs),
            noise=statistics.median(one.noise for one in found),
            num_inside=sum(one.is_inside for one in found),
            num_within=None if found[0].bound is None else sum(bool(one.holds) for one in found),
        )
        for (device, load, figure), found in groups.items()
    ]


def rankings_of(compared: Sequence[Compared]) -> list[Ranking]:
    """Return the ranking of the arrangements with each device and workload, if there are several."""
    groups: dict[tuple[str, str], dict[str, Prediction]] = {}
    highest = max((each.case.load for each in compared), default=0.0)
    for each in compared:
        for one in each.predictions:
            if each.case.load == highest > 1 and one.figure == THROUGHPUT:
                groups.setdefault((each.case.device, each.case.workload), {})[each.case.arm] = one
    return [_ranking(*group, arms) for group, arms in groups.items() if len(arms) > 1]


def _ranking(device: str, workload: str, arms: dict[str, Prediction]) -> Ranking:
    real = sorted(arms, key=lambda arm: -arms[arm].real)
    clear = [
        (higher, lower)
        for higher, lower in itertools.combinations(real, 2)
        if arms[higher].real - arms[lower].real
        > math.hypot(*(arms[arm].noise * arms[arm].real for arm in (higher, lower)))
    ]
    return Ranking(
        device=device,
        workload=workload,
        real=real,
        twin=sorted(arms, key=lambda arm: -arms[arm].twin),
        num_pairs=len(clear),
        wrong=[(higher, lower) for higher, lower in clear if arms[higher].twin <= arms[lower].twin],
    )
