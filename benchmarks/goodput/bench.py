"""``splitserve bench goodput``: does disaggregation pay here?

For a workload, objectives and a number of devices: the highest rate at which the objectives hold, for mixed workers
with several chunk budgets, for each split into prefill and decode workers, and with conditional disaggregation. The
bench starts and stops the arrangements itself, alternates them, and gives intervals of the differences. With --endpoint
it compares endpoints that run already, of any system with OpenAI's API.

A run keeps each probe in its folder: after Ctrl-C, or when --max-seconds have passed, the report has what was measured,
and --continue FOLDER goes on.
"""

import argparse
import contextlib
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from splitserve.benchmarks.common.arguments import finite, more_than_one, positive, positive_seconds
from splitserve.benchmarks.common.charts import require_matplotlib
from splitserve.benchmarks.common.report import (
    machine,
    results_directory,
    table,
    versions,
    without_folders,
    write_result,
)
from splitserve.benchmarks.engine.engine_options import (
    add_engine_options,
    add_max_num_seqs,
    changed_switches,
    engine_config,
    max_num_seqs,
    model_of,
)
from splitserve.benchmarks.goodput.arms import FORMS, Arm, check_equal_devices, default_arms, parse_arm
from splitserve.benchmarks.goodput.charts import Charts
from splitserve.benchmarks.goodput.clusters import Clusters
from splitserve.benchmarks.goodput.comparison import Comparison, timed
from splitserve.benchmarks.goodput.probe import Prober, ProbeResult, Setup
from splitserve.benchmarks.goodput.report import notes, render
from splitserve.benchmarks.goodput.result import Conditions, Folder, csv_of, rows_of, summary_of, verdict_of
from splitserve.benchmarks.goodput.search import Search, Sweep
from splitserve.benchmarks.goodput.suites import SUITES
from splitserve.benchmarks.goodput.twins import Twins
from splitserve.benchmarks.goodput.verdict import losing_region, sentence
from splitserve.benchmarks.twin.loads import check_arrivals
from splitserve.common.errors import ConfigError
from splitserve.models.config import load_model_config
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.orchestration.spec.expansion import read_secret
from splitserve.workloads.named import FORMS as WORKLOADS
from splitserve.workloads.named import Source, parse_workload

EXIT_INTERRUPTED = 130
_CHOICES = ("workloads", "ttft_ms", "itl_ms", "percentile", "num_requests", "precision", "num_repeats", "max_probes",
            "chunk_budgets", "arms", "max_seconds", "first_rate", "twin")  # fmt: skip
_GUESSED_SECONDS = 45.0
"""Time of a probe until one has run, for ``--dry-run``."""


def main(argv: Sequence[str]) -> int:
    """Run the comparison that ``argv`` describes. Raises :class:`ConfigError`."""
    options = parser().parse_args(list(argv))
    for name in _CHOICES:  # what isn't given comes from the suite
        if getattr(options, name) is None:
            setattr(options, name, getattr(SUITES[options.suite], name))
    options.rates = sorted(set(options.rates))
    arms = arms_of(options)
    sources = [parse_workload(text, options.max_tokens) for text in options.workloads]
    for source in sources:
        if reason := check_arrivals(source, options.num_requests):
            raise ConfigError(reason)
    if options.folder and len(sources) > 1:
        raise ConfigError("--continue takes one folder: name its workload with --workloads")
    require_matplotlib()
    if options.dry_run:
        print(plan_of(options, arms, sources))
        return 0
    ends_at = time.monotonic() + options.max_seconds if options.max_seconds else float("inf")
    with model_of(options) if not options.endpoint else contextlib.nullcontext(options.model) as model:
        for source in sources:
            if not _compare(_Task(options, argv, arms, source, model), ends_at):
                return EXIT_INTERRUPTED
    return 0


def arms_of(options: argparse.Namespace) -> dict[str, Arm | None]:
    """Return the arms by name; None stands for an endpoint. Raises :class:`ConfigError`."""
    if options.endpoint:
        return dict.fromkeys(_endpoints(options))
    arms = [parse_arm(text) for text in options.arms] or default_arms(options.devices, options.chunk_budgets)
    check_equal_devices(arms)
    return {arm.name: arm for arm in arms}


