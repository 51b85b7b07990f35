"""``splitserve plan``: which arrangement of N devices serves a workload best, by the twin.

Mixed workers with several chunk budgets, and every split into prefill and decode workers, are ranked by goodput: the
highest rate at which the objectives hold. The best one's cluster spec can be written to a file. Arrangements that miss
the objectives even with one request at a time are named first, and aren't searched.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from splitserve.benchmarks.common.arguments import finite, positive, positive_seconds
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.benchmarks.engine.engine_options import model_of
from splitserve.benchmarks.goodput.arms import CONDITIONAL_POLICY, LOAD_POLICY, Arm
from splitserve.benchmarks.goodput.comparison import Comparison
from splitserve.benchmarks.goodput.objectives import Objectives, Outcome
from splitserve.benchmarks.goodput.result import Conditions, rows_of, summary_of, verdict_of
from splitserve.benchmarks.goodput.search import Search
from splitserve.benchmarks.goodput.verdict import ArmResult, ranked
from splitserve.benchmarks.twin.export import spec_of
from splitserve.benchmarks.twin.loads import LongestSequence, TwinProber, check_arrivals, check_lengths, left_out_words
from splitserve.benchmarks.twin.setups import setups_of_arm
from splitserve.benchmarks.twin.simulate import (
    add_cluster_options,
    calibration_of,
    engine_of,
    longest_with,
    model_words,
    served_engine,
)
from splitserve.common.errors import ConfigError
from splitserve.models.config import load_model_config
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.orchestration.spec.cluster_spec import ClusterSpec
from splitserve.orchestration.spec.document import to_yaml
from splitserve.workloads.conversation import Workload
from splitserve.workloads.named import FORMS as WORKLOADS
from splitserve.workloads.named import Source, parse_workload

DEFAULT_PERCENTILE = 99.0
PRECISION = 0.1
MAX_PROBES = 12
LASTING_ANSWERS = 2
"""Duration of a load in terms of the time that a mean answer may take, at least: batches are full after one."""
MOST_TIMES = 10
"""Requests of a load in terms of --num-requests, at most, unless --min-seconds is given."""


def main(argv: Sequence[str]) -> int:
    """Rank the arrangements. Raises :class:`ConfigError`."""
    options = parser().parse_args(list(argv))
    if not (options.ttft_ms and options.itl_ms):
        raise ConfigError("a plan needs both objectives: --ttft-ms and --itl-ms")
    if options.output and not Path(options.output).resolve().parent.is_dir():
        raise ConfigError(f"--output {options.output}: there is no such folder; make it before the search")
    arms = {arm.name: arm for arm in arms_of(options)}
    objectives = Objectives(options.ttft_ms, options.itl_ms, options.percentile)
    source = parse_workload(f"trace:{options.trace}" if options.trace else options.workload, options.max_tokens)
    with model_of(options) as model:
        engine, config = engine_of(options, model), load_model_config(model)
        calibration = calibration_of(options, config)
        print(f"model: {model_words(options)}", flush=True)
        workers = [
            setup for arm in arms.values() for setup in setups_of_arm(arm, engine, config, calibration, options.gpu)
        ]
        first = source.at(options.first_rate, options.num_requests, options.seed)
        if reason := check_arrivals(source, options.num_requests):
            raise ConfigError(reason)
        _print_notes(source, first, longest_with(options, config, workers))
        seconds = options.min_seconds if options.min_seconds is not None else lasting_seconds(first, objectives)
        prober = TwinProber(
            lambda arm: setups_of_arm(arm, engine, config, calibration, options.gpu),
            calibration,
            source,
            objectives,
            requests_by_rate(options, seconds),
        )
        unable = find_unable(arms, prober, objectives, options)
        able = {name: arm for name, arm in arms.items() if name not in unable}
        searches = {name: Search(options.first_rate, PRECISION, 1, MAX_PROBES) for name in able}
        comparison = Comparison(able, objectives, searches, options.seed)
        for probe in comparison.run(prober):
            pressure = probe.outcome.pressure(objectives)
            print(f"{probe.arm:24} {probe.rate:8.3g}/s  {100 * pressure:4.0f}% of the objectives", flush=True)
        conditions = _conditions(options, list(arms), source.name, objectives)
        conditions.min_seconds = seconds
        verdict = verdict_of(conditions, comparison.probes)
        best_first = ranked(verdict.arms)
        print(f"steps: {calibration.source}")
        if words := shortened_words(options, seconds, [probe.rate for probe in comparison.probes]):
            print(words)
        rows = [[arm.name, arms[arm.name].words, arm.goodput.words, arm.interval.words] for arm in best_first]
        rows += [[name, arms[name].words, "none", ""] for name in unable]
        print(table(rows, ("", "", "goodput", "90%")))
        print(why(best_first, arms, comparison, objectives))
        if options.output:
            served = served_engine(options, engine)
            _write_spec(
                options.output, spec_of(arms[best_first[0].name], served, objectives.ttft_ms, objectives.itl_ms)
            )
            if not options.model:
                print(
                    f"before that, put the path of a checkpoint in the place of {options.shape}: --model was not given"
                )
    data = summary_of(conditions, verdict, rows_of(conditions, comparison.probes))
    data["unable"] = {name: outcome.judged_ms(objectives) for name, outcome in unable.items()}
    keep_result("plan", argv, {"calibration": calibration.source, **data}, options)
    return 0


def _print_notes(source: Source, first: Workload, longest: LongestSequence) -> None:
    """Print notes on conversations that are left out, and on requests of the ``first`` load that are too long."""
    if words := left_out_words(source):
        print(f"note: {words}", flush=True)
    if note := check_lengths(first, longest):
        print(f"note: in the first load {note}", flush=True)


def lasting_seconds(workload: Workload, objectives: Objectives) -> float:
    """Return how long a load has to last for its last requests to show whether the objectives hold on and on."""
    answer_seconds = workload.num_output_tokens / workload.num_requests * objectives.itl_ms / 1e3
    return max(objectives.lasting_seconds, LASTING_ANSWERS * answer_seconds)


def requests_by_rate(options: argparse.Namespace, seconds: float) -> Callable[[float], int]:
    """Return the function from a load's rate to its number of requests; ``seconds``: its duration, at least."""
    most = MOST_TIMES * options.num_requests if options.min_seconds is None else math.inf
    return lambda rate: max(options.num_requests, math.ceil(min(rate * seconds, most)))


