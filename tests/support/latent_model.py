"""Random checkpoints with latent attention and experts, made by transformers, with the demo's tokenizer."""

from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 2048
SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make_model(seed: int = 0, **changes: Any) -> Any:
    """Return a DeepSeek V3 of :data:`SIZES`, with noise on its norms and on the routers' correction biases."""
    import transformers

    torch.manual_seed(seed)
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**{**SIZES, **changes})).eval()
    model.config.eos_token_id = model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    corrections = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for vector in (*vectors, *corrections):
            vector.add_(0.3 * torch.randn_like(vector))
    return model


def write_served_model(path: Path) -> Path:
    """Write a checkpoint that a cluster can serve to ``path``."""
    from splitserve.models.demo.checkpoint import write_demo_model

    write_demo_model(path, architecture="llama")
    make_model().save_pretrained(path)
    return path
