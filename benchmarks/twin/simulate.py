"""``splitserve simulate``: what a cluster would do under a workload.

The production cores of router and workers run on virtual time; steps and links are models. They come from a running
cluster (--against), from a file (--calibration), or from a roofline of a GPU (--gpu), which is uncalibrated: good for
ranking, not for numbers. The report is that of `splitserve bench serve`, over several runs with other arrivals.
"""

import argparse
import contextlib
import gc
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from splitserve.benchmarks.common.arguments import finite, not_negative, positive, positive_seconds
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.benchmarks.common.stats import Objective
from splitserve.benchmarks.engine.engine_options import add_engine_options, add_max_num_seqs, engine_config, model_of
from splitserve.benchmarks.goodput.arms import FORMS, parse_arm
from splitserve.benchmarks.twin.calibration import CPU, of_cluster, of_roofline, read_calibration, report_of
from splitserve.benchmarks.twin.export import WORKLOAD_FILE, export, spec_of
from splitserve.benchmarks.twin.loads import (
    LongestSequence,
    check_arrivals,
    check_lengths,
    figures_of,
    longest_of,
    notes_of,
)
from splitserve.benchmarks.twin.setups import described, setups_of_arm, setups_of_cluster
from splitserve.common.errors import ConfigError
from splitserve.models.config import ModelConfig, load_model_config
from splitserve.models.roofline import DEVICE_RATES
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.orchestration.cli.operate import add_operators_key_option
from splitserve.orchestration.cli.option_types import bytes_option
from splitserve.orchestration.spec.cluster_spec import ClusterSpec
from splitserve.orchestration.spec.expansion import read_operators_key
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.placement.policies import DEFAULT_POLICY, PLACEMENT_POLICIES
from splitserve.simulation.twin.cluster import TwinCluster, TwinSpec
from splitserve.simulation.twin.models import Calibration
from splitserve.simulation.twin.worker import WorkerSetup
from splitserve.workloads.named import FORMS as WORKLOADS
from splitserve.workloads.named import Source, parse_workload

