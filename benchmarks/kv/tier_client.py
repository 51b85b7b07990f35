"""Requests of ``splitserve bench tiers`` to its two workers, and the records of their answers."""

import asyncio
import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import uvloop

from splitserve.common.errors import SplitserveError
from splitserve.orchestration.cluster.launcher import LocalCluster

ARMS = ("without", "with")
TIMEOUT_SECONDS = 600


@dataclass(slots=True)
class Answer:
    """Answer to one request."""

    sent: float
    token_ids: list[int] = field(default_factory=list)
    # Arrivals of its chunks of tokens, in seconds of :func:`time.perf_counter`.
    arrivals: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0  # tokens of the prompt that were cached, not computed

    @property
    def ttft_seconds(self) -> float:
        return self.arrivals[0] - self.sent


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS))


async def complete(
    http: aiohttp.ClientSession,
    cluster: LocalCluster,
    prompt: list[int],
    output_tokens: int,
    on_chunk: Callable[[], None] = lambda: None,
) -> Answer:
    """Get one greedy answer, complete. Raises :class:`SplitserveError` if it failed."""
    body = {
        "model": cluster.spec.served_model_name,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    data = json.dumps(body).encode()
    answer = Answer(time.perf_counter())
    headers = {"Content-Type": "application/json"}
    async with http.post(f"{cluster.url}/v1/completions", data=data, headers=headers) as response:
        async for line in response.content:
            came = time.perf_counter()
            text = line.removeprefix(b"data: ").strip()
            if not line.startswith(b"data:") or text == b"[DONE]":
                continue
            _note(answer, json.loads(text), text, came)
            on_chunk()
    if len(answer.token_ids) != output_tokens:
        raise SplitserveError(f"a request ended after {len(answer.token_ids)} of {output_tokens} tokens")
    return answer


def _note(answer: Answer, event: dict[str, Any], data: bytes, came: float) -> None:
    if "choices" not in event:
        raise SplitserveError(f"a request failed: {data.decode()}")
    tokens = [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
    if tokens:
        answer.token_ids += tokens
        answer.arrivals.append(came)
    usage = event.get("usage")
    if usage:
        answer.num_cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]


def ask(cluster: LocalCluster, prompts: list[list[int]], output_tokens: int) -> list[Answer]:
    """Send all prompts at once, greedily, over an open connection; returns their answers. Raises
    :class:`SplitserveError` if one failed."""

    async def run_all() -> list[Answer]:
        async with session() as http:
            async with http.get(f"{cluster.url}/health") as response:
                await response.read()
            return list(await asyncio.gather(*(complete(http, cluster, prompt, output_tokens) for prompt in prompts)))

    answers: list[Answer] = uvloop.run(run_all())
    return answers


Metrics = dict[tuple[str, ...], dict[str, float]]


def metrics(url: str, kind: str) -> Metrics:
    """Read metrics by worker (``kind`` "worker"), or by worker and tier ("tier")."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as page:  # noqa: S310
        text = page.read().decode()
    found: Metrics = {}
    for name, labels, value in re.findall(rf"^splitserve_{kind}_(\w+){{(.*)}} (\S+)$", text, re.MULTILINE):
        label = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        where = (label["worker"], label["tier"]) if kind == "tier" else (label["worker"],)
        found.setdefault(where, {})[name] = float(value)
    return found


def arms_in_turn(number: int) -> Iterator[str]:
    """Yield both arms, each time in the other order."""
    yield from ARMS if number % 2 else reversed(ARMS)
