"""``splitserve bench latency``: cost of the hand-over for one request on an idle system, 1P1D against a mixed worker.

Both clusters run side by side on the same checkpoint, every worker with the same number of threads; requests alternate
between them, one at a time, so each finds its cluster idle and a noisy machine disturbs both alike. Reported per prompt
length, as medians: TTFT of both, and the ratio with the least and the most of any pair; the gaps before the second and
before the third token; the steps after the second; and by how much 1P1D's two gaps exceed these. The hand-over shows in
the gap before the second token, with ``--second-token-at-prefill`` in that before the third.
"""

import argparse
import asyncio
import random
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from splitserve.benchmarks.common.arguments import not_negative, positive
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.benchmarks.common.stats import RequestRecord
from splitserve.benchmarks.engine.engine_options import add_engine_options, engine_config, model_of
from splitserve.benchmarks.serving.load import Endpoint, run_load
from splitserve.common.errors import SplitserveError
from splitserve.models.config import load_model_config
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig

OUTPUT_TOKENS = 12


def start_cluster(
    options: argparse.Namespace, model: str, num_prefill: int = 0, num_decode: int = 0, num_mixed: int = 0
) -> LocalCluster:
    engine = engine_config(
        options,
        model,
        max_num_batched_tokens=options.max_batched_tokens,
        tail_chunk_tokens=options.tail_chunk_tokens,
        enable_prefix_caching=False,
    )
    spec = simple_spec(engine, port=0, num_prefill=num_prefill, num_decode=num_decode, num_mixed=num_mixed)
    return LocalCluster(spec, log_level="warning")


def one_request(cluster: LocalCluster, prompt: list[int]) -> RequestRecord:
    """Send a single greedy request; returns its record. Raises :class:`SplitserveError` if it failed."""
    body = {
        "model": cluster.spec.served_model_name,
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,  # random weights also draw tokens without text
    }
    record = asyncio.run(run_load(Endpoint(cluster.url), [body], [0.0]))[0]
    if record.error:
        raise SplitserveError(f"a request failed: {record.error}")
    return record


def seconds_of(record: RequestRecord) -> dict[str, float]:
    """Return TTFT, the gaps before the second and the third token, and the median of the gaps after the second.

    Tokens that come in one chunk have no gap between them. Raises :class:`SplitserveError` for fewer than three tokens.
    """
    found = (record.gap_before(token) for token in range(2, record.output_tokens + 1))
    gaps = [gap for gap in found if gap is not None]
    if len(gaps) < 2:
        raise SplitserveError(f"an answer has {record.output_tokens} tokens, where {OUTPUT_TOKENS} were asked for")
    second, *later = gaps
    return {"ttft": record.ttft_seconds, "second": second, "third": later[0], "step": statistics.median(later)}


def measure(
    clusters: dict[str, LocalCluster], num_tokens: int, vocab_size: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Send requests to the clusters in turn; see :func:`figures_of`."""
    chosen = random.Random(options.seed + num_tokens)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in clusters}
    for repeat in range(options.repeats + 1):
        prompt = [chosen.randrange(vocab_size) for _ in range(num_tokens)]
        for name, cluster in clusters.items():
            sample = seconds_of(one_request(cluster, prompt))
            if repeat:  # the first pair warms up
                samples[name].append(sample)
    return figures_of(num_tokens, samples)


def figures_of(num_tokens: int, samples: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Reduce :func:`seconds_of` each request, by cluster, to medians in milliseconds; the ratio is that of pairs, with
    the least and the most of them."""
    result: dict[str, Any] = {"prompt_tokens": num_tokens}
    for name, rows in samples.items():
        for figure in ("ttft", "second", "third", "step"):
            result[f"{name}_{figure}_ms"] = statistics.median(row[figure] for row in rows) * 1e3
    pairs = zip(samples["1P1D"], samples["mixed"], strict=True)
    ratios = [split["ttft"] / mixed["ttft"] for split, mixed in pairs]
    result |= {"ttft_ratio": statistics.median(ratios), "ttft_ratios": [min(ratios), max(ratios)]}
    for which in ("second", "third"):
        beyond = [row[which] - row["step"] for row in samples["1P1D"]]
        result[f"{which}_beyond_step_ms"] = statistics.median(beyond) * 1e3
    return result


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        model = stack.enter_context(model_of(options))
        vocab_size = min(load_model_config(model).vocab_size, 2000)
        clusters = {
            "mixed": stack.enter_context(start_cluster(options, model, num_mixed=1)),
            "1P1D": stack.enter_context(start_cluster(options, model, num_prefill=1, num_decode=1)),
        }
        return [measure(clusters, num_tokens, vocab_size, options) for num_tokens in options.prompt_tokens]


COLUMNS = ("1P1D_second_ms", "1P1D_third_ms", "1P1D_step_ms", "second_beyond_step_ms", "third_beyond_step_ms")
HEADERS = ["prompt", "mixed_ttft_ms", "1P1D_ttft_ms", "ttft_ratio", "of pairs", *COLUMNS]


def row_of(result: dict[str, Any]) -> list[object]:
    least, most = result["ttft_ratios"]
    shown = [f"{result[name]:.2f}" for name in HEADERS[1:4]]
    return [result["prompt_tokens"], *shown, f"{least:.2f} to {most:.2f}", *(f"{result[name]:.2f}" for name in COLUMNS)]


def main(argv: Sequence[str]) -> int:
    parser = CommandParser(prog="splitserve bench latency", description=__doc__)
    add_engine_options(parser, shape="qwen3-0.6b", dtype="float32", kv_memory="1GiB")
    parser.add_argument(
        "--max-batched-tokens", type=not_negative, default=EngineConfig(model="").max_num_batched_tokens
    )
    parser.add_argument("--tail-chunk-tokens", type=not_negative, default=0, help="0: as in production")
    parser.add_argument("--prompt-tokens", type=positive, nargs="+", default=[128, 512])
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--seed", type=int, default=0)
    add_result_options(parser)
    options = parser.parse_args(list(argv))
    results = run(options)
    print(table([row_of(result) for result in results], HEADERS))
    keep_result("latency", argv, {"results": results}, options)
    return 0