MAX_NAMED_WORKERS = 12
GC_THRESHOLDS = (100_000, 100, 1_000_000)
"""Allocations until the first generation is collected, collections of it until the second is, and of that one."""
FIGURES = (
    ("TTFT mean, ms", ("ttft_ms", "mean")),
    ("TTFT p50, ms", ("ttft_ms", "p50")),
    ("TTFT p99, ms", ("ttft_ms", "p99")),
    ("second token p50, ms", ("second_token_ms", "p50")),
    ("second token p99, ms", ("second_token_ms", "p99")),
    ("third token p50, ms", ("third_token_ms", "p50")),
    ("third token p99, ms", ("third_token_ms", "p99")),
    ("TPOT mean, ms", ("tpot_ms", "mean")),
    ("TPOT p99, ms", ("tpot_ms", "p99")),
    ("ITL p50, ms", ("itl_ms", "p50")),
    ("ITL p99, ms", ("itl_ms", "p99")),
    ("longest gap, ms", ("itl_ms", "max")),
    ("requests/s", ("requests_per_second",)),
    ("output tokens/s", ("output_tokens_per_second",)),
    ("within the objectives, %", ("slo_attainment",)),
)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster to simulate, and where its models come from."""

    name: str
    workers: Sequence[WorkerSetup]
    calibration: Calibration
    policy: str
    longest: LongestSequence
    spec: ClusterSpec | None = None  # None for a running one


def main(argv: Sequence[str]) -> int:
    """Simulate what ``argv`` describes. Raises :class:`SplitserveError`."""
    options = parser().parse_args(list(argv))
    source = parse_workload(options.workload, options.max_tokens)
    clusters = clusters_of(options)
    _begin(options, source, clusters)
    simulated = [_simulate(options, source, cluster) for cluster in clusters]
    runs = [run for each in simulated for run in each]
    _print_summary(options, clusters, simulated)
    kept = [
        {"cluster": each.name, "workers": described(each.workers), "policy": each.policy, "runs": found}
        for each, found in zip(clusters, simulated, strict=True)
    ]
    data = {"calibration": clusters[0].calibration.source, "workload": source.name, "peak_bytes": peak_bytes()}
    keep_result("simulate", argv, {**data, **(kept[0] if len(kept) == 1 else {"clusters": kept})}, options)
    return 1 if failures_of(runs) else 0


def _begin(options: argparse.Namespace, source: Source, clusters: Sequence[Cluster]) -> None:
    """Check the first run's requests, export them if that is wanted, and print the model and notes on requests that
    are too long. Raises :class:`ConfigError`."""
    workload = source.at(options.rate, options.num_requests, options.seed)
    notes = [check_lengths(workload, cluster.longest) for cluster in clusters]
    if workload.num_requests > 1:
        notes.append(check_arrivals(source, options.num_requests))
    if options.export:
        specs = {each.name: each.spec for each in clusters if each.spec is not None}
        rate = export(Path(options.export), specs, workload)
        print(f"specs and requests are in {options.export}; {WORKLOAD_FILE} has {rate:.6g} requests per second")
    if not options.against:
        print(f"model: {model_words(options)}")
    for words in notes_of(source, options.runs):
        print(f"note: {words}")
    for note in dict.fromkeys(filter(None, notes)):
        print(f"note: in the first run {note}")


def _print_summary(
    options: argparse.Namespace, clusters: Sequence[Cluster], simulated: Sequence[list[dict[str, Any]]]
) -> None:
    """Print the comparison of several clusters, and notes on all their runs."""
    runs = [run for each in simulated for run in each]
    if len(clusters) > 1:
        headers: tuple[str, ...] = ("", "goodput, requests/s", "within, %", "TTFT p50", "p99, ms")
        rows = comparison_of(clusters, simulated)
        if not has_objectives(options):  # then all completed requests are good ones
            headers = ("", "requests/s", *headers[3:])
            rows = [[*row[:2], *row[3:]] for row in rows]
        print(table(rows, headers))
    if not has_objectives(options):
        print("no objectives are given, so none are checked: --ttft-ms, --tpot-ms, --itl-ms")
    if not clusters[0].calibration.is_measured:
        print("note: uncalibrated; compare arrangements by these figures, but don't rely on the figures themselves")
    if failures := failures_of(runs):
        words = "; ".join(f"{count} times: {reason}" for reason, count in failures.most_common())
        num_requests = sum(run["figures"]["requests"] for run in runs)
        print(f"note: {failures.total()} of the {num_requests} requests of all runs failed; {words}")
    strays = sum((Counter(run["paths"]) for run in runs), Counter[str]())
    if elsewhere := [f"{count} {path}" for path, count in strays.items() if is_elsewhere(path)]:
        print(f"note: requests that did not run as they were placed: {', '.join(elsewhere)}")


def has_objectives(options: argparse.Namespace) -> bool:
    """Return whether requests have any objective."""
    return bool(options.ttft_ms or options.tpot_ms or options.itl_ms)


def failures_of(runs: Sequence[dict[str, Any]]) -> Counter[str]:
    """Return the numbers of failed requests of all runs, by reason."""
    return sum((Counter(run["figures"]["failed"]) for run in runs), Counter[str]())


def model_words(options: argparse.Namespace) -> str:
    """Return the model that is simulated, and that it is assumed where none was given."""
    return options.model or f"{options.shape}, as --shape says; no --model was given"


def _simulate(options: argparse.Namespace, source: Source, cluster: Cluster) -> list[dict[str, Any]]:
    """Simulate the runs of one cluster, and print their figures."""
    bounds = {name: getattr(options, name) or float("inf") for name in ("ttft_ms", "tpot_ms", "itl_ms")}
    objective = Objective(**bounds)
    print(f"steps: {cluster.calibration.source}")
    print(f"workers: {described(cluster.workers)}; policy {cluster.policy}")
    runs = []
    spec = TwinSpec(
        cluster.workers, cluster.calibration, cluster.policy, options.ttft_ms, options.tpot_ms or options.itl_ms
    )
    for number in range(options.runs):
        seed, began = options.seed + number, time.process_time()
        with _rarely_collected():
            workload = source.at(options.rate, options.num_requests, seed)
            result = TwinCluster(spec, seed).run(workload, seed)
        runs.append(
            {
                "seed": seed,
                "figures": figures_of(workload, result, objective),
                "busy": result.busy_shares,
                "paths": dict(result.counts),
                "steps": sum(result.num_steps.values()),
                "cpu_seconds": time.process_time() - began,
            }
        )
    rows = rows_of(runs, objectives=has_objectives(options))
    print(table(rows, ("", "median", "lowest", "highest")))
    print(f"busy share of the steps' time: {busy_words(runs)}")
    print(cost_of(runs), flush=True)
    return runs


@contextlib.contextmanager
def _rarely_collected() -> Iterator[None]:
    """Let the garbage collector look at young objects only: it takes a fifth of the time that a large cluster needs to
    go through all that lives on."""
    before = gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def comparison_of(clusters: Sequence[Cluster], simulated: Sequence[list[dict[str, Any]]]) -> list[list[object]]:
    """Return a line for each cluster, that of its median run by goodput."""
    rows: list[list[object]] = []
    for cluster, runs in zip(clusters, simulated, strict=True):
        ordered = sorted(runs, key=lambda run: float(run["figures"]["goodput_requests_per_second"]))
        figures = ordered[len(ordered) // 2]["figures"]
        rows.append(
            [
                cluster.name,
                figures["goodput_requests_per_second"],
                100 * figures["slo_attainment"],
                figures["ttft_ms"].get("p50"),
                figures["ttft_ms"].get("p99"),
            ]
        )
    return rows


def is_elsewhere(path: str) -> bool:
    """Return whether requests of a path, intended, actual and reason, ran elsewhere than they were placed."""
    intended, actual, _ = path.split(" ", 2)
    return intended != actual


def busy_words(runs: Sequence[dict[str, Any]]) -> str:
    """Return the busy shares of the workers: of each one if they are few, else mean and range of each role's."""
    busy = {name: max(run["busy"][name] for run in runs) for name in runs[0]["busy"]}
    if len(busy) <= MAX_NAMED_WORKERS:
        return ", ".join(f"{name} {100 * share:.0f}%" for name, share in busy.items())
    by_role: dict[str, list[float]] = {}
    for name, share in busy.items():
        by_role.setdefault(name.rpartition("-")[0], []).append(100 * share)
    return ", ".join(
        f"{role} {sum(shares) / len(shares):.0f}% ({min(shares):.0f} to {max(shares):.0f}%)"
        for role, shares in by_role.items()
    )