def plan_of(options: argparse.Namespace, arms: Mapping[str, Arm | None], sources: Sequence[Source]) -> str:
    """Return what a run would do."""
    lines = [f"{name}: {arm.words}" if arm is not None else f"{name}: an endpoint" for name, arm in arms.items()]
    lasting = f", for {options.min_seconds:g} s at least" if options.min_seconds else ""
    lines += [f"workload {source.name}: {options.num_requests} requests a probe{lasting}" for source in sources]
    lines.append(f"objectives: {_conditions(options, arms, sources[0], options.model).objectives.words}")
    search = _search(options)
    most = len(arms) * len(sources) * search.max_probes
    probes = f"{most} probes, about {most * _GUESSED_SECONDS / 60:.0f} minutes"
    lines.append(probes if isinstance(search, Sweep) else f"at most {probes}; usually two thirds of that")
    if options.max_seconds:
        lines.append(f"no probe begins after {options.max_seconds / 60:.0f} minutes")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Task:
    """Comparison on one workload."""

    options: argparse.Namespace
    argv: Sequence[str]
    arms: Mapping[str, Arm | None]
    source: Source
    model: str  # path of the checkpoint; of endpoints: the id that they serve


def _compare(task: _Task, ends_at: float) -> bool:
    """Compare the arms and write the report; returns whether the searches have ended."""
    options, arms, source = task.options, task.arms, task.source
    conditions = _conditions(options, arms, source, task.model)
    parent = Path(options.result_dir) if options.result_dir else results_directory()
    folder = Folder(Path(options.folder)) if options.folder else Folder.made(parent)
    setup = _setup(options, source, task.model, conditions)
    searches = {name: _search(options) for name in arms}
    comparison = Comparison(arms, conditions.objectives, searches, options.seed)
    comparison.resume(folder.begin(conditions))
    print(f"{source.name}: {conditions.objectives.words}; results in {folder.path}", flush=True)
    ended = True
    try:
        with Clusters(side_by_side=options.side_by_side) as clusters:
            prober = Prober(setup, clusters)
            twins = Twins(folder.path / "twins", setup)
            if options.twin and not options.endpoint and not options.rates:
                _propose(comparison, prober, twins, options.first_rate)
            _run(comparison, prober, twins, folder, ends_at)
    except KeyboardInterrupt:
        print("interrupted: the report has what was measured", file=sys.stderr)
        ended = False
    if comparison.probes:
        _write(folder, conditions, comparison.probes, task.argv)
    return ended and not any(search.next_rate() is not None for search in searches.values())


def _search(options: argparse.Namespace) -> Search | Sweep:
    if options.rates:
        return Sweep(options.rates, options.num_repeats)
    return Search(options.first_rate, options.precision, options.num_repeats, options.max_probes, step=options.step)


def _propose(comparison: Comparison, prober: Prober, twins: Twins, first_rate: float) -> None:
    """Let the twin of each arm without probes propose the rate of the first one."""
    for name, arm in comparison.arms.items():
        assert arm is not None, "endpoints have no twins"
        if comparison.searches[name].num_probes:
            continue
        try:
            if not twins.has(name):
                twins.keep(name, prober.report_after_load(arm, first_rate, comparison.seed))
            rate = twins.proposed_rate(name, arm, first_rate, comparison.seed)
        except ConfigError as error:
            print(f"{name:24} has no twin: {error}", flush=True)
            continue
        comparison.propose(name, rate)
        print(f"{name:24} {rate:8.3g}/s  proposed by its twin", flush=True)


