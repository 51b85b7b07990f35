"""``splitserve bench isolation``: effect of some users' prompts on the tokens of others.

Two kinds of requests arrive at fixed rates: *streams* with a short prompt and a long answer, and *prompts* with a long
prompt and a short answer. Each arrangement of workers gets the same requests at the same times over HTTP, one
arrangement after the other: 1P1D, one mixed worker, two mixed workers, 1P1D that hands over only where that is
predicted to pay (conditional), or either 1P1D with second tokens drawn at prefill. Reported are the gaps between tokens
of streams, those before the second and before the third token by themselves, the time to first token of prompts, the
mean time of each stage, and whether the arrangement kept up: figures of one that fell behind, or of which requests
failed, aren't comparable. Where prefill draws the second token, the wait for the hand-over is in the gap before the
third one: compare both.

With ``--stream-rate 0`` only prompts arrive, and gaps are those of their own answers. Rounds differ in their seed, and
in the arrangement that comes first.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from splitserve.benchmarks.common.arguments import finite, not_negative, positive, positive_seconds
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.benchmarks.common.stats import NOTABLE_LAG_MS, RequestRecord, few_values_notes, summarise
from splitserve.benchmarks.engine.engine_options import (
    add_engine_options,
    add_max_num_seqs,
    engine_config,
    max_num_seqs,
)
from splitserve.benchmarks.serving.load import Endpoint, run_load
from splitserve.benchmarks.serving.stage_times import mean_stages_ms, read_stage_sums
from splitserve.benchmarks.serving.workload import arrival_seconds, token_prompts
from splitserve.benchmarks.twin.paced import ENTRY, STEPS_VARIABLE, roofline_steps
from splitserve.common.errors import ConfigError, SplitserveError
from splitserve.models.config import load_model_config
from splitserve.models.demo.checkpoint import write_demo_config
from splitserve.models.roofline import DEVICE_RATES
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.orchestration.cluster.launcher import Entries, LocalCluster
from splitserve.orchestration.spec.cluster_spec import ClusterSpec
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.engine_config import DEVICE_DEFAULTS

ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "1P1D": {"num_prefill": 1, "num_decode": 1},
    "mixed": {"num_mixed": 1},
    "2 mixed": {"num_mixed": 2},
    "conditional": {"num_prefill": 1, "num_decode": 1, "policy": "cost"},
}
SECOND = " second token"
"""Addition to the name of an arrangement whose prefill worker may draw the second token, too."""
ARRANGEMENTS |= {name + SECOND: ARRANGEMENTS[name] for name in ("1P1D", "conditional")}
DEFAULT_ARRANGEMENTS = ("1P1D", "mixed", "2 mixed")
KEPT_UP_SECONDS = 2.0
"""Longest delay of the last requests, compared with no load, in an arrangement that keeps up."""
SEEDS_OF_A_ROUND = 100
_KINDS = ("streams", "prompts")
_ROLES = ("num_prefill", "num_decode", "num_mixed")
_SIZES = ("max_num_batched_tokens", "max_num_prefill_tokens_beside_decode", "tail_chunk_tokens")
"""Sizes of steps that paced workers take from GPUs."""


@dataclass(frozen=True, slots=True)
class Load:
    """Bodies in the order of their arrival."""

    bodies: Sequence[dict[str, Any]]
    due_seconds: Sequence[float]
    kinds: Sequence[str]  # the kind of each request


def make_load(options: argparse.Namespace, model: str, vocab_size: int, seed: int) -> Load:
    drawn = {"temperature": options.temperature} | ({"top_p": options.top_p} if options.temperature else {})
    entries: list[tuple[float, str, dict[str, Any]]] = []
    for kind, rate, num_input, num_output in (
        ("streams", options.stream_rate, options.stream_input_len, options.stream_output_len),
        ("prompts", options.prompt_rate, options.prompt_input_len, options.prompt_output_len),
    ):
        number = int(rate * options.seconds)
        if not number:
            continue
        kind_seed = seed + len(entries)
        prompts = token_prompts(number, num_input, 0, range(10, min(vocab_size, 1000)), kind_seed)
        for due, prompt in zip(arrival_seconds(number, rate, "poisson", kind_seed), prompts, strict=True):
            body = {
                "model": model, "prompt": prompt, "max_tokens": num_output, "stream": True, "ignore_eos": True,
                "return_token_ids": True, "stream_options": {"include_usage": True}, **drawn,
            }  # fmt: skip
            entries.append((due, kind, body))
    if not entries:
        raise ConfigError("no request arrives: raise --prompt-rate, --stream-rate or --seconds")
    entries.sort(key=lambda entry: entry[0])
    return Load([body for _, _, body in entries], [due for due, _, _ in entries], [kind for _, kind, _ in entries])


def spec_of(options: argparse.Namespace, model: str, arrangement: str) -> ClusterSpec:
    sizes = {name: getattr(DEVICE_DEFAULTS["cuda"], name) for name in _SIZES if options.paced}
    sizes |= {"max_num_batched_tokens": options.max_batched_tokens} if options.max_batched_tokens else {}
    engine = engine_config(options, model, max_num_seqs=max_num_seqs(options), enable_prefix_caching=False, **sizes)
    if arrangement.endswith(SECOND):
        engine = msgspec.structs.replace(engine, second_token_at_prefill=True)
    return simple_spec(engine, port=0, **ARRANGEMENTS[arrangement])


def start_cluster(options: argparse.Namespace, model: str, arrangement: str) -> LocalCluster:
    spec = spec_of(options, model, arrangement)
    if not options.paced:
        return LocalCluster(spec, log_level="warning")
    steps = msgspec.json.encode(roofline_steps(options.paced)).decode()
    return LocalCluster(spec, log_level="warning", entries=Entries(worker=ENTRY), environment={STEPS_VARIABLE: steps})


def names_of(options: argparse.Namespace) -> list[str]:
    """Return the arrangements, each once. ``--second-token-at-prefill`` stands for those that have it in their name."""
    if not options.second_token_at_prefill:
        return list(dict.fromkeys(options.arrangements))
    return list(dict.fromkeys(f"{name}{SECOND}" if f"{name}{SECOND}" in ARRANGEMENTS else name
                              for name in options.arrangements))  # fmt: skip


def measure(
    options: argparse.Namespace, cluster: LocalCluster, arrangement: str, vocab_size: int, seed: int
) -> dict[str, Any]:
    load = make_load(options, cluster.spec.served_model_name, vocab_size, seed)
    endpoint = Endpoint(cluster.url)
    first = [asyncio.run(run_load(endpoint, [body], [0.0]))[0] for body in _one_of_each(load)]
    if failed := [record.error for record in first if record.error]:
        raise SplitserveError(f"{arrangement}: a first request failed: {failed[0]}")
    before = read_stage_sums(cluster.url)
    records = asyncio.run(run_load(endpoint, load.bodies, load.due_seconds))
    stages = mean_stages_ms(before, read_stage_sums(cluster.url))
    result = result_of(arrangement, load, records, seconds_alone(first))
    return result | {"seed": seed, "mean_stages_ms": stages}


def _one_of_each(load: Load) -> list[dict[str, Any]]:
    """Return one body of each kind, twice: the first ones warm up."""
    return [load.bodies[load.kinds.index(kind)] for kind in _KINDS if kind in load.kinds] * 2


def seconds_alone(first: Sequence[RequestRecord]) -> float:
    """Return the longest time of a request without load, from the records of :func:`_one_of_each`: those that warmed up
    would hide how far an arrangement falls behind."""
    return max(record.end_seconds for record in first[len(first) // 2 :])


def result_of(arrangement: str, load: Load, records: Sequence[RequestRecord], alone: float) -> dict[str, Any]:
    """Compute the figures of an arrangement. ``alone``: seconds of a request without load.

    An arrangement of which a request failed didn't keep up: the others had a lighter load.
    """
    behind = max(record.end_seconds for record in records) - load.due_seconds[-1] - alone
    num_failed = sum(bool(record.error) for record in records)
    of_kind = {kind: [r for r, k in zip(records, load.kinds, strict=True) if k == kind] for kind in _KINDS}
    return {
        "arrangement": arrangement,
        "gpus_or_workers": sum(ARRANGEMENTS[arrangement].get(role, 0) for role in _ROLES),
        "kept_up": behind < KEPT_UP_SECONDS + alone and not num_failed,
        "seconds_behind": behind,
        "all": summarise(records, None),
        **{kind: summarise(found, None) for kind, found in of_kind.items() if found},
    }


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if options.paced and options.device == "cuda":
        raise ConfigError("--paced is for workers on CPU: leave --device out")
    with ExitStack() as stack:
        model = options.model
        if not model:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="splitserve-bench-"))
            model = str(write_demo_config(Path(directory) / options.shape, shape=options.shape))
            options.load_format = "dummy"
        vocab_size = load_model_config(model).vocab_size
        names = names_of(options)
        together = {
            name: stack.enter_context(start_cluster(options, model, name)) for name in names if options.side_by_side
        }
        for number in range(options.rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                with ExitStack() as alone:
                    cluster = together.get(name) or alone.enter_context(start_cluster(options, model, name))
                    yield measure(options, cluster, name, vocab_size, options.seed + SEEDS_OF_A_ROUND * number)


HEADERS = ["", "workers", "kept up", "ITL p50 ms", "p99", "max", "2nd token p50", "p99", "3rd token p50", "p99"]
HEADERS += ["later ITL p99", "TTFT p50 ms", "p99", "tokens/s", "failed"]


def row_of(result: dict[str, Any]) -> list[object]:
    streams = result.get("streams", result["all"])
    gaps = streams["itl_ms"]
    first = result.get("prompts", result["all"])["ttft_ms"]
    return [
        result["arrangement"],
        result["gpus_or_workers"],
        _kept_up_words(result),
        *(_cell(gaps, name) for name in ("p50", "p99", "max")),
        *(_cell(streams[f"{which}_token_ms"], name) for which in ("second", "third") for name in ("p50", "p99")),
        _cell(streams["later_itl_ms"], "p99"),
        *(_cell(first, name) for name in ("p50", "p99")),
        f"{result['all']['output_tokens_per_second']:.0f}",
        result["all"]["requests"] - result["all"]["completed"],
    ]


def _cell(figures: dict[str, float], name: str) -> str:
    """Format a figure; "-" where no request has it."""
    return f"{figures[name]:.2f}" if name in figures else "-"


def _kept_up_words(result: dict[str, Any]) -> str:
    if result["kept_up"]:
        return "yes"
    return "no, requests failed" if result["all"]["failed"] else f"no, {result['seconds_behind']:.1f} s late"


def notes(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return caveats about the figures: of streams, and the time to first token of prompts, as the table has them."""
    shown = [(each.get("streams", each["all"]), each.get("prompts", each["all"])) for each in results]
    numbers = {
        "ITL": [streams["itl_ms"] for streams, _ in shown],
        "2nd token": [streams["second_token_ms"] for streams, _ in shown],
        "3rd token": [streams["third_token_ms"] for streams, _ in shown],
        "TTFT": [prompts["ttft_ms"] for _, prompts in shown],
    }
    found = few_values_notes(numbers)
    lags = [each["all"]["dispatch_lag_ms"].get("p99", 0.0) for each in results]
    if max(lags) > NOTABLE_LAG_MS:
        found.append(f"requests went out late (p99 up to {max(lags):.0f} ms): the client was short of time")
    return found


def parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="splitserve bench isolation", description=__doc__.partition("\n\n")[0])
    add_engine_options(parser, shape="tiny", dtype="auto", kv_memory="0")
    add = parser.add_argument
    add("--arrangements", nargs="+", choices=list(ARRANGEMENTS), default=list(DEFAULT_ARRANGEMENTS))
    add("--rounds", type=positive, default=1, metavar="N", help="times that each arrangement gets the load")
    add(
        "--side-by-side",
        action="store_true",
        help="start all arrangements at once, on the same devices: rounds need no start; give --kv-memory",
    )
    add(
        "--paced",
        choices=[*DEVICE_RATES],
        default="",
        help="workers on CPU whose steps take the time that Llama-3.1-8B's would on such a GPU, by a roofline",
    )
    add("--temperature", type=finite, default=0.0, help="0 is greedy")
    add("--top-p", type=positive_seconds, default=1.0)
    add("--max-batched-tokens", type=not_negative, default=0, metavar="N")
    add_max_num_seqs(parser)
    add("--seconds", type=positive_seconds, default=20.0, help="time in which requests arrive")
    add("--stream-rate", type=finite, default=2.0, metavar="R", help="requests with long answers per second")
    add("--stream-input-len", type=positive, default=16, metavar="N")
    add("--stream-output-len", type=positive, default=128, metavar="N")
    add("--prompt-rate", type=finite, default=1.0, metavar="R", help="requests with long prompts per second")
    add("--prompt-input-len", type=positive, default=1024, metavar="N")
    add("--prompt-output-len", type=positive, default=4, metavar="N")
    add("--seed", type=int, default=0)
    add_result_options(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(list(argv))
    results = []
    try:
        for result in run(options):
            results.append(result)
            print(" ".join(map(str, row_of(result))), flush=True)  # before anything else can fail
    finally:  # after an interruption, too: a run is long, and its first rounds are worth as much
        if results:
            print(table([row_of(result) for result in results], HEADERS))
            for note in notes(results):
                print(f"note: {note}")
            keep_result("isolation", argv, {"results": results}, options)
    return 1 if any(result["all"]["failed"] for result in results) else 0
