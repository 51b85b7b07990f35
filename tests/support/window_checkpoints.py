"""Checkpoints of models with sliding windows, made by transformers: the tokens of any mistake differ."""

import shutil
from pathlib import Path
from typing import Any

import torch

WINDOW = 40
NOISE = 0.3
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 2003,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "sliding_window": WINDOW,
}
KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
OWN_SIZES: dict[str, dict[str, Any]] = {
    "Cohere2ForCausalLM": {"layer_types": KINDS},
    "Gemma2ForCausalLM": {"layer_types": KINDS, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0},
    "Gemma3ForCausalLM": {"layer_types": KINDS, "query_pre_attn_scalar": 16},
    "GptOssForCausalLM": {
        "layer_types": KINDS,
        "head_dim": 32,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "MistralForCausalLM": {},  # every layer has the window
    "Olmo3ForCausalLM": {"layer_types": KINDS},
}


def write_window_model(path: Path, architecture: str, tokenizer: Path, **sizes: Any) -> Path:
    """Write a random checkpoint, with the tokenizer of the checkpoint ``tokenizer``. Norms and biases are noisy."""
    import transformers

    model_class = getattr(transformers, architecture)
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    config = model_class.config_class(**{**SIZES, **OWN_SIZES[architecture], **special, **sizes})
    model = model_class(config).eval()
    model.config.eos_token_id = model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("_bias"):
                parameter.add_(NOISE * torch.randn_like(parameter))
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, path / name)
    return path
