"""Two kinds of models on 1P1D that no other cluster of the tests serves: a router with a softmax over all experts, and
transformers' code over our attention.

Four more kinds are in other modules here: full attention (Qwen 3), windows (Gemma 3), sinks with experts in MXFP4
(GPT-OSS), latents with groups of experts (DeepSeek V3). `scripts/long-tests models` has every architecture.
"""

from pathlib import Path

import pytest

from model_matrix import Matrix
from transformers_models import write_transformers_model


@pytest.mark.parametrize(
    ("architecture", "backend"), [("Qwen3MoeForCausalLM", "native"), ("StableLmForCausalLM", "transformers")]
)
def test_tokens_are_those_of_transformers(architecture: str, backend: str, tiny_qwen3: Path, tmp_path: Path) -> None:
    matrix = Matrix(write_transformers_model(tmp_path / "model", architecture, tiny_qwen3), backend)
    matrix.run("1P1D")
    assert matrix.problems == []
    assert matrix.figures["hand-overs"] == matrix.figures["requests"] > 0
