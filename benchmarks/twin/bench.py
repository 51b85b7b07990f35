"""``splitserve bench twin``: real runs against their twins.

Each case is a load on an arrangement of workers, measured on real processes --repeats times. Its twin replays the same
requests, with step times, link and hosts fitted on runs of other cases. Devices are `cpu`, with real steps, and
`paced`: everything is real, but steps sleep for as long as a given model says, so that a core can have several workers.

The bench prints for each figure the error beside the difference of the repeats, names the component that is off, and
ranks the arrangements by their throughput when overloaded. A run keeps each load in its folder, which may be copied:
--continue FOLDER goes on after Ctrl-C or --max-seconds; --jobs N measures N loads at once, each on cores of its own.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict

import msgspec

from splitserve.benchmarks.common.arguments import finite, positive, positive_seconds
from splitserve.benchmarks.common.report import table, write_result
from splitserve.benchmarks.goodput.arms import FORMS
from splitserve.benchmarks.twin.accuracy import ACCURACY_HEADERS, accuracy_of, rankings_of
from splitserve.benchmarks.twin.cases import DEVICES, PACED, Measured
from splitserve.benchmarks.twin.comparison import Compared, plain
from splitserve.benchmarks.twin.run import Run
from splitserve.models.demo.checkpoint import SHAPES
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.orchestration.cli.option_types import bytes_option
from splitserve.workloads.named import FORMS as WORKLOADS

EXIT_INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    """Measure and compare. Raises :class:`ConfigError`."""
    options = parser().parse_args(list(argv))
    ends_at = time.monotonic() + options.max_seconds if options.max_seconds else float("inf")
    run = Run.of(options)
    try:
        is_measured = options.compare_only or run.measure(ends_at, options.jobs)
        is_complete = is_measured and run.compare(ends_at, options.jobs)
    except KeyboardInterrupt:
        is_complete = False
    if not is_complete:
        print(f"not complete: go on with --continue {run.folder}")
        return EXIT_INTERRUPTED
    compared = run.compared()
    show(compared)
    for note in failure_notes(run.measured()):
        print(f"note: {note}")
    data = {
        "conditions": msgspec.to_builtins(run.conditions),
        "cases": [plain(each) for each in compared],
        "accuracy": [asdict(each) for each in accuracy_of(compared)],
        "rankings": [asdict(each) for each in rankings_of(compared)],
        "runs": [summary(each) for each in run.measured()],
    }
    print(f"written to {write_result('twin', argv, data, options.result_dir)}")
    return 0


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
    print(table([each.cells for each in accuracy_of(compared)], ACCURACY_HEADERS))
    for ranking in rankings_of(compared):
        print(ranking.words)
    predictions = [one for each in compared for one in each.predictions]
    bounded = [one for one in predictions if one.bound is not None]
    print(
        f"{sum(one.is_inside for one in predictions)} of {len(predictions)} figures are inside their interval of 90%; "
        f"{sum(bool(one.holds) for one in bounded)} of {len(bounded)} are within their bound"
    )


def failure_notes(runs: Sequence[Measured]) -> list[str]:
    """Return a note on each measured load of which requests failed: its figures are those of the others."""
    return [
        f"{run.name}: {sum(failed.values())} of {run.figures['requests']} requests failed; "
        "the load's figures are those of the others"
        for run in runs
        if (failed := run.figures.get("failed"))
    ]


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
    add("--compare-only", action="store_true", help="measure nothing: compare the loads that the folder has")
    add("--continue", dest="folder", default="", metavar="FOLDER", help="go on with this run, or begin one there")
    add("--shape", choices=sorted(SHAPES), default="tiny")
    add("--max-num-seqs", type=positive, default=32, metavar="N")
    add("--kv-memory", type=bytes_option, default="256MiB", metavar="SIZE")
    add("--seed", type=int, default=0)
    add("--result-dir", default="", metavar="DIR", help="folder of the result")
    return parser
