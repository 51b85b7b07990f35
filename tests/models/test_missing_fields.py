"""Fields that a config.json lacks: the same model as transformers' config class makes of it, or an error."""

import json
from pathlib import Path
from typing import Any

import pytest

from splitserve.common.errors import CheckpointError
from splitserve.models.config import ModelConfig, load_model_config
from splitserve.models.families.registry import FAMILIES
from splitserve.models.rope import LinearScaling, Rope

KINDS = ("architectures", "model_type")
PARTS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Cohere2VisionForConditionalGeneration": "Cohere2ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
MODEL_TYPES = {"gemma3": "gemma3_text"}


def resolved(architecture: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return all fields, as transformers' class has them if only ``given`` are given."""
    from transformers import AutoConfig

    family = FAMILIES[architecture]
    config = AutoConfig.for_model(MODEL_TYPES.get(family, family), **given)
    return {**config.to_dict(), "architectures": [architecture], **dict.fromkeys(TOKENS)}


def sizes(architecture: str) -> dict[str, Any]:
    """Return numbers that aren't the class's own, nor in the proportions of its own."""
    known = resolved(architecture, {})
    heads = known["num_attention_heads"] * (1 if "kv_lora_rank" in known else 2)
    experts = {"num_experts_per_tok": 6} if FAMILIES[architecture] == "deepseek_v2" else {}
    given = {"hidden_size": 3 * known["hidden_size"], "num_attention_heads": heads, "num_hidden_layers": 6}
    return {**given, **experts}


def load(directory: Path, raw: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(raw))
    return load_model_config(directory)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_missing_field_is_as_in_transformers_or_refused(architecture: str, tmp_path: Path) -> None:
    given = resolved(architecture, sizes(architecture))
    load(tmp_path, given)
    for name in given.keys() - KINDS:
        lacking = {key: value for key, value in given.items() if key != name}
        try:
            found = load(tmp_path, lacking)
        except CheckpointError:
            continue
        known = {key: value for key, value in lacking.items() if key not in KINDS}
        assert found == load(tmp_path, resolved(architecture, known)), name


@pytest.mark.parametrize("name", PARTS)
def test_a_part_may_leave_out_all_that_equals_its_class(name: str, tmp_path: Path) -> None:
    given, own = (resolved(PARTS[name], changed) for changed in ({"intermediate_size": 4096}, {}))
    text = {key: value for key, value in given.items() if key == "model_type" or value != own[key]}
    found = load(tmp_path, {"architectures": [name], "text_config": text})
    expected = load(tmp_path, {"architectures": [name], "text_config": given})
    assert found == expected and found.intermediate_size == 4096


def test_gemma_3_4b_as_published(tmp_path: Path) -> None:
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
        "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152},
    }  # fmt: skip
    found = load(tmp_path, whole)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (8, 4, 256)
    assert (found.vocab_size, found.max_position_embeddings, found.eos_token_ids) == (262208, 131072, (1, 106))
    assert found.tie_word_embeddings and found.rope == Rope(1e6, LinearScaling(8.0))
