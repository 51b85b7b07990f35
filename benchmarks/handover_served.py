"""``splitserve bench handover --served``: whole hand-overs in a running 1P1D cluster, request by request.

One request at a time, so that nothing but its own hand-over is under way. For each prompt length twice: the whole
prompt as one chunk, after which all of its blocks have yet to move, and in chunks, whose blocks move while the next
chunk is computed. Reported are

    handover   from the first token to decode ready, both as the router hears of them
    exposed    of that, what decode waited for blocks after it knew of the last ones
    prefill    from the request to the first token, as the client sees it; ``exposed_share`` is of that
"""

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp

from splitserve.benchmarks.load import Endpoint, run_load
from splitserve.config import EngineConfig
from splitserve.errors import SplitserveError
from splitserve.models.config import load_model_config
from splitserve.models.demo import write_demo_config
from splitserve.orchestration.launcher import LocalCluster
from splitserve.orchestration.shorthand import simple_spec

NUM_WARMUPS = 3
OUTPUT_TOKENS = 4
MODES = ("one chunk", "chunks")


def engine_of(options: argparse.Namespace, model: str, device: str, max_tokens: int) -> EngineConfig:
    """``max_tokens`` per step. A prompt that fits is one chunk, whatever its last one's usual size."""
    is_one_chunk = max_tokens >= max(options.prompt_tokens)
    kv_bytes = options.kv_memory_mib << 20
    return EngineConfig(
        model=model,
        device=device,
        dtype=options.dtype,
        load_format="dummy",
        block_size=options.block_size[0],
        kv_memory_bytes=kv_bytes,
        max_num_seqs=8,
        max_num_batched_tokens=max_tokens,
        tail_chunk_tokens=max_tokens if is_one_chunk else EngineConfig(model="").tail_chunk_tokens,
        max_model_len=max(options.prompt_tokens) + 64,
        enable_prefix_caching=False,
    )


async def request(url: str, model: str, prompt: Sequence[int]) -> dict[str, Any]:
    """What the router says of one greedy request's way, as ``splitserve`` in its answer."""
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True,
        "return_route": True,
    }  # fmt: skip
    timeout = aiohttp.ClientTimeout(total=300)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"{url}/v1/completions", json=body) as answer,
    ):
        decoded = await answer.json()
    if answer.status != 200:
        raise SplitserveError(f"a request failed: {decoded}")
    route: dict[str, Any] = decoded["splitserve"]
    if route["mode"] != "disaggregated" or route["handover"] is None or not route["handover"]["blocks"]:
        raise SplitserveError(f"a request wasn't handed over: {route}")
    return route


def first_token_seconds(url: str, model: str, prompt: Sequence[int]) -> float:
    body = {"model": model, "prompt": list(prompt), "max_tokens": 2, "ignore_eos": True, "return_token_ids": True}
    [record] = asyncio.run(run_load(Endpoint(url), [body | {"stream": True}], [0.0]))
    if record.error:
        raise SplitserveError(f"a request failed: {record.error}")
    return record.ttft_seconds


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(cluster: LocalCluster, num_tokens: int, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    model = cluster.spec.served_model_name
    chosen = random.Random(f"{options.seed} {num_tokens}")
    prompts = [[chosen.randrange(10, 1000) for _ in range(num_tokens)] for _ in range(options.repeats + NUM_WARMUPS)]
    routes = [asyncio.run(request(cluster.url, model, prompt)) for prompt in prompts][NUM_WARMUPS:]
    prefill = statistics.median(first_token_seconds(cluster.url, model, prompt) for prompt in prompts[:5])
    handovers = [route["handover"] for route in routes]
    latencies = [route["handover_seconds"] * 1e3 for route in routes]
    exposed = [handover["exposed_seconds"] * 1e3 for handover in handovers]
    return {
        "prompt_tokens": num_tokens,
        "mode": mode,
        "block_size": options.block_size[0],
        "transport": handovers[0]["transport"],
        "bytes": handovers[0]["bytes"],
        "reads": statistics.median(handover["reads"] for handover in handovers),
        "handover_p50_ms": percentile(latencies, 0.5),
        "handover_p99_ms": percentile(latencies, 0.99),
        "exposed_p50_ms": percentile(exposed, 0.5),
        "exposed_p99_ms": percentile(exposed, 0.99),
        "prefill_ms": prefill * 1e3,
        "exposed_share": percentile(exposed, 0.5) / (prefill * 1e3),
    }


def run(options: argparse.Namespace, device: str) -> Iterator[dict[str, Any]]:
    """A cluster per mode, all prompt lengths in each."""
    with ExitStack() as stack:
        model = options.model
        if not model:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="splitserve-bench-"))
            model = str(write_demo_config(Path(directory) / options.shape, shape=options.shape))
        longest = load_model_config(model).max_position_embeddings
        for mode, max_tokens in zip(MODES, (max(options.prompt_tokens), options.chunk_tokens), strict=True):
            engine = engine_of(options, model, device, min(max_tokens, longest))
            spec = simple_spec(engine, port=0, num_prefill=1, num_decode=1)
            with LocalCluster(spec, log_level="warning") as cluster:
                for num_tokens in options.prompt_tokens:
                    yield measure(cluster, num_tokens, mode, options)


HEADERS = ["prompt", "mode", "MB", "reads", "handover p50 ms", "p99", "exposed p50 ms", "p99", "prefill ms", "share"]


def row_of(result: dict[str, Any]) -> list[object]:
    return [
        result["prompt_tokens"],
        result["mode"],
        f"{result['bytes'] / 1e6:.0f}",
        result["reads"],
        *(f"{result[name]:.2f}" for name in ("handover_p50_ms", "handover_p99_ms", "exposed_p50_ms", "exposed_p99_ms")),
        f"{result['prefill_ms']:.1f}",
        f"{result['exposed_share']:.1%}",
    ]
