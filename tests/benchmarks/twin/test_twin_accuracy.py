"""Accuracy of twins over cases: errors, intervals, rankings, and the tables of kept results."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from splitserve.benchmarks.tables import twins
from splitserve.benchmarks.tables.runs import Run
from splitserve.benchmarks.twin.accuracy import accuracy_of, rankings_of
from splitserve.benchmarks.twin.cases import Case
from splitserve.benchmarks.twin.comparison import Compared, Prediction, plain

LOADS = (0.5, 1.2)


def prediction(figure: str, real: float, twin: float, noise: float = 0.01, bound: float | None = None) -> Prediction:
    return Prediction(figure, real, noise, twin, low=0.9 * twin, high=1.1 * twin, bound=bound)


def compared(arm: str, load: float, predictions: Sequence[Prediction]) -> Compared:
    case = Case(device="paced", arm=arm, workload="512/64", load=load)
    return Compared(case, 10.0, list(predictions), [], num_runs=4)


def overloaded(**throughputs: tuple[float, float, float]) -> list[Compared]:
    """Return the cases of arrangements that reach real and simulated requests per second, with their noise."""
    return [
        compared(arm, load, [prediction("requests/s", real, twin, noise)])
        for arm, (real, twin, noise) in throughputs.items()
        for load in LOADS
    ]


def test_errors_stand_beside_what_the_repeats_differ_by() -> None:
    cases = [
        compared("2P1D", 0.5, [prediction("TTFT mean", 100.0, 104.0, 0.02, bound=0.05)]),
        compared("1P2D", 0.5, [prediction("TTFT mean", 100.0, 80.0, 0.04, bound=0.05)]),
        compared("1P2D", 1.2, [prediction("TTFT mean", 100.0, 101.0)]),
    ]
    half, full = accuracy_of(cases)
    assert (half.num_cases, half.num_inside, half.num_within) == (2, 1, 1)
    assert half.cells == ["paced, load 0.5: TTFT mean", "2", "12.0%", "-20.0%", "3.0%", "1 of 2", "1 of 2"]
    assert full.num_within is None and full.cells[-1] == "no bound"


def test_arrangements_are_ranked_where_they_differ_by_more_than_their_noise() -> None:
    """4M and 2P2D differ by less than their noise; the twin has 1P2D and 2P1D the wrong way round."""
    cases = overloaded(
        **{"2P1D": (10.0, 11.0, 0.01), "1P2D": (12.0, 10.9, 0.01), "4M": (20.0, 21.0, 0.05), "2P2D": (19.5, 22.0, 0.05)}
    )
    [ranking] = rankings_of(cases)
    assert ranking.real == ["4M", "2P2D", "1P2D", "2P1D"] and ranking.twin == ["2P2D", "4M", "2P1D", "1P2D"]
    assert ranking.num_pairs == 5 and ranking.wrong == [("1P2D", "2P1D")]
    assert "4 of 5 pairs that differ by more than their noise are right; wrong: 1P2D above 2P1D" in ranking.words


def test_one_arrangement_or_no_overload_has_no_ranking() -> None:
    assert rankings_of(overloaded(**{"4M": (20.0, 21.0, 0.05)})) == []
    assert rankings_of([each for each in overloaded(a=(1, 1, 0), b=(2, 2, 0)) if each.case.load < 1]) == []
    assert rankings_of([]) == []


def test_kept_results_have_tables() -> None:
    cases = overloaded(**{"2P1D": (10.0, 11.5, 0.01), "4M": (20.0, 21.0, 0.05)})
    content = {
        "cases": [plain(each) for each in cases],
        "accuracy": [dataclasses.asdict(each) for each in accuracy_of(cases)],
        "rankings": [dataclasses.asdict(each) for each in rankings_of(cases)],
        "versions": {"commit": "abc1234"},
    }
    kept = Run(Path("twin-20261126T010000-1.json"), "twin", "1126T010000", content)
    [accuracy, rankings] = [rows for _, rows in twins.user_parts([kept])]
    row = ["paced", "0.5", "requests/s", "2", "10.0%", "+15.0%", "3.0%", "1 of 2", "no bound", "1126T010000"]
    assert row in accuracy
    assert rankings == [["paced", "512/64", "4M, 2P1D", "4M, 2P1D", "1", "1", "1126T010000"]]
    assert len(twins.accuracy([kept]).rows) == 2 and len(twins.rankings([kept]).rows) == 1
    assert twins.cases([kept]).rows[0][1:3] == ["paced_2P1D_512-64_0.5", "10.0"]
    assert twins.cases([kept]).rows[0][-2:] == ["10.0, +15.0% (1.0%)", "no component is off"]
