"""Second tokens from prefill on a GPU, with CUDA graphs and a hand-over within it: the tokens of a mixed worker."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from serving import complete_all, wait_until_quiet
from splitserve.models.demo.checkpoint import write_demo_model
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig

pytestmark = pytest.mark.gpu

LENGTHS = (1, 15, 16, 17, 64, 65, 300, 700)
NUM_TOKENS = 24


def answers_of(model: Path, *, second: bool, **shape: int) -> list[dict[str, Any]]:
    """Return the answers to each prompt alone, then to all at once, of workers that share the GPU."""
    config = EngineConfig(
        model=str(model), device="cuda", dtype="float32", block_size=16, kv_memory_bytes=256 << 20, max_num_seqs=16,
        max_num_batched_tokens=256, enable_prefix_caching=False, second_token_at_prefill=second, verify_kv=second,
    )  # fmt: skip
    spec = simple_spec(config, port=0, **shape)
    spec = msgspec.structs.replace(spec, devices=msgspec.structs.replace(spec.devices, share=True))
    bodies: list[dict[str, Any]] = [
        {"model": model.name, "prompt": [300 + (7 * index + 3 * at) % 900 for at in range(length)], "temperature": 0,
         "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True, "return_route": True}
        for index, length in enumerate(LENGTHS)
    ]  # fmt: skip
    with LocalCluster(spec, log_level="info") as running:
        answers = complete_all(running.url, bodies, at_once=False)
        if second:
            drawn = wait_until_quiet(running.url)["prefill-0"]["output_tokens_total"]
            assert drawn == 2 * len(bodies), "two of each prompt that was alone"
        answers += complete_all(running.url, bodies, at_once=True)
        metrics = wait_until_quiet(running.url)
        assert sum(worker["handover_failures_total"] for worker in metrics.values()) == 0
        assert sum(worker["kv_mismatches_total"] for worker in metrics.values()) == 0
    return answers


def test_tokens_are_those_of_a_mixed_worker(tmp_path: Path) -> None:
    model = write_demo_model(tmp_path / "tiny", architecture="qwen3")
    expected = answers_of(model, second=False, num_mixed=1)
    found = answers_of(model, second=True, num_prefill=1, num_decode=1)
    for answer, reference in zip(found, expected, strict=True):
        assert answer["splitserve"]["mode"] == "disaggregated"
        assert answer["choices"][0]["token_ids"] == reference["choices"][0]["token_ids"]
