"""Parts of the end-to-end tests: a client for many requests at once, reference tokens, worker metrics."""

import asyncio
import json
import random
import re
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import torch
from transformers import AutoModelForCausalLM, Mxfp4Config

from splitserve.protocol.cluster_report import ClusterReport
from splitserve.protocol.config import ProtocolConfig
from waiting import PATIENCE_SECONDS, wait_until

NEAR_TIE = 1e-4
PATIENT = ProtocolConfig(
    heartbeat_seconds=0.25, dead_after_seconds=30.0, lease_seconds=30.0, read_deadline_seconds=30.0
)
"""Of clusters where nobody dies: whom a busy machine holds up for a while isn't taken for dead. News come quickly."""


@dataclass(frozen=True)
class Reference:
    """Greedy tokens of transformers, and where its two best logits were closer than ``NEAR_TIE``."""

    token_ids: list[int]
    near_ties: frozenset[int]

    def agrees(self, token_ids: Sequence[int]) -> bool:
        """Equal up to the first near-tie, where rounding may decide; equal throughout if there's none."""
        for position, (ours, theirs) in enumerate(zip(token_ids, self.token_ids, strict=True)):
            if ours != theirs:
                return position in self.near_ties
        return True


def transformers_greedy(model_path: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Reference]:
    """Return the tokens of ``generate`` for each prompt alone, in float32, past end-of-sequence tokens.

    Eager attention is the definition: PyTorch's leaves out soft caps in transformers 5.17.
    """
    is_packed = "mxfp4" in (model_path / "config.json").read_text()
    options = {"quantization_config": Mxfp4Config(dequantize=True)} if is_packed else {}
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="eager", **options
    ).eval()
    references = []
    for prompt in prompts:
        result = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        top = [torch.topk(logits[0], 2).values for logits in result.logits]
        ties = frozenset(i for i, pair in enumerate(top) if float(pair[0] - pair[1]) < NEAR_TIE)
        references.append(Reference(result.sequences[0, len(prompt) :].tolist(), ties))
    return references


async def complete(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """One completion; its parsed answer, whatever its status."""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        answer: dict[str, Any] = await response.json()
        answer["status"] = response.status
        return answer


def greedy_bodies(model: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[dict[str, Any]]:
    """Requests whose answers tell token ids and the way that they took."""
    wanted = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    told = {"return_token_ids": True, "return_route": True}
    return [{"model": model, "prompt": prompt, **wanted, **told} for prompt in prompts]


def complete_all(url: str, bodies: Sequence[dict[str, Any]], *, at_once: bool) -> list[dict[str, Any]]:
    """Completions in order, one after another or all at once."""

    async def run() -> list[dict[str, Any]]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            if at_once:
                return list(await asyncio.gather(*(complete(session, url, body) for body in bodies)))
            return [await complete(session, url, body) for body in bodies]

    return asyncio.run(run())


async def storm(url: str, bodies: Sequence[dict[str, Any]], abort_share: float, concurrency: int, seed: int) -> int:
    """Stream all of ``bodies``; hang up at a random moment on a share of them. Returns how many ran to their end."""
    chosen = random.Random(seed)
    gate = asyncio.Semaphore(concurrency)

    async def one(session: aiohttp.ClientSession, body: dict[str, Any], patience: float | None) -> bool:
        async with gate:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    async with session.post(f"{url}/v1/completions", json={**body, "stream": True}) as response:
                        lines = [line async for line in response.content if line.startswith(b"data: ")]
                    return lines[-1].strip() == b"data: [DONE]" and not any(b'"error"' in line for line in lines)
            return False

    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as session:
        patiences = [chosen.uniform(0.0, 0.15) if chosen.random() < abort_share else None for _ in bodies]
        return sum(await asyncio.gather(*(one(session, b, p) for b, p in zip(bodies, patiences, strict=True))))


def worker_metrics(url: str) -> dict[str, dict[str, float]]:
    """The workers' gauges and counters by worker, from the router's page."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        text = response.read().decode()
    found: dict[str, dict[str, float]] = {}
    for name, labels, value in re.findall(r"^splitserve_worker_(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        worker = dict(re.findall(r'(\w+)="([^"]*)"', labels))["worker"]
        found.setdefault(worker, {})[name] = float(value)
    return found


def num_heartbeats(url: str) -> dict[tuple[str, int], int]:
    """Return the number of heartbeats from each incarnation that the router counts as alive."""
    with urllib.request.urlopen(f"{url}/admin/workers") as response:
        report = msgspec.json.decode(response.read(), type=ClusterReport)
    workers = [worker for worker in report.workers if worker.state != "lost"]
    return {(w.info.party.engine_id, w.info.party.incarnation): w.num_heartbeats for w in workers}


def wait_for_news(url: str) -> None:
    """Until what the router says of its workers is younger than this call.

    A heartbeat may have been in flight already; the one after it was not.
    """
    before = num_heartbeats(url)
    wait_until(
        lambda: all(now >= before.get(party, 0) + 2 for party, now in num_heartbeats(url).items()),
        "two heartbeats of each worker",
    )


def wait_until_quiet(url: str, seconds: float = PATIENCE_SECONDS) -> dict[str, dict[str, float]]:
    """Metrics once no worker holds anything for a request; fails if that doesn't come."""
    zero = (
        "blocks_referenced",
        "blocks_quarantined",
        "reads_in_flight",
        "requests_tracked",
        "num_running",
        "num_waiting",
    )
    metrics: dict[str, dict[str, float]] = {}

    def held() -> dict[str, dict[str, float]]:
        of_worker = {worker: {n: values[n] for n in zero if values[n]} for worker, values in metrics.items()}
        return {worker: values for worker, values in of_worker.items() if values}

    def is_quiet() -> bool:
        metrics.clear()
        metrics.update(worker_metrics(url))
        return not held()

    wait_for_news(url)
    wait_until(is_quiet, lambda: f"still held: {json.dumps(held())}", seconds)
    return metrics
