"""``splitserve demo``: one request on a small checkpoint through both phases, with a report of where each phase ran.

Exit status 0 says that the request was really disaggregated: its KV blocks were read from another process. A silent
fallback would be an error here.
"""

import http.client
import json
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from splitserve.common.errors import SplitserveError
from splitserve.orchestration.cli.display import print_progress
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.hub import download
from splitserve.orchestration.spec.model_source import check_model_directory, is_model_id
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.orchestration.spec.sizes import format_bytes
from splitserve.protocol.config import EngineConfig

_DEFAULT_PROMPT = (
    "Prefill reads a whole prompt at once and is bound by arithmetic; decode writes one token after another and is "
    "bound by memory. On one device they disturb each other: a long prompt makes everybody wait for the next token. "
    "On two, the KV cache has to move. Tell me, in your own words, how it gets from one worker to the other."
)
_KV_MEMORY_BYTES = 256 * 2**20
_REQUEST_TIMEOUT_SECONDS = 300.0


class DemoError(SplitserveError):
    """Failure of the demo's request, or a route other than prefill, hand-over, decode."""


@dataclass(slots=True)
class ChatResult:
    """Result of a streamed chat."""

    chunk_seconds: list[float] = field(default_factory=list)
    route: dict[str, Any] = field(default_factory=dict)  # the endpoint's ``splitserve`` object
    usage: dict[str, Any] = field(default_factory=dict)  # OpenAI's object of that name


def run_demo(model: str, prompt: str, max_tokens: int, log_level: str) -> int:
    """Build a checkpoint unless ``model`` names one, serve it with 1 prefill + 1 decode worker, chat, report."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end in order, as on Ctrl-C
    with tempfile.TemporaryDirectory(prefix="splitserve-demo-") as scratch:
        if not model:
            model = _build_model(Path(scratch) / "demo-model")
        if is_model_id(model):
            model = download(model)
        check_model_directory(model)
        engine = EngineConfig(model=model, kv_memory_bytes=_KV_MEMORY_BYTES)
        spec = simple_spec(engine, num_prefill=1, num_decode=1, port=0)
        print(f"Starting a router and {spec.describe()} worker", flush=True)
        with LocalCluster(spec, show=print_progress, log_level=log_level) as cluster:
            print(f"Ready at {cluster.url}/v1. Sending a streamed chat request.\n", flush=True)
            start = time.perf_counter()
            result = chat(cluster.url, spec.served_model_name, prompt or _DEFAULT_PROMPT, max_tokens)
            print(f"\n\n{describe_result(result, start)}", flush=True)
            check_disaggregated(result)
    print("All processes ended.")
    return 0


def _build_model(directory: Path) -> str:
    from splitserve.models.demo.checkpoint import write_demo_model

    print("Building a demo checkpoint (Qwen3 architecture, random weights: expect no sense)", flush=True)
    write_demo_model(directory)
    return str(directory)


def chat(url: str, model: str, prompt: str, max_tokens: int) -> ChatResult:
    """Stream a greedy chat completion to standard output. Raises :class:`DemoError` unless it ends regularly."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_route": True,
        "return_token_ids": True,  # a token may have no text
    }
    result = ChatResult()
    for event in _post_and_stream(url, "/v1/chat/completions", body):
        if "error" in event:
            raise DemoError(f"the request failed: {event['error']}")
        result.route = event.get("splitserve") or result.route
        result.usage = event.get("usage") or result.usage
        for choice in event["choices"]:
            if choice.get("token_ids"):
                result.chunk_seconds.append(time.perf_counter())
            print(choice["delta"].get("content", ""), end="", flush=True)
    return result


def _post_and_stream(url: str, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield events of a streamed answer up to ``[DONE]``. Ignores any proxy of the environment."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(
        address.hostname or "127.0.0.1", address.port, timeout=_REQUEST_TIMEOUT_SECONDS
    )
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != HTTPStatus.OK:
            raise DemoError(f"POST {path} gave {response.status}: {response.read().decode(errors='replace')}")
        for line in response:
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))
        raise DemoError("the stream ended without [DONE]")
    except OSError as error:
        raise DemoError(f"POST {path} failed: {error}") from error
    finally:
        connection.close()


def describe_result(result: ChatResult, start_seconds: float) -> str:
    """Format the report for people. ``start_seconds``: time of the request on the clock of ``chunk_seconds``."""
    arrivals, route, usage = result.chunk_seconds, result.route, result.usage
    handover = route.get("handover")
    lines = [
        f"prefill ran on   {route.get('prefill')}: {usage.get('prompt_tokens')} prompt tokens",
        f"decode ran on    {route.get('decode')}: {usage.get('completion_tokens')} tokens",
    ]
    if handover is None:
        lines.append("hand-over        none")
    else:
        lines += [
            f"hand-over        {handover['blocks']} KV blocks, {format_bytes(handover['bytes'])}, "
            f"{handover['reads']} read{'s' * (handover['reads'] != 1)} over {handover['transport']}",
            f"  took           {1e3 * handover['seconds']:.2f} ms; decode was ready "
            f"{1e3 * handover['exposed_seconds']:.2f} ms after the last offer",
        ]
    if len(arrivals) > 1:
        mean_gap = (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1)
        lines += [
            f"first token      after {1e3 * (arrivals[0] - start_seconds):.1f} ms",
            f"second token     {1e3 * (arrivals[1] - arrivals[0]):.1f} ms later; {1e3 * mean_gap:.1f} ms per token on "
            "average",
        ]
    return "\n".join(lines)


def check_disaggregated(result: ChatResult) -> None:
    """Raise :class:`DemoError` unless the KV was read by another worker than the one that computed it."""
    route = result.route
    handover = route.get("handover") or {}
    if route.get("mode") != "disaggregated" or route.get("prefill") == route.get("decode"):
        raise DemoError(f"the request was not disaggregated: {route}")
    if not handover.get("blocks"):
        raise DemoError(f"no KV block was moved: {route}")
