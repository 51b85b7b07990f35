"""``splitserve bench handover --served``: whole hand-overs in a running 1P1D cluster, request by request.

One request at a time, so that no other hand-over is in flight. For each prompt length twice: the whole prompt as one
chunk, after which all of its blocks have yet to move, and in chunks, whose blocks move while the next chunk is
computed. Reported are

    handover   from the first token to decode ready, both as reported to the router; with ``--second-token-at-prefill``
               from the second token, which prefill draws meanwhile
    exposed    of that, the time that decode waited for blocks after it knew of the last ones
    prefill    from the request to the first token, as the client sees it; ``exposed_share`` is of that
    GB/s       bytes over the time from the first read posted to the last one verified; only if they all move at once,
               after one chunk

With ``--against-mixed`` a mixed worker answers the same prompts beside it, and the answers that have the same tokens
are counted. With ``--ray`` the same again in a cluster on Ray, and the differences: Ray starts and watches the workers,
their data doesn't pass through it.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from splitserve.benchmarks.common.commands import ended_on_failure, run_command
from splitserve.benchmarks.common.report import table
from splitserve.benchmarks.engine.engine_options import switches
from splitserve.benchmarks.serving.load import Endpoint, run_load
from splitserve.common.errors import SplitserveError
from splitserve.models.config import load_model_config
from splitserve.models.demo.published import write_named_config
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.cluster_spec import ClusterSpec
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig

NUM_WARMUPS = 3
OUTPUT_TOKENS = 4
COMPARED_TOKENS = 32
"""Tokens of an answer that is compared with a mixed worker's."""
MODES = ("one chunk", "chunks")


def engine_of(options: argparse.Namespace, model: str, device: str, block_size: int, max_tokens: int) -> EngineConfig:
    """Return the engine's settings, with ``max_tokens`` per step. A prompt that fits is one chunk, whatever its usual
    last chunk."""
    is_one_chunk = max_tokens >= max(options.prompt_tokens)
    kv_bytes = options.kv_memory
    return EngineConfig(
        model=model,
        device=device,
        dtype=options.dtype,
        load_format="dummy",
        block_size=block_size,
        kv_memory_bytes=kv_bytes,
        max_num_seqs=8,
        max_num_batched_tokens=max_tokens,
        tail_chunk_tokens=max_tokens if is_one_chunk else EngineConfig(model="").tail_chunk_tokens,
        max_model_len=max(options.prompt_tokens) + 64,
        enable_prefix_caching=False,
        attention_backend=options.attention_backend,
        **switches(options),
    )


async def request(
    url: str, model: str, prompt: Sequence[int], num_tokens: int = OUTPUT_TOKENS
) -> tuple[dict[str, Any], list[int]]:
    """Send one greedy request; returns the router's report of its route, ``splitserve`` in its answer, and the answer's
    tokens."""
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
        "return_route": True, "return_token_ids": True,
    }  # fmt: skip
    timeout = aiohttp.ClientTimeout(total=300)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"{url}/v1/completions", json=body) as answer,
    ):
        decoded = await answer.json()
    if answer.status != 200:
        raise SplitserveError(f"a request failed: {decoded}")
    return decoded["splitserve"], decoded["choices"][0]["token_ids"]


async def handed_over(url: str, model: str, prompt: Sequence[int]) -> dict[str, Any]:
    """Send one greedy request; returns its route. Raises :class:`SplitserveError` if it wasn't handed over."""
    route, _ = await request(url, model, prompt)
    if route["mode"] != "disaggregated" or route["handover"] is None or not route["handover"]["blocks"]:
        raise SplitserveError(f"a request wasn't handed over: {route}")
    return route


def num_equal(url: str, mixed_url: str, model: str, prompts: Sequence[Sequence[int]]) -> int:
    """Count the prompts that both clusters answer with the same tokens."""
    pairs = [
        [asyncio.run(request(each, model, prompt, COMPARED_TOKENS))[1] for each in (url, mixed_url)]
        for prompt in prompts
    ]
    return sum(split == mixed for split, mixed in pairs)


def first_token_seconds(url: str, model: str, prompt: Sequence[int]) -> float:
    """Measure the time to first token of a greedy request at the client. Raises :class:`SplitserveError` if it
    failed."""
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    [record] = asyncio.run(run_load(Endpoint(url), [body], [0.0]))
    if record.error:
        raise SplitserveError(f"a request failed: {record.error}")
    return record.ttft_seconds


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@contextmanager
def running(spec: ClusterSpec, ray: str) -> Iterator[str]:
    """Run a cluster of the spec, on this machine or on the Ray cluster at ``ray``, until the block's end; yields its
    URL."""
    if not ray:
        with LocalCluster(spec, log_level="warning") as cluster:
            yield cluster.url
        return
    with tempfile.TemporaryDirectory(prefix="splitserve-bench-") as directory:
        path = Path(directory) / "spec.yaml"
        path.write_bytes(msgspec.json.encode(msgspec.to_builtins(spec)))
        with ended_on_failure(directory):
            run_command(directory, "up", "--ray", ray, "--spec", str(path), "--log-level", "warning")
            yield str(json.loads(run_command(directory, "status", "--json"))["url"])
            run_command(directory, "down")


