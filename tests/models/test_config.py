"""config.json as transformers 4 and 5 write it, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from family_runs import greedy, make_runner
from splitserve.common.errors import CheckpointError
from splitserve.models.config import RopeScaling, load_model_config
from splitserve.models.weights.loader import dtype_name

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


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"a.scale": torch.float32, "model.embed_tokens.weight": torch.bfloat16}, "bfloat16"),
        ({"a.blocks": torch.uint8, "b.weight": torch.float16}, "float16"),
        ({"a.blocks": torch.uint8}, "float32"),
        ({}, "float32"),  # random weights
    ],
)
def test_without_a_dtype_it_is_that_of_the_weights(
    tmp_path: Path, stored: dict[str, torch.dtype], expected: str
) -> None:
    """As in the config.json of openai/gpt-oss-20b."""
    path = write(tmp_path, {name: value for name, value in LLAMA_3_2_1B.items() if name != "torch_dtype"})
    if stored:
        save_file({name: torch.zeros(2, 2, dtype=dtype) for name, dtype in stored.items()}, path / "model.safetensors")
    config = load_model_config(path)
    assert config.dtype == dtype_name("auto", config, "cuda") == expected


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json can't be read"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        load_model_config(tmp_path)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("scaling", "positions", "longest"),
    [
        (YARN, 40960, 131072),  # Qwen3, as its model card says
        (YARN, 32768, 131072),  # Qwen2.5
        ({**YARN, "original_max_position_embeddings": 8192}, 40960, 40960),
        ({"rope_type": "linear", "factor": 4.0}, 40960, 40960),
    ],
)
def test_yarn_lengthens_the_context(scaling: dict[str, Any], positions: int, longest: int, tmp_path: Path) -> None:
    raw = {**LLAMA_3_2_1B, "rope_scaling": scaling, "max_position_embeddings": positions}
    assert load_model_config(write(tmp_path, raw)).max_position_embeddings == longest


def test_tokens_behind_max_position_embeddings_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    yarn = {**YARN, "original_max_position_embeddings": 24, "rope_theta": 1e4}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen3Config(
        **sizes, num_key_value_heads=2, head_dim=16, vocab_size=300, max_position_embeddings=32, rope_parameters=yarn,
        initializer_range=0.3,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    prompt = torch.arange(3, 83).unsqueeze(0)
    with torch.no_grad():
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    assert load_model_config(tmp_path).max_position_embeddings == 96
    assert greedy(make_runner(tmp_path), prompt[0].tolist(), 32, 12) == expected[0, 80:].tolist()


PHI_4_MINI = {
    "architectures": ["Phi3ForCausalLM"], "full_attn_mod": 1, "hidden_size": 3072, "interpolate_factor": 1,
    "intermediate_size": 8192, "lm_head_bias": False, "mlp_bias": False, "num_attention_heads": 24,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "partial_rotary_factor": 0.75, "vocab_size": 200064,
}  # fmt: skip
COMMAND_R7B = {
    "architectures": ["Cohere2ForCausalLM"], "cache_implementation": "hybrid", "head_dim": 128, "hidden_size": 4096,
    "intermediate_size": 14336, "layer_switch": 4, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4,
    "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
    "use_parallel_embedding": True, "vocab_size": 256000,
}  # fmt: skip


@pytest.mark.parametrize(
    ("published", "other"),
    [
        (PHI_4_MINI, {"full_attn_mod": 2}),
        (PHI_4_MINI, {"interpolate_factor": 2}),
        (COMMAND_R7B, {"layer_switch": 2}),
        (COMMAND_R7B, {"order_of_interleaved_layers": "global_attn_first"}),
        (COMMAND_R7B, {"position_embedding_type": "alibi"}),
        (COMMAND_R7B, {"rotary_pct": 0.5}),
        (COMMAND_R7B, {"use_parallel_block": False}),
    ],
)
def test_published_fields_without_effect_are_accepted_at_their_one_value(
    published: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    load_model_config(write(tmp_path, published))
    (name,) = other
    with pytest.raises(CheckpointError, match=f"{name} is .*; only .* is supported"):
        load_model_config(write(tmp_path, {**published, **other}))
