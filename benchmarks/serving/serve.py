"""``splitserve bench serve``: an open-loop load on any OpenAI completions endpoint.

Requests arrive at a fixed or Poisson rate whether or not earlier ones are done. Prompts have an exact number of tokens
with an exact shared prefix, the output length is forced. Result: a table, and JSON with command, versions and machine.
"""

import argparse
import asyncio
import os
from collections.abc import Sequence
from typing import Any

from splitserve.benchmarks.common.arguments import finite, not_negative, positive, positive_seconds
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.benchmarks.common.stats import (
    NOTABLE_LAG_MS,
    RequestRecord,
    few_values_notes,
    parse_objective,
    summarise,
)
from splitserve.benchmarks.serving.load import Endpoint, run_load, take_profile
from splitserve.benchmarks.serving.workload import (
    TextPrompts,
    arrival_seconds,
    load_tokenizer,
    plain_token_ids,
    token_prompts,
)
from splitserve.common.errors import ConfigError
from splitserve.orchestration.cli.command_parser import CommandParser

_NOTABLE_TOKENS_PER_CHUNK = 1.05
_NOTABLE_BUNCHED_SHARE = 0.1
LATENCIES = {
    "TTFT": "ttft_ms",
    "TPOT": "tpot_ms",
    "ITL, by chunk": "itl_ms",
    "second token": "second_token_ms",
    "third token": "third_token_ms",
    "later ITL": "later_itl_ms",
    "E2E": "e2e_ms",
}


def main(argv: Sequence[str]) -> int:
    """Run the load that ``argv`` describes; exit status 1 if any request failed. Raises
    :class:`ConfigError`.
    """
    options = _parser().parse_args(argv)
    objective = parse_objective(options.slo) if options.slo else None
    bodies = request_bodies(options, options.num_warmups + options.num_requests)
    due = arrival_seconds(options.num_requests, options.request_rate, options.arrival, options.seed)
    endpoint = Endpoint(options.base_url, os.environ.get(options.api_key_env, ""), options.timeout)

    for body in bodies[: options.num_warmups]:
        [record] = asyncio.run(run_load(endpoint, [body], [0.0]))
        if record.error:
            raise ConfigError(f"the first request to {endpoint.completions_url} failed: {record.error}")
    records, profile = asyncio.run(_run(options, endpoint, bodies[options.num_warmups :], due))

    figures = summarise(records, objective)
    if profile:
        figures["profile"] = profile
    print(render(figures))
    for note in notes(figures, options.output_len):
        print(f"note: {note}")
    keep_result("serve", argv, {"figures": figures}, options)
    return 1 if figures["failed"] else 0


async def _run(
    options: argparse.Namespace, endpoint: Endpoint, bodies: Sequence[dict[str, Any]], due: Sequence[float]
) -> tuple[list[RequestRecord], dict[str, Any]]:
    """Run the load; returns its records, and the workers' reports of their steps if a profile was requested."""
    async with asyncio.TaskGroup() as tasks:
        load = tasks.create_task(run_load(endpoint, bodies, due, options.max_concurrency))
        profile = None
        if options.profile_steps:
            profile = tasks.create_task(take_profile(endpoint, options.profile_steps, options.profile_after))
    return load.result(), {} if profile is None else profile.result()