def measure(urls: Sequence[str], model: str, num_tokens: int, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one prompt length at the first of ``urls``; answers of the second one, a mixed worker's, are compared."""
    url = urls[0]
    chosen = random.Random(f"{options.seed} {num_tokens}")
    prompts = [[chosen.randrange(10, 1000) for _ in range(num_tokens)] for _ in range(options.repeats + NUM_WARMUPS)]
    routes = [asyncio.run(handed_over(url, model, prompt)) for prompt in prompts][NUM_WARMUPS:]
    prefill = statistics.median(first_token_seconds(url, model, prompt) for prompt in prompts[:5])
    result = {"prompt_tokens": num_tokens, "mode": mode, **figures_of(routes, prefill)}
    for mixed_url in urls[1:]:
        compared = prompts[NUM_WARMUPS:]
        result |= {"compared": len(compared), "equal": num_equal(url, mixed_url, model, compared)}
    return result


def figures_of(routes: Sequence[dict[str, Any]], prefill: float) -> dict[str, Any]:
    """Reduce the router's reports of all requests to percentiles; ``prefill``: median seconds to the first token."""
    handovers = [route["handover"] for route in routes]
    latencies = [route["handover_seconds"] * 1e3 for route in routes]
    exposed = [handover["exposed_seconds"] * 1e3 for handover in handovers]
    return {
        "transport": handovers[0]["transport"],
        "bytes": handovers[0]["bytes"],
        "gb_per_second": statistics.median(handover["bytes"] / handover["seconds"] for handover in handovers) / 1e9,
        "reads": statistics.median(handover["reads"] for handover in handovers),
        "handover_p50_ms": percentile(latencies, 0.5),
        "handover_p99_ms": percentile(latencies, 0.99),
        "exposed_p50_ms": percentile(exposed, 0.5),
        "exposed_p99_ms": percentile(exposed, 0.99),
        "prefill_ms": prefill * 1e3,
        "exposed_share": percentile(exposed, 0.5) / (prefill * 1e3),
    }


def run(options: argparse.Namespace, device: str) -> Iterator[dict[str, Any]]:
    """Run a cluster per block size, pair of ranks, mode and place, with all prompt lengths in each."""
    with ExitStack() as stack:
        model = options.model
        if not model:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="splitserve-bench-"))
            model = str(write_named_config(Path(directory) / options.shape, options.shape))
        longest = load_model_config(model).max_position_embeddings
        modes = list(zip(MODES, (max(options.prompt_tokens), options.chunk_tokens), strict=True))
        for block_size, ranks, (mode, max_tokens) in itertools.product(options.block_size, options.tp, modes):
            engine = engine_of(options, model, device, block_size, min(max_tokens, longest))
            spec = simple_spec(engine, port=0, num_prefill=1, num_decode=1, prefill_tp=ranks[0], decode_tp=ranks[1])
            common = {"block_size": block_size, "prefill_tp": ranks[0], "decode_tp": ranks[1]}
            for ray in ["", options.ray] if options.ray else [""]:
                with ExitStack() as clusters:
                    urls = [clusters.enter_context(running(spec, ray))]
                    if options.against_mixed:
                        urls.append(clusters.enter_context(running(simple_spec(engine, port=0, num_mixed=1), "")))
                    for num_tokens in options.prompt_tokens:
                        result = measure(urls, spec.served_model_name, num_tokens, mode, options)
                        yield {"place": "Ray" if ray else "local", **common, **result}


def summary(results: Sequence[dict[str, Any]]) -> str:
    """Format Ray against no Ray as a table; "" if only one of them was measured."""
    names = ("block_size", "prefill_tp", "decode_tp", "prompt_tokens", "mode")
    by_case = {(*(each[name] for name in names), each["place"]): each for each in results}
    rows = []
    for (*case, place), ours in by_case.items():
        without = by_case[(*case, "local")]
        if place == "Ray":
            figures = ("handover_p50_ms", "exposed_p50_ms", "prefill_ms", "gb_per_second")
            ratios = [f"{ours[name] / without[name]:.2f}" for name in figures]
            rows.append([ours["prompt_tokens"], ours["mode"], ours["transport"], without["transport"], *ratios])
    headers = ["prompt", "mode", "transport on Ray", "without", "Ray / without: handover", "exposed", "prefill", "GB/s"]
    return table(rows, headers) if rows else ""


HEADERS = [
    *("prompt", "block", "tp", "mode", "place", "MB", "reads", "GB/s"),
    *("handover p50 ms", "p99", "exposed p50 ms", "p99", "prefill ms", "share", "same tokens"),
]


def row_of(result: dict[str, Any]) -> list[object]:
    return [
        result["prompt_tokens"],
        result["block_size"],
        f"{result['prefill_tp']}:{result['decode_tp']}",
        result["mode"],
        result["place"],
        f"{result['bytes'] / 1e6:.0f}",
        result["reads"],
        f"{result['gb_per_second']:.1f}" if result["mode"] == MODES[0] else "",
        *(f"{result[name]:.2f}" for name in ("handover_p50_ms", "handover_p99_ms", "exposed_p50_ms", "exposed_p99_ms")),
        f"{result['prefill_ms']:.1f}",
        f"{result['exposed_share']:.1%}",
        f"{result['equal']} of {result['compared']}" if "equal" in result else "",
    ]
