"""Clusters whose prefill worker draws the second token, too: real workers, real NIXL, the tokens of transformers."""

import random
from pathlib import Path
from typing import Any

import pytest

from serving import complete_all, transformers_greedy, wait_until_quiet
from small_clusters import BLOCK_SIZE, body, cluster
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig
from window_checkpoints import WINDOW, write_window_model

CHOSEN = random.Random(3)
LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, WINDOW - 1, WINDOW, WINDOW + 1, 4 * BLOCK_SIZE - 1, 65, 4 * BLOCK_SIZE, 150)
PROMPTS = [[CHOSEN.randrange(300, 1500) for _ in range(length)] for length in LENGTHS]
NUM_TOKENS = 12


def check(running: LocalCluster, model: Path) -> None:
    """Prompts give the right tokens, alone, when the second one comes from prefill, and all at once."""
    bodies = [body(model, prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS]
    references = transformers_greedy(model, PROMPTS, NUM_TOKENS)
    drawn = []
    for at_once in (False, True):
        answers = complete_all(running.url, bodies, at_once=at_once)
        for length, reference, answer in zip(LENGTHS, references, answers, strict=True):
            assert reference.agrees(answer["choices"][0]["token_ids"]), f"at once {at_once}, prompt of {length}"
            assert answer["splitserve"]["mode"] == "disaggregated"
        metrics = wait_until_quiet(running.url)
        drawn.append(metrics["prefill-0"]["output_tokens_total"])
    assert drawn[0] == 2 * len(PROMPTS), "two of each prompt that was alone"
    assert metrics["decode-0"]["handovers_total"] == 2 * len(PROMPTS)
    assert sum(worker["handover_failures_total"] for worker in metrics.values()) == 0
    assert sum(worker["kv_mismatches_total"] for worker in metrics.values()) == 0


def test_greedy_tokens_are_those_of_transformers(tiny_qwen3: Path) -> None:
    with cluster(tiny_qwen3, "1P1D", second_token_at_prefill=True, verify_kv=True) as running:
        check(running, tiny_qwen3)


def test_the_answers_with_windows_are_those_of_transformers(tiny_qwen3: Path, tmp_path: Path) -> None:
    model = write_window_model(tmp_path / "gemma3", "Gemma3ForCausalLM", tiny_qwen3)
    with cluster(model, "1P1D", second_token_at_prefill=True) as running:
        check(running, model)


@pytest.mark.slow
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_workers_of_different_sizes_agree_with_transformers(tiny_qwen3: Path, prefill_tp: int, decode_tp: int) -> None:
    engine = EngineConfig(
        model=str(tiny_qwen3), dtype="float32", block_size=BLOCK_SIZE, kv_memory_bytes=16 << 20, threads=1,
        max_num_batched_tokens=64, max_num_seqs=16, second_token_at_prefill=True,
    )  # fmt: skip
    spec = simple_spec(engine, port=0, num_prefill=1, num_decode=1, prefill_tp=prefill_tp, decode_tp=decode_tp)
    with LocalCluster(spec, log_level="warning") as running:
        check(running, tiny_qwen3)


REQUESTS: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 5, "top_p": 0.9},
    {"logprobs": 2},
    {"temperature": 1.0, "seed": 6, "presence_penalty": 1.5, "repetition_penalty": 1.2},
    {"response_format": {"type": "json_object"}, "ignore_eos": False},
    {"max_tokens": 1},
    {"max_tokens": 2},
    {"max_tokens": 3},
    {"n": 2, "temperature": 1.0, "seed": 7},
]


def test_every_feature_gives_the_answers_of_a_mixed_worker(tiny_qwen3: Path) -> None:
    bodies = [
        body(tiny_qwen3, PROMPTS[number % len(PROMPTS)], **{"max_tokens": NUM_TOKENS, **options})
        for number, options in enumerate(REQUESTS, 3)
    ]
    found = []
    for shape, options in (("mixed", {}), ("1P1D", {"second_token_at_prefill": True})):
        with cluster(tiny_qwen3, shape, **options) as running:
            answers = complete_all(running.url, bodies, at_once=False)
            metrics = wait_until_quiet(running.url)
        found.append([[without_rounding(choice) for choice in answer["choices"]] for answer in answers])
    assert found[0] == found[1]
    assert metrics["prefill-0"]["output_tokens_total"] == 2 * (len(REQUESTS) - 2) + 1 + 2, "one, and one of each choice"


def without_rounding(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice with its log-probabilities to a few digits: chunks of other lengths round differently."""
    scores = choice.get("logprobs")
    if scores:
        choice["logprobs"] = {**scores, "token_logprobs": [round(value, 3) for value in scores["token_logprobs"]]}
        choice["logprobs"]["top_logprobs"] = [
            {token: round(value, 3) for token, value in each.items()} for each in scores["top_logprobs"]
        ]
    return choice
