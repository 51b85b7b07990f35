"""Real workers: decode reserves room for prompts whose turn comes, and for no others; answers stay right when it lacks
room."""

import asyncio
import json
import random
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from serving import transformers_greedy, wait_until_quiet
from small_clusters import MAX_TOKENS, body, cluster
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.protocol.cluster_report import RequestTrace, RequestTraces

PROMPT_TOKENS = 150  # more than two steps
NUM_PROMPTS = 24
BLOCK_BYTES = 4 * 4 * 2 * 16 * 32 * 4  # of the tiny model, in float32
DECODE_BLOCKS = 44  # four prompts


@pytest.fixture(scope="module")
def roomy(tiny_qwen3: Path) -> Iterator[LocalCluster]:
    with cluster(tiny_qwen3, "1P1D", max_num_seqs=64) as running:
        yield running


def complete_together(running: LocalCluster, model: Path, seed: int) -> list[RequestTrace]:
    """Send prompts at once, check the answers, and return the traces."""
    chosen = random.Random(seed)
    prompts = [[chosen.randrange(300, 1500) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]

    async def complete(session: aiohttp.ClientSession, number: int) -> dict[str, Any]:
        headers = {"X-Request-Id": f"late-{seed}-{number:02}."}
        wanted = body(model, prompts[number])
        async with session.post(f"{running.url}/v1/completions", json=wanted, headers=headers) as response:
            assert response.status == 200
            answer: dict[str, Any] = await response.json()
            return answer

    async def run() -> list[dict[str, Any]]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            return list(await asyncio.gather(*(complete(session, number) for number in range(NUM_PROMPTS))))

    answers = asyncio.run(run())
    for answer, reference in zip(answers, transformers_greedy(model, prompts, MAX_TOKENS), strict=True):
        assert reference.agrees(answer["choices"][0]["token_ids"])
        assert answer["splitserve"]["mode"] == "disaggregated"
    return [trace_of(running, f"late-{seed}-{number:02}.") for number in range(NUM_PROMPTS)]


def trace_of(running: LocalCluster, request_id: str) -> RequestTrace:
    with urllib.request.urlopen(f"{running.url}/admin/requests/{request_id}") as response:
        (trace,) = msgspec.json.decode(response.read(), type=RequestTraces).traces
    return trace


def times(trace: RequestTrace) -> dict[tuple[str, str], float]:
    """Return the Unix time at which each span of a worker ended, by the worker's role and the span's name."""
    return {
        (span.process.partition("-")[0], span.name): trace.began_at + span.begin + span.seconds for span in trace.spans
    }


def test_room_is_reserved_for_the_next_prompts_only(roomy: LocalCluster, tiny_qwen3: Path) -> None:
    """All could be granted at once: there is room, and they arrive together."""
    traces = complete_together(roomy, tiny_qwen3, seed=1)
    events: list[tuple[float, int]] = []
    for trace in traces:
        ends = times(trace)
        granted, begun = ends["decode", "reserve"], ends["prefill", "prefill_queue"]
        events += [(granted, 1), (max(granted, begun), -1)]
    most = num_empty = 0
    for _, change in sorted(events):
        num_empty += change
        most = max(most, num_empty)
    # Two by the rule, one whose step is planned as its grant arrives, and one for clocks of two processes.
    assert 1 <= most <= 4, f"{most} of {NUM_PROMPTS} prompts had room on decode, and had not begun"
    num_late = sum(("prefill", "turn_wait") in times(trace) for trace in traces)
    assert num_late >= NUM_PROMPTS // 2
    for trace in traces:
        stages = trace.summary.ttft_stages
        assert stages.get("unexplained", 0.0) < 0.01, json.dumps(stages)


def test_answers_are_right_where_decode_lacks_room(tiny_qwen3: Path) -> None:
    with cluster(tiny_qwen3, "2P2D", kv_memory_bytes=DECODE_BLOCKS * BLOCK_BYTES, max_model_len=256) as running:
        complete_together(running, tiny_qwen3, seed=2)
        metrics = wait_until_quiet(running.url)
    decode = [metrics["decode-0"], metrics["decode-1"]]
    assert sum(worker["handovers_total"] for worker in decode) == NUM_PROMPTS
    assert sum(worker["handover_failures_total"] for worker in metrics.values()) == 0
    assert all(worker["blocks_referenced"] == 0 for worker in metrics.values())