def cost_of(runs: Sequence[dict[str, Any]]) -> str:
    """Return the processor time of the runs, and the most memory that this process has had."""
    seconds, steps = sum(run["cpu_seconds"] for run in runs), sum(run["steps"] for run in runs)
    simulated = sum(run["figures"]["duration_seconds"] for run in runs)
    return (
        f"{simulated:.0f} s with {steps} steps took {seconds:.0f} s of processor time on one core; peak memory "
        f"{peak_bytes() / 2**30:.1f} GiB"
    )


def peak_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(kibibytes) * (1 if sys.platform == "darwin" else 1024)


def clusters_of(options: argparse.Namespace) -> list[Cluster]:
    """Return the clusters that the options describe. Raises :class:`ConfigError`."""
    if options.against:
        report = report_of(options.against, read_operators_key(options.api_key_file))
        calibration = of_cluster(report, options.against)
        workers = setups_of_cluster(report, calibration)
        longest = longest_of(workers, origin=f"the cluster {options.against}")
        return [Cluster(options.against, workers, calibration, options.policy or DEFAULT_POLICY, longest)]
    arms = [parse_arm(text) for text in options.cluster]
    if options.policy:
        arms = [replace(arm, policy=options.policy) for arm in arms]
    with model_of(options) as model:
        engine, config = engine_of(options, model), load_model_config(model)
        calibration = calibration_of(options, config)
        per_arm = [setups_of_arm(arm, engine, config, calibration, options.gpu) for arm in arms]
        served = served_engine(options, engine)
        return [
            Cluster(
                arm.name,
                found,
                calibration,
                arm.policy,
                longest_with(options, config, found),
                spec_of(arm, served, options.ttft_ms, options.tpot_ms or options.itl_ms),
            )
            for arm, found in zip(arms, per_arm, strict=True)
        ]


def longest_with(options: argparse.Namespace, config: ModelConfig, workers: Sequence[WorkerSetup]) -> LongestSequence:
    """Return the longest sequence of workers that the options of :func:`add_cluster_options` describe."""
    return longest_of(
        workers,
        origin=options.model or options.shape,
        num_positions=config.max_position_embeddings,
        max_model_len=options.max_model_len,
    )


def engine_of(options: argparse.Namespace, model: str) -> EngineConfig:
    """Return the workers' settings that :func:`add_cluster_options` has options for."""
    return engine_config(
        options,
        model,
        max_num_seqs=options.max_num_seqs,
        tensor_parallel_size=options.tensor_parallel_size,
        max_model_len=options.max_model_len,
        host_kv_memory_bytes=options.host_kv_memory,
    )


