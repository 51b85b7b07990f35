"""Tables of kept results of ``splitserve bench twin``. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any

from splitserve.benchmarks.tables.cells import Section, commit, number, of_bench, percent, run_link
from splitserve.benchmarks.tables.runs import Run

CONDITIONS = (
    "`splitserve bench twin`: real processes, and twins that replay the same requests with step times, link and hosts "
    "fitted on runs of other cases. Each case ran twice; errors and the difference of the two are relative to the real "
    "figure. Loads are shares of the arrangement's capacity. Devices `cpu` compute; steps of `paced` ones sleep."
)
ACCURACY_HEADERS = (
    "device", "load", "figure", "cases", "error, median", "worst", "repeats differ by, median",
    "inside their interval of 90%", "within the bound",
)  # fmt: skip
RANKING_HEADERS = (
    "device", "workload", "real throughput when overloaded", "the twin's", "pairs that differ by more than their noise",
    "of them right in the twin",
)  # fmt: skip
FIGURES = ("TTFT mean", "TTFT p99", "TPOT mean", "TPOT p99", "requests/s")


def accuracy(runs: Sequence[Run]) -> Section:
    """Return the section on errors by figure and load."""
    rows = [[run_link(run), *cells, commit(run)] for run, cells in _accuracy(runs)]
    return Section("Twins beside real runs", CONDITIONS, ["run", *ACCURACY_HEADERS, "commit"], rows)


def rankings(runs: Sequence[Run]) -> Section:
    """Return the section on the order of arrangements."""
    rows = [[run_link(run), *cells] for run, cells in _rankings(runs)]
    return Section("Twins' rankings of arrangements", "The same runs.", ["run", *RANKING_HEADERS], rows)


def cases(runs: Sequence[Run]) -> Section:
    """Return the section with all cases: the real figure, the twin's error, and what the repeats differ by."""
    rows = []
    for run in of_bench(runs, "twin"):
        for case in run.content["cases"]:
            found = {each["figure"]: each for each in case["predictions"]}
            cells = [_words(found[name]) if name in found else "-" for name in FIGURES]
            rows.append([run_link(run), case["case"], number(case["rate"]), *cells, case["verdict"]])
    text = "Real figure (milliseconds, or requests/s), the twin's error, and in brackets what the repeats differ by."
    headers = ["run", "case", "requests/s asked for", *FIGURES, "components"]
    return Section("Cases of the twin", text, headers, rows)


def user_parts(runs: Sequence[Run]) -> Iterator[tuple[Sequence[str], list[list[str]]]]:
    """Yield headers and rows of the users' tables."""
    yield [*ACCURACY_HEADERS, "run"], [[*cells, run.label] for run, cells in _accuracy(runs)]
    yield [*RANKING_HEADERS, "run"], [[*cells, run.label] for run, cells in _rankings(runs)]


def _accuracy(runs: Sequence[Run]) -> Iterator[tuple[Run, list[str]]]:
    for run in of_bench(runs, "twin"):
        for each in run.content["accuracy"]:
            count = each["num_cases"]
            within = "no bound" if each["num_within"] is None else f"{each['num_within']} of {count}"
            yield (
                run,
                [
                    each["device"], f"{each['load']:g}", each["figure"], str(count), percent(each["median_error"]),
                    f"{100 * each['worst_error']:+.1f}%", percent(each["noise"]), f"{each['num_inside']} of {count}",
                    within,
                ],
            )  # fmt: skip


def _rankings(runs: Sequence[Run]) -> Iterator[tuple[Run, list[str]]]:
    for run in of_bench(runs, "twin"):
        for each in run.content["rankings"]:
            num_right = each["num_pairs"] - len(each["wrong"])
            orders = [", ".join(each[name]) for name in ("real", "twin")]
            yield run, [each["device"], each["workload"], *orders, str(each["num_pairs"]), str(num_right)]


def _words(prediction: dict[str, Any]) -> str:
    error, noise = 100 * prediction["error"], percent(prediction["repeats_differ_by"])
    return f"{number(prediction['real'])}, {error:+.1f}% ({noise})"
