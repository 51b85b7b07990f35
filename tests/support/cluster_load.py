"""Load on clusters that change under it: streams of requests with known tokens. Not a test module."""

import asyncio
import json
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from serving import complete_all, transformers_greedy

MAX_TOKENS = 24
REQUEST_SECONDS = 60.0
PAUSE_SECONDS = 0.3
"""Pause of a stream between two requests: a request takes longer, so that some are always in flight, but workers that
start meanwhile find the cores free for a part of the time."""
PROMPTS = [[300 + (7 * index + 3 * i) % 900 for i in range(20 + 13 * index)] for index in range(6)]


def bodies(model: str) -> list[dict[str, Any]]:
    """Requests that say which tokens they got, and where."""
    fixed = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return [{"model": model, "prompt": prompt, "return_route": True, **fixed} for prompt in PROMPTS]


def right_tokens(url: str, model: str, checkpoint: Path) -> list[list[int]]:
    """Return the cluster's answers to single requests, compared with transformers."""
    answers = complete_all(url, bodies(model), at_once=False)
    token_ids = [answer["choices"][0]["token_ids"] for answer in answers]
    for reference, ours in zip(transformers_greedy(checkpoint, PROMPTS, MAX_TOKENS), token_ids, strict=True):
        assert reference.agrees(ours)
    return token_ids


@dataclass
class Load:
    """The outcome of a load. ``problems`` holds every request that didn't get exactly its tokens."""

    num_done: int = 0
    problems: list[str] = field(default_factory=list)
    workers: set[str] = field(default_factory=set)


@contextmanager
def steady_load(
    url: str, requests: Sequence[dict[str, Any]], expected: Sequence[list[int]], streams: int = 4
) -> Iterator[Load]:
    """Streamed completions of random ``requests``, ``streams`` at a time, while the block runs; then all end."""
    load, stop = Load(), threading.Event()
    thread = threading.Thread(
        target=lambda: asyncio.run(_run(url, requests, expected, streams, load, stop)), name="steady-load", daemon=True
    )
    thread.start()
    try:
        yield load
    finally:
        stop.set()
        thread.join(REQUEST_SECONDS + 10)
    assert not thread.is_alive(), f"{streams} streams to {url} didn't end; {load}"


async def _run(
    url: str,
    requests: Sequence[dict[str, Any]],
    expected: Sequence[list[int]],
    streams: int,
    load: Load,
    stop: threading.Event,
) -> None:
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)

    async def stream(session: aiohttp.ClientSession, seed: int) -> None:
        chosen = random.Random(seed)
        while not stop.is_set():
            index = chosen.randrange(len(requests))
            try:
                problem = await _one(session, url, requests[index], expected[index], load)
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = f"{type(error).__name__}: {error}"
            load.num_done += 1
            if problem:
                load.problems.append(problem)
            await asyncio.sleep(PAUSE_SECONDS)

    async with aiohttp.ClientSession(timeout=timeout) as session:
        await asyncio.gather(*(stream(session, seed) for seed in range(streams)))


async def _one(session: aiohttp.ClientSession, url: str, body: dict[str, Any], expected: list[int], load: Load) -> str:
    token_ids: list[int] = []
    async with session.post(f"{url}/v1/completions", json={**body, "stream": True}) as response:
        if response.status != 200:
            return f"status {response.status}: {(await response.text())[:200]}"
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return f"after {len(token_ids)} tokens: {event['error']}"
            token_ids += event["choices"][0].get("token_ids") or []
            route = event.get("splitserve") or {}
            load.workers |= {name for name in (route.get("prefill"), route.get("decode")) if name}
    return "" if token_ids == expected else f"got {token_ids}, expected {expected}"