def served_engine(options: argparse.Namespace, engine: EngineConfig) -> EngineConfig:
    """Return the settings for workers that serve: nothing was loaded here, they load the checkpoint. Of a published
    shape there is none: it stands in the place of a path."""
    engine = msgspec.structs.replace(engine, device=CPU if options.gpu == CPU else engine.device)
    if options.model:
        model = str(Path(options.model).resolve()) if Path(options.model).is_dir() else options.model
        return msgspec.structs.replace(engine, model=model, load_format=EngineConfig(model="").load_format)
    return msgspec.structs.replace(engine, model=options.shape)


def calibration_of(options: argparse.Namespace, config: ModelConfig) -> Calibration:
    """Return the saved calibration, or the roofline of the device. Raises :class:`ConfigError`."""
    if options.calibration:
        found = read_calibration(options.calibration)
        if found.num_ranks not in (0, options.tensor_parallel_size):
            raise ConfigError(
                f"--calibration {options.calibration} was fitted by workers of {found.num_ranks} ranks, whose steps "
                f"take other times than those of {options.tensor_parallel_size}: give --tensor-parallel-size "
                f"{found.num_ranks}, or calibrate such workers"
            )
        return found
    return of_roofline(config, options.gpu, options.tensor_parallel_size, max(1, options.threads))


def rows_of(runs: Sequence[dict[str, Any]], *, objectives: bool = True) -> list[list[object]]:
    """Return each figure's median, lowest and highest value over the runs, without ``objectives`` not their share."""
    rows = []
    for label, path in FIGURES:
        if path == ("slo_attainment",) and not objectives:
            continue
        values = []
        for run in runs:
            value: Any = run["figures"]
            for name in path:
                value = value.get(name) if value else None
            if value is not None:
                values.append(float(value) * (100 if path == ("slo_attainment",) else 1))
        if values:
            rows.append([label, statistics.median(values), min(values), max(values)])
    return rows


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a model, a device and the source of step times."""
    add = parser.add_argument
    add("--gpu", choices=[*DEVICE_RATES, CPU], default="H200", help="device of the workers; without other models of "
        "its steps, a roofline is taken")  # fmt: skip
    add("--calibration", default="", metavar="FILE", help="models that `splitserve calibrate` has saved")
    add("--tensor-parallel-size", type=positive, default=1, metavar="N")
    add_max_num_seqs(parser)
    add("--host-kv-memory", type=bytes_option, default="0", metavar="SIZE", help="host tier of each worker; 0: as in "
        "the calibration, else none")  # fmt: skip
    add("--max-model-len", type=not_negative, default=0, metavar="TOKENS", help="0: the model's own, cut to KV memory")
    add("--ttft-ms", type=finite, default=0.0, metavar="MS", help="objective for TTFT; 0: none")
    add("--itl-ms", type=finite, default=0.0, metavar="MS", help="objective for the gaps between tokens; 0: none")
    add("--num-requests", type=positive, default=300, metavar="N", help="requests of a run")
    add("--seed", type=int, default=0)
    add("--max-tokens", type=positive, default=100_000, metavar="N", help="longest conversation taken from a trace")
    add_engine_options(parser, shape="llama-3.1-8b", dtype="auto", kv_memory="0")
    parser.set_defaults(load_format="dummy")


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = CommandParser(prog="splitserve simulate", description=__doc__.partition("\n\n")[2])
    add = parser.add_argument
    add("--cluster", nargs="+", default=["1P1D"], metavar="ARM", help=f"one or several to compare: {FORMS}")
    add("--against", default="", metavar="URL", help="simulate this running cluster, by its own step times")
    add_operators_key_option(parser)
    add(
        "--policy",
        default="",
        choices=["", *PLACEMENT_POLICIES],
        help="instead of the arm's, or with --against of the default",
    )
    add("--workload", default="1024/128", metavar="WORKLOAD", help=WORKLOADS)
    add("--rate", type=positive_seconds, default=1.0, metavar="R", help="requests per second")
    add("--tpot-ms", type=finite, default=0.0, metavar="MS", help="objective for the mean gap of a request; 0: none")
    add(
        "--export", default="", metavar="DIR", help="write the clusters' specs, and the first run's requests as a trace"
    )
    add("--runs", type=positive, default=5, metavar="N", help="runs with other arrivals, for the range of each figure")
    add_cluster_options(parser)
    add_result_options(parser)
    return parser