def shortened_words(options: argparse.Namespace, seconds: float, rates: Sequence[float]) -> str:
    """Return a note on the loads that were shorter than ``seconds``; "" if none were."""
    most = MOST_TIMES * options.num_requests
    shortened = [rate for rate in rates if rate * seconds > most]
    if options.min_seconds is not None or not shortened:
        return ""
    return (
        f"note: loads from {min(shortened):g}/s on had {most} requests, over before {seconds:g} s: rates that held up "
        "there may not hold for long; raise --num-requests, or give --min-seconds"
    )


def find_unable(
    arms: Mapping[str, Arm], prober: TwinProber, objectives: Objectives, options: argparse.Namespace
) -> dict[str, Outcome]:
    """Return the outcomes of the arms that miss the objectives even with one request at a time, and print them.

    Raises :class:`ConfigError` if all do.
    """
    outcomes = {name: prober.alone(name, arm, options.first_rate, options.seed).outcome for name, arm in arms.items()}
    unable = {name: outcome for name, outcome in outcomes.items() if outcome.pressure(objectives) > 1}
    if len(unable) == len(arms):
        name, least = min(unable.items(), key=lambda item: item[1].pressure(objectives))
        raise ConfigError(
            f"no arrangement holds the objectives, even with one request at a time: {arms[name].words} comes nearest, "
            f"where {alone_words(least, objectives)}; {_remedy(least, objectives)}"
        )
    for name, outcome in unable.items():
        print(f"{name:24} not searched: with one request at a time {alone_words(outcome, objectives)}", flush=True)
    return unable


def alone_words(outcome: Outcome, objectives: Objectives) -> str:
    """Return the percentiles of requests that came one at a time beside their objectives, in words."""
    judged = outcome.judged_ms(objectives)
    if judged["ttft_ms"] is None or judged["itl_ms"] is None:
        return f"{outcome.num_failed} of {outcome.num_requests} requests fail"
    bounds = (("TTFT", judged["ttft_ms"], objectives.ttft_ms), ("ITL", judged["itl_ms"], objectives.itl_ms))
    each = [f"of {name} is {value:.4g} ms (objective {bound:g} ms)" for name, value, bound in bounds]
    return f"p{objectives.percentile:g} {each[0]} and {each[1]}"


def _remedy(outcome: Outcome, objectives: Objectives) -> str:
    if None in outcome.judged_ms(objectives).values():
        return "shorten the requests, or leave those out that are too long"
    return "raise --ttft-ms or --itl-ms, or choose a faster --gpu or a larger --tensor-parallel-size"