def _run(comparison: Comparison, prober: Prober, twins: Twins, folder: Folder, ends_at: float) -> None:
    proposed: dict[str, float | None] = {name: search.first_rate for name, search in comparison.searches.items()}
    proposed |= {kept.arm: kept.simulated.get("goodput") for kept in comparison.probes}

    def probe(name: str, arm: Arm | None, rate: float, seed: int) -> ProbeResult:
        result = prober.run(name, arm, rate, seed)
        if arm is not None and twins.has(name):
            result.simulated = {**twins.figures(name, arm, rate, seed), "goodput": proposed[name]}
        return result

    run_probe, mean_seconds = timed(probe)
    for result in comparison.run(run_probe):
        folder.keep(len(comparison.probes), result)
        pressure = result.outcome.pressure(prober.setup.objectives)
        left = comparison.seconds_left(mean_seconds())
        print(
            f"{result.arm:24} {result.rate:8.3g}/s  {'holds' if pressure <= 1 else 'fails'}, at {100 * pressure:4.0f}% "
            f"of the objectives; about {left / 60:.0f} min left",
            flush=True,
        )
        if time.monotonic() > ends_at:
            print(f"--max-seconds have passed: go on with --continue {folder.path}")
            return


def _write(folder: Folder, conditions: Conditions, probes: Sequence[ProbeResult], argv: Sequence[str]) -> None:
    """Write the report with its data, and print the verdict."""
    verdict, rows = verdict_of(conditions, probes), rows_of(conditions, probes)
    about = {
        "command": shlex.join(["splitserve", "bench", "goodput", *without_folders(argv)]),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "machine": ", ".join(f"{name}: {value}" for name, value in machine().items()),
        **{name.replace("_", " "): str(value) for name, value in msgspec.to_builtins(conditions).items()},
    }
    (folder.path / "report.html").write_text(render(conditions, verdict, rows, probes, about), encoding="utf-8")
    (folder.path / "probes.csv").write_text(csv_of(rows), encoding="utf-8")
    drawn = Charts(verdict, rows, probes)
    for name in drawn.names:
        (folder.path / f"{name.replace(' ', '-')}.png").write_bytes(drawn.png(name))
    written = write_result("goodput", argv, summary_of(conditions, verdict, rows), str(folder.path))
    print(table([[arm.name, arm.goodput.words, arm.interval.words] for arm in verdict.arms], ("", "goodput", "90%")))
    print(sentence(verdict), losing_region(verdict), sep="\n")
    for note in notes(probes, verdict):
        print(f"note: {note}")
    print(f"written to {folder.path / 'report.html'} and {written}")


def _conditions(options: argparse.Namespace, arms: Mapping[str, Arm | None], source: Source, model: str) -> Conditions:
    shape = options.shape if not options.model else ""
    return Conditions(
        workload=source.name,
        ttft_ms=options.ttft_ms,
        itl_ms=options.itl_ms,
        percentile=options.percentile,
        num_requests=options.num_requests,
        arms=list(arms),
        seed=options.seed,
        temperature=options.temperature,
        top_p=options.top_p,
        kill_seconds=options.kill_every,
        min_seconds=options.min_seconds,
        rates=options.rates,
        model=f"{shape}, random weights" if shape and not options.endpoint else Path(model).name,
        endpoints=_endpoints(options),
        settings={
            "dtype": options.dtype,
            "device": options.device,
            "threads": options.threads,
            "kv_memory": options.kv_memory,
            "side_by_side": options.side_by_side,
            "max_num_seqs": max_num_seqs(options),
            **changed_switches(options),
        },
    )


def _setup(options: argparse.Namespace, source: Source, model: str, conditions: Conditions) -> Setup:
    if options.endpoint:
        return Setup(
            source=source,
            objectives=conditions.objectives,
            num_requests=options.num_requests,
            min_seconds=options.min_seconds,
            vocab_size=options.vocab_size,
            temperature=options.temperature,
            top_p=options.top_p,
            num_client_processes=options.client_processes,
            urls=_endpoints(options),
            model_name=options.model,
            api_key=read_secret("", options.api_key_env),
        )
    return Setup(
        source=source,
        objectives=conditions.objectives,
        num_requests=options.num_requests,
        min_seconds=options.min_seconds,
        vocab_size=load_model_config(model).vocab_size,
        engine=engine_config(options, model, max_num_seqs=max_num_seqs(options)),
        temperature=options.temperature,
        top_p=options.top_p,
        num_client_processes=options.client_processes,
        kill_seconds=options.kill_every,
    )


