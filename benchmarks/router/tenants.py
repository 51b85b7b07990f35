"""A tenant beside another one that floods the endpoint: times to first token, and refusals."""

import argparse
import asyncio
import json
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import uvloop

from splitserve.benchmarks.common.stats import percentiles_ms
from splitserve.benchmarks.router.cluster import Running, running
from splitserve.benchmarks.router.requests import Bodies, Kind
from splitserve.benchmarks.router.scenarios import until_ready
from splitserve.benchmarks.router.streams import Answer, StreamClient, open_loop
from splitserve.benchmarks.router.vocabulary import Language
from splitserve.benchmarks.serving.workload import arrival_seconds

_FIRST_TOKEN_SECONDS, _TOKEN_SECONDS = 0.5, 0.02
_OUTPUT_TOKENS = (4, 8, 16, 32, 64)
_SLOTS = 64  # so the worker serves 64 requests per second
_RATE, _FLOOD_RATE = 10.0, 190.0
_OBJECTIVE_MS = 800.0
_KEYS = {"steady": "key-of-the-steady-tenant", "flood": "key-of-the-flooding-tenant"}


def flood(language: Language, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a steady tenant alone, and beside one that sends three times what the worker can serve."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tenants.yaml"
        file.write_text(json.dumps({"tenants": [{"name": name, "keys": [key]} for name, key in _KEYS.items()]}))
        with running(
            language,
            num_prefill=0,
            num_decode=0,
            num_mixed=1,
            token_seconds=_TOKEN_SECONDS,
            first_token_seconds=_FIRST_TOKEN_SECONDS,
            max_num_seqs=_SLOTS,
            tenants_file=str(file),
            ttft_objective_ms=_OBJECTIVE_MS,
        ) as cluster:
            rows: list[dict[str, Any]] = uvloop.run(_both(cluster, language, options))
            return rows


async def _both(cluster: Running, language: Language, options: argparse.Namespace) -> list[dict[str, Any]]:
    await until_ready(cluster)
    alone = await _load(cluster, language, options, "steady", _RATE)
    flooding = asyncio.ensure_future(_load(cluster, language, options, "flood", _FLOOD_RATE))
    beside = await _load(cluster, language, options, "steady", _RATE)
    return [_row("alone", alone), _row("beside a flood", beside), _row("the flood itself", await flooding)]


async def _load(
    cluster: Running, language: Language, options: argparse.Namespace, tenant: str, rate: float
) -> list[Answer]:
    client = StreamClient(cluster.url)
    due = arrival_seconds(int(rate * options.seconds), rate, "poisson", options.seed)
    made = Bodies(language, 64, options.seed)
    random = Random(f"{tenant} {options.seed}")
    by_length = [made.of(Kind.IDS, length, salt=length) for length in _OUTPUT_TOKENS]
    headers = [("authorization", f"Bearer {_KEYS[tenant]}")]
    bodies = [next(random.choice(by_length)) for _ in due]
    requests = [client.request(body.path, body.content, headers) for body in bodies]
    answers, _ = await open_loop(lambda index: client.post(requests[index]), due)
    client.close()
    return answers


def _row(load: str, answers: list[Answer]) -> dict[str, Any]:
    statuses = Counter(answer.status for answer in answers)
    ttft = percentiles_ms([answer.first_at - answer.sent_at for answer in answers if answer.is_ok] or [0.0])
    return {
        "load": load,
        "requests": len(answers),
        "answered": statuses[200],
        "refused": statuses[429],
        "failed": len(answers) - statuses[200] - statuses[429],
        "ttft_p50_ms": ttft["p50"],
        "ttft_p99_ms": ttft["p99"],
    }
