"""Values of fields that a config.json lacks, as transformers' config classes have them.

transformers 4 left out of a part's config, as ``text_config``, whatever equals the class's default: families that are
such parts have the defaults of their sizes here. Of other families, only fields are here whose absence would pass
unnoticed, with another model computed. Those that :mod:`splitserve.models.config` or a family's ``features`` refuse if
they are missing, or whose default is the same there, aren't; nor are the tokens that begin and end a text, since the
classes' often are those of other vocabularies.
"""

from collections.abc import Mapping
from typing import Any

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "arcee": {"max_position_embeddings": 4096},
    "cohere2": {
        "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
        "num_attention_heads": 64, "max_position_embeddings": 8192, "sliding_window": 4096,
    },
    "deepseek_v2": {"q_lora_rank": 1536},
    "deepseek_v3": {"max_position_embeddings": 4096, "q_lora_rank": 1536, "num_nextn_predict_layers": 1},
    "gemma2": {
        "max_position_embeddings": 8192, "num_key_value_heads": 4,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "gemma3": {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072, "sliding_window": 4096,
    },
    "glm4": {"max_position_embeddings": 131072, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-07},
    "glm4_moe": {
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "first_k_dense_replace": 1, "n_shared_experts": 1,
        "num_nextn_predict_layers": 1,
    },
    "glm4_moe_lite": {
        "max_position_embeddings": 202752, "q_lora_rank": 768, "num_experts_per_tok": 4, "n_shared_experts": 1,
        "routed_scaling_factor": 1.8, "num_nextn_predict_layers": 1,
    },
    "gpt_oss": {"max_position_embeddings": 131072, "num_key_value_heads": 8},
    "minimax_m2": {"max_position_embeddings": 196608, "num_key_value_heads": 8, "rope_theta": 5e6},
    "ministral3": {
        "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-05,
    },
    "mistral": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
    },
    "mixtral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "rope_theta": 1e6},
    "nemotron": {"max_position_embeddings": 4096},
    "olmo3": {"rope_theta": 5e5, "sliding_window": 4096},
    "phi3": {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {"max_position_embeddings": 32768, "num_key_value_heads": 4},
    "seed_oss": {"max_position_embeddings": 524288, "num_key_value_heads": 8},
    "smollm3": {"max_position_embeddings": 32768, "rope_theta": 2e6},
    "starcoder2": {"max_position_embeddings": 4096, "num_key_value_heads": 2},
}  # fmt: skip


def with_class_defaults(architecture: str, raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields ``raw``, and those that it lacks with the defaults of the family's config class."""
    return {**_DEFAULTS.get(architecture, {}), **raw}