def arms_of(options: argparse.Namespace) -> list[Arm]:
    """Return the arrangements of the devices: each worker takes ``tensor_parallel_size`` of them."""
    num_workers, left = divmod(options.gpus, options.tensor_parallel_size)
    if left or not num_workers:
        raise ConfigError(
            f"--gpus {options.gpus} isn't a multiple of --tensor-parallel-size {options.tensor_parallel_size}"
        )
    arms = [Arm(num_mixed=num_workers, chunk_tokens=tokens) for tokens in options.chunk_budgets]
    for num_prefill in range(1, num_workers):
        for policy in (LOAD_POLICY, CONDITIONAL_POLICY):
            arms.append(Arm(num_prefill, num_workers - num_prefill, policy=policy))
    return arms


def why(
    best_first: Sequence[ArmResult], arms: Mapping[str, Arm], comparison: Comparison, objectives: Objectives
) -> str:
    """Return what limits the best arrangement, and the best one of the other kind, in words."""
    best = best_first[0]
    other = next((each for each in best_first if arms[each.name].is_mixed != arms[best.name].is_mixed), None)
    lines = [f"Best: {_with_limit(best, arms, comparison, objectives)}"]
    if other is not None:
        kind = "mixed arrangement" if arms[other.name].is_mixed else "split"
        lines.append(f"Best {kind}: {_with_limit(other, arms, comparison, objectives)}")
    return "\n".join(lines)


def _with_limit(result: ArmResult, arms: Mapping[str, Arm], comparison: Comparison, objectives: Objectives) -> str:
    """Return an arm's goodput, and which objective it misses first beyond it."""
    words = f"{arms[result.name].words} holds {result.goodput.words}"
    failed = [p for p in comparison.probes if p.arm == result.name and p.outcome.pressure(objectives) > 1]
    if not failed:
        return f"{words}; more was not offered."
    probe = min(failed, key=lambda probe: probe.rate)
    ratios = {which: probe.outcome.ratio(objectives, which) for which in ("ttft", "itl")}
    worst = max(ratios, key=ratios.__getitem__)
    if math.isinf(ratios[worst]):
        failing = f"{probe.outcome.num_failed} of {probe.outcome.num_requests} requests fail"
        return f"{words}; at {probe.rate:g}/s, {failing}."
    return f"{words}; at {probe.rate:g}/s, {worst.upper()} is {ratios[worst]:.2f} times its objective."


def _write_spec(path: str, spec: ClusterSpec) -> None:
    try:
        Path(path).write_text(to_yaml(spec), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}") from error
    print(f"written to {path}; start it with `splitserve serve --spec {path}`")


def _conditions(options: argparse.Namespace, arms: list[str], workload: str, objectives: Objectives) -> Conditions:
    return Conditions(
        workload=workload,
        ttft_ms=objectives.ttft_ms,
        itl_ms=objectives.itl_ms,
        percentile=objectives.percentile,
        num_requests=options.num_requests,
        arms=arms,
        seed=options.seed,
        temperature=0.0,
        top_p=1.0,
        kill_seconds=0.0,
        model=Path(options.model).name if options.model else f"{options.shape}, random weights",
        settings={"gpu": options.gpu, "gpus": options.gpus, "tensor_parallel_size": options.tensor_parallel_size},
    )


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = CommandParser(prog="splitserve plan", description=__doc__.partition("\n\n")[2])
    add = parser.add_argument
    add("--gpus", type=positive, required=True, metavar="N", help="devices to arrange")
    add("--trace", default="", metavar="FILE", help="trace to serve, instead of --workload")
    add("--workload", default="1024/128", metavar="WORKLOAD", help=WORKLOADS)
    add("--percentile", type=positive_seconds, default=DEFAULT_PERCENTILE, metavar="P", help="at which both objectives "
        "must hold")  # fmt: skip
    add("--chunk-budgets", nargs="+", type=positive, default=[512, 2048, 8192], metavar="TOKENS")
    add("--first-rate", type=positive_seconds, default=1.0, metavar="R", help="requests per second of the first probe")
    add("--min-seconds", type=finite, metavar="SECONDS", help="duration of a load, at least: with more requests where "
        "--num-requests would end sooner; default: 20 times --ttft-ms, or twice what a mean answer may take by "
        "--itl-ms, if that is more, but no more than 10 times --num-requests")  # fmt: skip
    add("--output", default="", metavar="FILE", help="write the best arrangement's cluster spec")
    add_cluster_options(parser)
    add_result_options(parser)
    return parser
