"""config.json as transformers 4 and 5 write it, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from splitserve.common.errors import CheckpointError
from splitserve.models.config import RopeScaling, load_model_config

LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def write(directory: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_a_config_of_transformers_4(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, LLAMA_3_2_1B, {"eos_token_id": [128001, 128008, 128009]}))
    assert config.architecture == "llama" and config.tie_word_embeddings
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 64)
    assert config.rope_theta == 500000.0 and config.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)
    assert config.dtype == "bfloat16" and config.rms_norm_eps == 1e-5
    assert config.eos_token_ids == (128001, 128008, 128009) and config.bos_token_id == 128000


def test_the_same_config_as_transformers_5_writes_it(tmp_path: Path) -> None:
    old = load_model_config(write(tmp_path, LLAMA_3_2_1B))
    new = {
        key: value for key, value in LLAMA_3_2_1B.items() if key not in ("rope_scaling", "rope_theta", "torch_dtype")
    }
    new["rope_parameters"] = {**LLAMA_3_2_1B["rope_scaling"], "rope_theta": 500000.0}  # type: ignore[dict-item]
    new["dtype"] = "bfloat16"
    assert load_model_config(write(tmp_path, new)) == old


def test_defaults(tmp_path: Path) -> None:
    names = ("num_key_value_heads", "head_dim", "rope_scaling", "rope_theta", "torch_dtype", "eos_token_id")
    config = load_model_config(write(tmp_path, {k: v for k, v in LLAMA_3_2_1B.items() if k not in names}))
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (32, 64, 10000.0)
    assert config.rope_scaling is None and config.eos_token_ids == () and config.dtype == "float32"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["NoSuchModel"]}, "NoSuchModel.*neither Splitserve nor transformers"),
        ({"architectures": None}, "architectures is"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \('gptq'\)"),
        ({"attention_bias": 1}, "attention_bias is 1; true or false"),
        ({"logit_scale": 0.5}, "'logit_scale': unknown for this architecture"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": 8}, "2 entries for 16 layers"),
        ({"layer_types": ["sliding_attention"] * 16, "sliding_window": 8}, "only full attention"),
        ({"layer_types": ["chunked_attention"] * 16}, "layer_types has 'chunked_attention'"),
        ({"layer_types": ["linear_attention"] * 16}, "recurrent state isn't supported yet"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 4.0}}, "rope type 'mrope'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "factor is 0"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": []}}, "short_factor is"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 2.0]}}, "2 factors; 32 are needed"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 5}, "can't share 5"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"vocab_size": -3}, "vocab_size is -3"),
        ({"head_dim": 63}, "head_dim is 63"),
        ({"torch_dtype": "float8"}, "dtype is 'float8'"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_model_config(write(tmp_path, {**LLAMA_3_2_1B, **change}))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json can't be read"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        load_model_config(tmp_path)
