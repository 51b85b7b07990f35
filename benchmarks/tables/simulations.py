"""Tables of kept results of ``splitserve simulate``. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any

from splitserve.benchmarks.tables.cells import Section, commit, number, of_bench, percent, run_link
from splitserve.benchmarks.tables.runs import Run

HEADERS = (
    "load", "workers", "requests", "goodput, requests/s", "within the objectives", "TTFT p50, ms", "TTFT p99, ms",
    "TPOT mean, ms", "simulated, s", "processor time, s", "peak memory, GiB",
)  # fmt: skip
CONDITIONS = (
    "`splitserve simulate`: production code of router and workers on virtual time, with step times from a roofline, "
    "uncalibrated: for comparing arrangements. Medians of the runs of a command by goodput. Processor time is that of "
    "one process, beside other work; peak memory is that of the whole command."
)


def simulations(runs: Sequence[Run]) -> Section:
    """Return the section of the results' page."""
    rows = [[run_link(run), *cells, commit(run)] for run, cells in _cells(runs)]
    return Section("Simulated clusters", CONDITIONS, ["run", *HEADERS, "commit"], rows)


def user_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return the rows of the users' page."""
    return [[*cells, run.label] for run, cells in _cells(runs)]


def _cells(runs: Sequence[Run]) -> Iterator[tuple[Run, list[str]]]:
    for run in of_bench(runs, "simulate"):
        content = run.content
        for cluster in content.get("clusters", [content]):
            yield run, _row(run, cluster, content["peak_bytes"] / 2**30)


def _row(run: Run, cluster: dict[str, Any], peak: float) -> list[str]:
    ordered = sorted(cluster["runs"], key=lambda each: float(each["figures"]["goodput_requests_per_second"]))
    chosen = ordered[len(ordered) // 2]
    figures = chosen["figures"]
    bounds = [
        f"{name} at most {run.option(option)} ms"
        for name, option in (("TTFT", "--ttft-ms"), ("mean gap", "--tpot-ms"), ("gaps", "--itl-ms"))
        if run.option(option)
    ]
    rate = f"{run.option('--rate')} requests/s on average"
    return [
        "; ".join([str(run.content.get("workload") or run.option("--workload")), rate, *bounds]),
        f"{cluster.get('cluster') or run.option('--cluster')}, {run.option('--gpu') or 'H200'}, {run.shape}",
        f"{figures['requests']:,}",
        number(figures["goodput_requests_per_second"]) if bounds else "no objective",
        percent(figures["slo_attainment"]) if bounds else "no objective",
        number(figures["ttft_ms"]["p50"]),
        number(figures["ttft_ms"]["p99"]),
        number(figures["tpot_ms"]["mean"]),
        number(figures["duration_seconds"]),
        number(chosen["cpu_seconds"]),
        number(peak),
    ]
