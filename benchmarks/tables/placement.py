"""Tables of kept results of ``splitserve bench placement``: the newest of each case. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any

from splitserve.benchmarks.tables.cells import Section, commit, number, of_bench, percent, run_link
from splitserve.benchmarks.tables.runs import Run

Row = dict[str, Any]

CONDITIONS = (
    "The production policy `cost` on replayed workloads, under virtual time; TTFT and queueing in milliseconds. "
    "*Queue of a worker*: the longest mean queueing time of a prefill worker's prompts, over the mean of the workers. "
    "*Real CPU workers* (`--cases workers`): three for prefill and one for decode, a random model of 26 million "
    "parameters in float32, a thread each, greedy, no objectives; router and client share their cores. Whole "
    "conversations are drawn from the conversation trace, all lengths divided by 32. *The cluster's speed* is that at "
    "which it serves requests that share nothing. Least-loaded is the policy as it ships: prefill reads prefixes from "
    "other workers. The policies take turns, in rounds with other conversations; queueing is TTFT less the prompt's "
    "steps."
)
HITS = (
    "trace at 70% of the prefill speed", "policy", "block hits, share of the pooled oracle", "TTFT p50", "TTFT p99",
    "queueing p99", "queue of a worker", "goals",
)  # fmt: skip
LOADS = (
    "conversation trace: arriving prompt tokens over the prefill speed", "half of the workers at half speed",
    "TTFT p50", "of least-loaded", "queueing p99", "of least-loaded", "TTFT p99", "of least-loaded", "goals",
)  # fmt: skip
WORKERS = (
    "real CPU workers: arriving prompt tokens over the cluster's speed", "requests", "TTFT p50", "of least-loaded",
    "queueing p99", "of least-loaded", "TTFT p99", "of least-loaded", "ITL p99", "of least-loaded",
    "TTFT p50 by round", "of least-loaded", "goals",
)  # fmt: skip
SESSIONS = ("conversations", "block hits of the best", "most prompts of a worker over the mean", "goals")
ROUTES = (
    "workload", "always disaggregated", "never", "best threshold", "its tokens", "`cost`, no threshold",
    "of the best", "goals",
)  # fmt: skip
TAILS = ("rate of the mixed workload", "p99 of", "always disaggregated", "never", "`cost`")


def newest(runs: Sequence[Run], case: str) -> tuple[Run, list[Row]] | None:
    """Return the newest kept run with a case, and the case's rows; None without one."""
    for run in reversed(of_bench(runs, "placement")):
        if rows := run.content["cases"].get(case):
            return run, rows
    return None


def sections(runs: Sequence[Run]) -> Iterator[tuple[Run, Sequence[str], list[list[str]]]]:
    """Yield run, headers and rows of each table."""
    tables = (
        ("hits", HITS, _hits), ("load", LOADS, _loads), ("workers", WORKERS, _workers),
        ("sessions", SESSIONS, _sessions), ("routes", ROUTES, _routes),
        ("routes", TAILS, _tails),
    )  # fmt: skip
    for case, headers, make in tables:
        if (found := newest(runs, case)) is not None:
            run, rows = found
            yield run, headers, list(make(rows))


def placements(runs: Sequence[Run]) -> Section:
    """Return the section of the results' page: which goals the cases of each run reach."""
    rows = [
        [run_link(run), case, f"{sum(row['holds'] for row in judged)} of {len(judged)}", commit(run)]
        for run in of_bench(runs, "placement")
        for case, all_rows in run.content["cases"].items()
        if (judged := [row for row in all_rows if "holds" in row])
    ]
    return Section(
        "Placement on replayed workloads", CONDITIONS, ["run", "case", "rows that reach their goals", "commit"], rows
    )


def _met(row: Row) -> str:
    return "met" if row["holds"] else "**missed**"


def _hits(rows: Sequence[Row]) -> Iterator[list[str]]:
    for row in rows:
        latencies = [number(row[key]) for key in ("ttft_p50_ms", "ttft_p99_ms", "queue_p99_ms", "queue_max_over_mean")]
        goals = "-" if row["arm"] == "unweighted" else _met(row)
        yield [row["trace"], row["arm"], percent(row["hits_of_oracle"]), *latencies, goals]


def _loads(rows: Sequence[Row]) -> Iterator[list[str]]:
    pairs = zip(rows[::2], rows[1::2], strict=True)
    for base, row in pairs:
        latencies = [
            number(each[key]) for key in ("ttft_p50_ms", "queue_p99_ms", "ttft_p99_ms") for each in (row, base)
        ]
        yield [f"{row['load']:g}", "yes" if row["slow_share"] else "no", *latencies, _met(row)]


def _workers(rows: Sequence[Row]) -> Iterator[list[str]]:
    for base, row in zip(rows[::2], rows[1::2], strict=True):
        keys = ("ttft_p50_ms", "queue_p99_ms", "ttft_p99_ms", "itl_p99_ms")
        latencies = [number(each[key]) for key in keys for each in (row, base)]
        rounds = [", ".join(map(number, each["round_p50_ms"])) for each in (row, base)]
        yield [f"{row['load']:g}", str(row["requests"]), *latencies, *rounds, _met(row)]


def _sessions(rows: Sequence[Row]) -> Iterator[list[str]]:
    for row in rows:
        hits = percent(row["of_best"]) if "of_best" in row else "-"
        yield [row["arm"], hits, number(row["prompts_max_over_mean"]) if "of_best" not in row else "-", _met(row)]


def goodputs(rows: Sequence[Row], workload: str) -> dict[str, float]:
    """Return the goodput of each arm of a workload at its best rate, in requests per second."""
    found: dict[str, float] = {}
    for row in rows:
        if row["workload"] == workload and "goodput" in row:
            found[row["arm"]] = max(found.get(row["arm"], 0.0), row["goodput"])
    return found


def _routes(rows: Sequence[Row]) -> Iterator[list[str]]:
    for verdict in (row for row in rows if "goodput_ratio" in row):
        found = goodputs(rows, verdict["workload"])
        fixed = {arm: rate for arm, rate in found.items() if arm != "cost"}
        best = max(fixed, key=lambda arm: fixed[arm])
        rates = [number(found[arm]) for arm in ("always", "never", best)]
        ratio = percent(verdict["goodput_ratio"])
        yield [verdict["workload"], *rates, best, number(found["cost"]), ratio, _met(verdict)]


def _tails(rows: Sequence[Row]) -> Iterator[list[str]]:
    mixed = {(row["scale"], row["arm"]): row for row in rows if row["workload"] == "mixed" and "scale" in row}
    for scale in dict.fromkeys(scale for scale, _ in mixed):
        for key, words in (("ttft_p99_ms", "TTFT"), ("itl_p99_ms", "ITL")):
            yield [f"{scale:g}", words, *(number(mixed[scale, arm][key]) for arm in ("always", "never", "cost"))]
