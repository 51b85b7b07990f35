"""Shapes of published models whose config.json says more than a demo checkpoint's: for benches and for the tuner.

Sizes alone are taken from the published files; weights are always random (``load_format`` "dummy").
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitserve.common.errors import CheckpointError
from splitserve.models.config import ModelConfig, load_model_config
from splitserve.models.demo.checkpoint import SHAPES, shape_config, write_demo_config

_QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}

_GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "sliding_window": 128,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {"quant_method": "mxfp4"},
}

_GEMMA_3_27B = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 5376,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "intermediate_size": 21504,
    "query_pre_attn_scalar": 168,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "tie_word_embeddings": True,
}

_DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 40.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
}

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "qwen3-30b-a3b-fp8": {
        **_QWEN3_30B_A3B,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    },
    "gpt-oss-20b": _GPT_OSS_20B,
    "gemma-3-27b": _GEMMA_3_27B,
    "deepseek-v2-lite": _DEEPSEEK_V2_LITE,
}
"""The fields of a config.json, by name of the shape."""

NAMES = (*SHAPES, *PUBLISHED)
"""Every shape that :func:`named_config` knows by name."""


def named_config(name: str) -> ModelConfig:
    """Return the config of one of :data:`NAMES`, or of the checkpoint in the directory ``name``.

    Raises :class:`CheckpointError` for a model that transformers' code computes: it has no declared weights.
    """
    if name in SHAPES:
        return shape_config(name)
    if name not in PUBLISHED:
        config = load_model_config(name)
        if config.transformers is not None:
            raise CheckpointError(
                f"{name}: {config.architecture} is computed by transformers' code, and declares no weights; take "
                "a model with a family of its own (docs/reference/models.md)"
            )
        return config
    return config_of({**PUBLISHED[name], "dtype": "bfloat16"})


def write_named_config(directory: str | Path, name: str) -> Path:
    """Write a checkpoint of one of :data:`NAMES` without weights, enough for ``--load-format dummy``. Returns its
    directory. Its tokenizer is a demo checkpoint's."""
    if name in SHAPES:
        return write_demo_config(directory, shape=name)
    target = write_demo_config(directory, shape="llama-3.1-8b")
    (target / "config.json").write_text(json.dumps({**PUBLISHED[name], "dtype": "bfloat16"}))
    return target


def config_of(fields: Mapping[str, Any]) -> ModelConfig:
    """Return the config that a config.json with ``fields`` describes."""
    with tempfile.TemporaryDirectory(prefix="splitserve-config-") as directory:
        (Path(directory) / "config.json").write_text(json.dumps(fields))
        return load_model_config(directory)