def _endpoints(options: argparse.Namespace) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in options.endpoint:
        name, separator, url = text.partition("=")
        if not separator or "//" not in url or name in found:
            raise ConfigError(f"--endpoint {text!r}: must be NAME=URL, each name once")
        found[name] = url
    return found


def _add_probe_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--num-requests", type=positive, metavar="N", help="requests of each probe")
    add("--precision", type=positive_seconds, metavar="SHARE", help="width of the bracket at which a search ends")
    add("--num-repeats", type=positive, metavar="N", help="probes at each end of the bracket")
    add("--max-probes", type=positive, metavar="N", help="probes of an arm at most")
    add(
        "--first-rate",
        type=positive_seconds,
        metavar="R",
        help="requests per second of the first probe; with a twin of its short load",
    )
    add(
        "--step",
        type=more_than_one,
        metavar="FACTOR",
        help="from a search's rate to the next, until one held and one failed; default: by the pressure, 1.4 to 2",
    )
    add(
        "--rates",
        nargs="+",
        type=positive_seconds,
        default=[],
        metavar="R",
        help="requests per second of all probes, instead of a search and a twin: for goodput by objective",
    )
    add(
        "--min-seconds",
        type=finite,
        default=0.0,
        metavar="SECONDS",
        help="duration of a probe's load, at least: with more requests where --num-requests would end sooner",
    )
    add(
        "--twin",
        action=argparse.BooleanOptionalAction,
        help="an arm's twin, from a short load, proposes the rate of its first probe and stands beside each",
    )


def parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="splitserve bench goodput", description=__doc__.partition("\n\n")[2])
    add = parser.add_argument
    add("--suite", choices=list(SUITES), default="cpu", help="defaults of the options below; smoke takes two minutes")
    add("--workloads", nargs="+", metavar="WORKLOAD", help=WORKLOADS)
    add("--devices", type=positive, default=2, metavar="N", help="devices (workers) of each arm")
    add("--arms", nargs="+", metavar="ARM", help=f"instead of all: {FORMS}")
    add("--chunk-budgets", nargs="+", type=positive, metavar="TOKENS", help="chunk budgets of mixed workers")
    add("--ttft-ms", type=positive_seconds, metavar="MS", help="objective for the time to first token")
    add("--itl-ms", type=positive_seconds, metavar="MS", help="objective for the gaps between tokens")
    add("--percentile", type=positive_seconds, metavar="P", help="percentile at which both must hold")
    _add_probe_options(parser)
    add("--max-seconds", type=finite, metavar="SECONDS", help="time after which no further probe begins; 0: none")
    add("--max-tokens", type=positive, default=4096, metavar="N", help="longest conversation taken from a trace")
    add("--kill-every", type=finite, default=0.0, metavar="SECONDS", help="kill a random worker so often; 0: never")
    add(
        "--side-by-side",
        action="store_true",
        help="start each arm once, and keep all of them up on the same devices; give --kv-memory",
    )
    add("--temperature", type=finite, default=0.0, help="0 is greedy")
    add("--top-p", type=positive_seconds, default=1.0)
    add("--seed", type=int, default=0)
    add("--client-processes", type=positive, default=1, metavar="N", help="processes of the load generator")
    add_max_num_seqs(parser)
    add("--endpoint", action="append", default=[], metavar="NAME=URL", help="compare endpoints that run; repeatable")
    add("--vocab-size", type=positive, default=256, metavar="N", help="of endpoints: prompt ids are drawn below N")
    add("--api-key-env", default="OPENAI_API_KEY", metavar="NAME", help="variable with the endpoints' key")
    add("--continue", dest="folder", default="", metavar="FOLDER", help="go on with an interrupted run")
    add("--result-dir", default="", metavar="DIR", help="parent of the run's folder")
    add("--dry-run", action="store_true", help="say what would be measured, and how long that takes")
    add_engine_options(parser, shape="tiny", dtype="auto", kv_memory="0")
    return parser
