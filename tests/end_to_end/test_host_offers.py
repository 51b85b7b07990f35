"""Real workers, real NIXL: decode doesn't read what is offered, and prefill goes on all the same."""

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from serving import complete_all, storm, transformers_greedy, wait_until_quiet, worker_metrics
from small_clusters import BLOCK_SIZE, body
from splitserve.orchestration.cluster.launcher import Entries, LocalCluster
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig
from waiting import wait_until

NUM_PROMPTS = 8
PROMPT_TOKENS = 150  # nine full blocks, and one that isn't
PREFILL_BLOCKS = 24  # two prompts
BLOCK_BYTES = 4 * 4 * 2 * BLOCK_SIZE * 32 * 4  # of the tiny model, in float32
MAX_TOKENS = 12


@contextmanager
def cluster(model: Path, num_slots: int, patch: pytest.MonkeyPatch, gate: Path | None = None) -> Iterator[LocalCluster]:
    """Decode has room for everything; it begins to read when the gate is there, or late."""
    patch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"), prepend=":")
    patch.setenv("SPLITSERVE_TEST_PREFILL_BYTES", str(PREFILL_BLOCKS * BLOCK_BYTES))
    patch.setenv("SPLITSERVE_TEST_HOST_BYTES", str(num_slots * BLOCK_BYTES))
    if gate is not None:
        patch.setenv("SPLITSERVE_TEST_GATE", str(gate))
    engine = EngineConfig(
        model=str(model), dtype="float32", block_size=BLOCK_SIZE, kv_memory_bytes=64 << 20, max_model_len=256,
        max_num_batched_tokens=64, tail_chunk_tokens=16,
    )  # fmt: skip
    spec = simple_spec(engine, port=0, num_prefill=1, num_decode=1)
    with LocalCluster(spec, log_level="warning", entries=Entries(worker="holding_worker:run_worker")) as running:
        yield running


@pytest.mark.timeout(300)
def test_prefill_goes_on_while_decode_reads_nothing(
    tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool has room for two prompts. Reads that decode has posted before blocks move find other content there when
    they begin at last, and are repeated from the host tier."""
    chosen = random.Random(5)
    prompts = [[chosen.randrange(300, 1500) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]
    gate = tmp_path / "gate"
    bodies = [body(tiny_qwen3, prompt, max_tokens=MAX_TOKENS) for prompt in prompts]
    answers: list[dict[str, Any]] = []
    with cluster(tiny_qwen3, 200, monkeypatch, gate) as running:
        client = threading.Thread(target=lambda: answers.extend(complete_all(running.url, bodies, at_once=True)))
        client.start()
        try:
            before = wait_until_prefilled(running.url, NUM_PROMPTS * PROMPT_TOKENS)
        finally:
            gate.touch()
            client.join()
        metrics = wait_until_quiet(running.url)
    assert before["decode-0"]["handovers_total"] == 0
    assert before["prefill-0"]["host_offered_blocks_total"] >= NUM_PROMPTS * 10 - PREFILL_BLOCKS
    assert before["prefill-0"]["blocks_referenced"] <= PREFILL_BLOCKS
    assert [answer["status"] for answer in answers] == [200] * NUM_PROMPTS
    for answer, reference in zip(answers, transformers_greedy(tiny_qwen3, prompts, MAX_TOKENS), strict=True):
        assert reference.agrees(answer["choices"][0]["token_ids"])
        assert answer["splitserve"]["mode"] == "disaggregated"
    decode = metrics["decode-0"]
    assert decode["handovers_total"] == NUM_PROMPTS
    assert sum(worker["handover_failures_total"] for worker in metrics.values()) == 0
    assert decode["other_copies_total"] == 0, "each in one hand-over"
    assert decode["reads_repeated_total"] > 0, "what was posted before blocks moved"


def wait_until_prefilled(url: str, num_tokens: int) -> dict[str, dict[str, float]]:
    metrics: dict[str, dict[str, float]] = {}

    def is_prefilled() -> bool:
        metrics.update(worker_metrics(url))
        return metrics.get("prefill-0", {}).get("prompt_tokens_total", 0) >= num_tokens

    wait_until(is_prefilled, lambda: f"prefill has come no further: {metrics}")
    return metrics


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_storm_on_late_reads_and_a_small_tier_leaves_nothing(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks move in the middle of all that can end a request; then the tokens are right, and every count is back."""
    chosen = random.Random(6)
    shared = [chosen.randrange(300, 1500) for _ in range(2 * BLOCK_SIZE)]
    lengths = [1, 15, 33, 64, 100, 120, 150, 190]
    prompts = [
        [*shared[: 16 * (n % 3)], *(chosen.randrange(300, 1500) for _ in range(m))] for n, m in enumerate(lengths)
    ]
    bodies = [body(tiny_qwen3, prompt, max_tokens=MAX_TOKENS) for prompt in prompts]
    with cluster(tiny_qwen3, 60, monkeypatch) as running:
        others = [body(tiny_qwen3, [400 + n, *prompts[n % len(prompts)]], max_tokens=4) for n in range(60)]
        finished = asyncio.run(storm(running.url, others, 1 / 3, 24, seed=3))
        answers = complete_all(running.url, bodies * 2, at_once=True)
        metrics = wait_until_quiet(running.url)
    assert finished > 30
    references = transformers_greedy(tiny_qwen3, prompts, MAX_TOKENS)
    for answer, reference in zip(answers, references * 2, strict=True):
        assert answer["status"] == 200, answer
        assert reference.agrees(answer["choices"][0]["token_ids"])
    prefill = metrics["prefill-0"]
    assert prefill["host_offered_blocks_total"] > 0
    assert prefill["blocks_free"] + prefill["blocks_cached"] == PREFILL_BLOCKS
    assert sum(worker["handover_failures_total"] for worker in metrics.values()) == 0