def request_bodies(options: argparse.Namespace, num_requests: int) -> list[dict[str, Any]]:
    """Make the bodies of POST /v1/completions."""
    common: dict[str, Any] = {
        "model": options.model,
        "max_tokens": options.output_len,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.ignore_eos:
        common["ignore_eos"] = True
    if options.token_ids:
        common["return_token_ids"] = True
    return [{**common, "prompt": prompt} for prompt in _prompts(options, num_requests)]


def _prompts(options: argparse.Namespace, num_prompts: int) -> Sequence[str | list[int]]:
    lengths = (num_prompts, options.input_len, options.shared_prefix_len)
    if options.prompt_format == "text":
        if not options.tokenizer:
            raise ConfigError("--prompt-format text needs --tokenizer DIR, the model's own, to count tokens")
        return TextPrompts(load_tokenizer(options.tokenizer)).make(*lengths, options.seed)
    ids = plain_token_ids(load_tokenizer(options.tokenizer)) if options.tokenizer else range(options.vocab_size)
    return token_prompts(*lengths, ids, options.seed)


def render(figures: dict[str, Any]) -> str:
    """Format the figures as two tables."""
    columns = ("mean", "p50", "p90", "p99", "max")
    rows = [[label, *(figures[key].get(column, "-") for column in columns)] for label, key in LATENCIES.items()]
    totals: list[tuple[str, object]] = [
        ("requests completed", f"{figures['completed']} of {figures['requests']}"),
        ("duration, s", figures["duration_seconds"]),
        ("requests/s", figures["requests_per_second"]),
        ("input tokens/s", figures["input_tokens_per_second"]),
        ("output tokens/s", figures["output_tokens_per_second"]),
        ("input tokens found cached", f"{figures['cached_input_tokens']} of {figures['input_tokens']}"),
        ("ITL, mean of the longest tenth, ms", figures["itl_longest_tenth_mean_ms"]),
        ("tokens per chunk", figures["tokens_per_chunk"].get("mean", "-")),
    ]
    if "slo_attainment" in figures:
        totals.append(("requests within the SLO, %", 100.0 * figures["slo_attainment"]))
        totals.append(("goodput, requests/s", figures["goodput_requests_per_second"]))
    totals += [(f"failed: {reason}", count) for reason, count in figures["failed"].items()]
    for worker, report in figures.get("profile", {}).items():
        if "device_busy_share" in report:
            totals.append((f"device busy, {worker}, {report['steps']} steps, %", 100.0 * report["device_busy_share"]))
    return f"{table(rows, ('ms', *columns))}\n{table(totals, ('', ''))}"


def notes(figures: dict[str, Any], output_len: int) -> list[str]:
    """Return caveats about the figures."""
    found = few_values_notes({label: [figures[key]] for label, key in LATENCIES.items()})
    per_chunk = figures["tokens_per_chunk"]
    if max(per_chunk.get("mean", 1.0), per_chunk.get("max", 1.0)) > _NOTABLE_TOKENS_PER_CHUNK:
        found.append("the stream packs several tokens into some chunks: ITL is between chunks, not tokens; see TPOT")
    if figures["bunched_gaps_share"] > _NOTABLE_BUNCHED_SHARE:
        found.append(
            f"{100 * figures['bunched_gaps_share']:.0f}% of chunks arrived together with the previous one: a "
            "proxy, the network or this client delays chunks; p50 of ITL means little, see TPOT and the long ITLs"
        )
    if figures["dispatch_lag_ms"].get("p99", 0.0) > NOTABLE_LAG_MS:
        found.append(
            f"requests went out late (p99 {figures['dispatch_lag_ms']['p99']:.0f} ms): the client was short of time"
        )
    for worker, report in figures.get("profile", {}).items():
        if "error" in report:
            found.append(f"no profile of {worker}: {report['error']}")
    if "profile" in figures:
        found.append("a profile was taken meanwhile: its start and end delay steps, which shows in the long ITLs")
    if figures["completed"] and figures["output_tokens"] != figures["completed"] * output_len:
        found.append(f"outputs are not all {output_len} tokens long: the endpoint ended some early")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="splitserve bench serve", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="URL of the endpoint, with or without /v1")
    add("--model", required=True, metavar="ID", help="model id, as in /v1/models")
    add("--request-rate", type=float, default=1.0, metavar="R", help="requests per second; inf sends all at once")
    add("--arrival", choices=("poisson", "fixed"), default="poisson", help="distribution of arrivals")
    add("--num-requests", type=positive, default=100, metavar="N", help="requests that are measured")
    add("--num-warmups", type=not_negative, default=1, metavar="N", help="requests before them, one after the other")
    add("--input-len", type=positive, default=512, metavar="TOKENS", help="exact length of each prompt")
    add("--output-len", type=positive, default=64, metavar="TOKENS", help="length of each answer")
    add(
        "--shared-prefix-len",
        type=not_negative,
        default=0,
        metavar="TOKENS",
        help="length of the prefix that all prompts share",
    )
    add("--seed", type=int, default=0, help="seed of prompts and arrivals")
    add("--temperature", type=finite, default=0.0, help="0 is greedy")
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="force the output length")
    add("--token-ids", action=argparse.BooleanOptionalAction, default=True, help="request return_token_ids")
    add(
        "--prompt-format", choices=("tokens", "text"), default="tokens", help="token ids, or text made with --tokenizer"
    )
    add("--tokenizer", default="", metavar="DIR", help="the model's directory; its plain tokens make the prompts")
    add("--vocab-size", type=positive, default=256, metavar="N", help="without --tokenizer: ids are drawn below N")
    add(
        "--max-concurrency",
        type=not_negative,
        default=0,
        metavar="N",
        help="maximum number of requests in flight; 0: no bound (open loop)",
    )
    add(
        "--slo",
        nargs="+",
        default=[],
        metavar="BOUND",
        help="ttft:MS tpot:MS itl:MS (a request's longest gap), for goodput",
    )
    add("--profile-steps", type=not_negative, default=0, metavar="N", help="let Splitserve's workers record N steps")
    add(
        "--profile-after",
        type=finite,
        default=2.0,
        metavar="SECONDS",
        help="time of the profile, from the load's start",
    )
    add("--timeout", type=positive_seconds, default=600.0, metavar="SECONDS", help="timeout of one request")
    add("--api-key-env", default="OPENAI_API_KEY", metavar="NAME", help="environment variable with the key")
    add_result_options(parser, always=True)
    return parser
