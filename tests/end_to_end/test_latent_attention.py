"""Latent attention over HTTP: hand-overs of latents, also between workers of different sizes, preemptions, prefixes."""

from collections import Counter
from pathlib import Path

import pytest

from latent_model import write_served_model
from serving import PATIENT, complete_all, greedy_bodies, transformers_greedy, wait_until_quiet
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig

MAX_TOKENS = 24
PROMPTS = [[300 + (7 * index + 3 * i) % 900 for i in range(length)] for index, length in enumerate((1, 16, 40, 150))]
LATENT_BYTES = 2 * (32 + 16) * 4  # of a token: layers, elements of a latent, float32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("checkpoints") / "tiny-deepseek")


@pytest.mark.parametrize(
    "workers",
    [
        {"num_prefill": 1, "num_decode": 1},
        {"num_prefill": 1, "num_decode": 1, "prefill_tp": 2, "decode_tp": 1},
        {"num_prefill": 1, "num_decode": 1, "prefill_tp": 1, "decode_tp": 2},
        pytest.param({"num_mixed": 1}, marks=pytest.mark.slow),
        pytest.param({"num_prefill": 2, "num_decode": 2}, marks=pytest.mark.slow),
    ],
    ids=["1P1D", "2-to-1-ranks", "1-to-2-ranks", "mixed", "2P2D"],
)
def test_tokens_are_those_of_transformers(model: Path, workers: dict[str, int]) -> None:
    """Twice, in a pool that is too small for all: blocks are found again, and sequences are preempted."""
    references = transformers_greedy(model, PROMPTS, MAX_TOKENS)
    blocks = 16  # of 16 tokens, fewer than all prompts and their answers take
    ranks = max(workers.get("prefill_tp", 1), workers.get("decode_tp", 1))
    engine = EngineConfig(
        model=str(model),
        dtype="float32",
        block_size=16,
        kv_memory_bytes=blocks * 16 * LATENT_BYTES * ranks,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        threads=1,
    )
    with LocalCluster(simple_spec(engine, port=0, protocol=PATIENT, **workers), log_level="warning") as running:
        for _ in range(2):
            answers = complete_all(running.url, greedy_bodies(model.name, PROMPTS, MAX_TOKENS), at_once=True)
            for prompt, reference, answer in zip(PROMPTS, references, answers, strict=True):
                assert answer["status"] == 200, answer
                tokens = answer["choices"][0]["token_ids"]
                assert reference.agrees(tokens), f"prompt of {len(prompt)}: {tokens}"
        metrics = wait_until_quiet(running.url)
    total = Counter[str]()
    for each in metrics.values():
        total.update(each)
    assert total["prefix_hit_tokens_total"] > 0 and total["handover_failures_total"] == 0
    if "num_mixed" in workers:
        return
    assert total["handovers_total"] == 2 * len(PROMPTS)
    block_bytes = 16 * LATENT_BYTES * workers.get("decode_tp", 1)
    assert total["handover_bytes_total"] > 0 and total["handover_bytes_total"] % block_bytes == 0
    if ranks == 1 and workers["num_decode"] == 1:
        assert total["preemptions_total"] > 0
