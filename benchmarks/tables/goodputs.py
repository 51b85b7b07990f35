"""Tables of kept results of ``splitserve bench goodput``. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from splitserve.benchmarks.goodput.estimate import QUALIFIERS
from splitserve.benchmarks.tables.cells import Section, commit, number, of_bench, percent, run_link
from splitserve.benchmarks.tables.runs import Run

CONDITIONS = (
    "`bench goodput`: the highest rate at which both objectives hold, failed requests counted as misses; random "
    "weights; arms take turns. In brackets: 90% intervals by block bootstrap. Simulated: the goodput of the "
    "arrangement's twin, from a short load before the first probe. A report has the plots and every probe."
)

HEADERS = ("run", "load and objectives", "arrangement", "goodput, requests/s", "simulated", "of the best", "commit")


def goodputs(runs: Sequence[Run]) -> Section:
    """Return the section of the results' page: a row for each arrangement of each run."""
    return Section("Goodput of arrangements on equal devices", CONDITIONS, HEADERS, _rows(runs, _run))


def user_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return the rows of the users' page."""
    return _rows(runs, lambda run: run.label)


def _rows(runs: Sequence[Run], name: Callable[[Run], str]) -> list[list[str]]:
    rows = []
    for run in of_bench(runs, "goodput"):
        verdict, conditions = run.content["verdict"], run.content["conditions"]
        twins = {row["arm"]: row.get("simulated_goodput") for row in run.content["probes"]}
        simulated = {name: number(rate) for name, rate in twins.items() if rate is not None}
        held = [arm["goodput"]["rate"] for arm in verdict["arms"] if arm["goodput"]["kind"] != "below"]
        for arm in verdict["arms"]:
            rate, kind = arm["goodput"]["rate"], arm["goodput"]["kind"]
            found = f"{QUALIFIERS[kind]}{number(rate)} {_interval(arm['interval'])}"
            of_best = percent(rate / max(held)) if held and kind != "below" else "not known"
            cells = [arm["name"], found, simulated.get(arm["name"], "not simulated"), of_best]
            rows.append([name(run), _load(run, conditions), *cells, commit(run)])
    return rows


def effects(runs: Sequence[Run]) -> Section:
    """Return the section of pairs: disaggregation against none, and one routing policy against another."""
    rows = []
    for run in of_bench(runs, "goodput"):
        verdict = run.content["verdict"]
        for pair in filter(None, (verdict["split_against_mixed"], *verdict["effects"])):
            if not pair["is_known"]:
                continue
            ratio = f"{pair['ratio']:.2f} {_interval(pair['ratio_interval'], '.2f')}"
            difference = f"{pair['difference']:+.1f} {_interval(pair['difference_interval'], '+.1f')}"
            rows.append([_run(run), pair["first"], pair["second"], ratio, difference])
    headers = ["run", "arrangement", "against", "ratio of goodputs", "difference, requests/s"]
    text = (
        "The first row of a run is its best disaggregated arrangement against its best mixed one, if it has both. "
        "Pairs of which the probes don't tell which is better are left out."
    )
    return Section("Effects of disaggregation and of routing", text, headers, rows)


def _run(run: Run) -> str:
    return f"{run_link(run)}, [report]({run.path.stem}/report.html)"


def _load(run: Run, conditions: Mapping[str, Any]) -> str:
    temperature = conditions["temperature"]
    drawn = f"temperature {temperature}, top-p {conditions['top_p']}" if temperature else "greedy"
    objectives = f"p{conditions['percentile']:.0f} of TTFT {conditions['ttft_ms']:g} ms and of ITL "
    num_devices = run.content["verdict"]["num_devices"]
    devices = f"{num_devices} x {run.gpu}" if run.gpus != "none" else f"{num_devices} workers on CPU"
    if memory := conditions["settings"].get("kv_memory"):
        devices += f" with {memory / 2**30:g} GiB of KV each"
    requests = f"{conditions['num_requests']} requests a probe"
    objectives += f"{conditions['itl_ms']:g} ms"
    return f"{conditions['workload']}, {conditions['model']}, {devices}, {drawn}, {requests}; {objectives}"


def _interval(found: Mapping[str, float], form: str = "") -> str:
    low, high = (format(found[end], form) if form else number(found[end]) for end in ("low", "high"))
    return f"({low} to {high})"
