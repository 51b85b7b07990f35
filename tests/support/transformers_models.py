"""Random checkpoints of architectures that transformers has: the tokens of any mistake of attention differ."""

import shutil
from pathlib import Path
from typing import Any

WINDOW = 21
NOISE = 0.3
BIAS = 0.1  # larger ones outweigh what attention adds
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2003,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWS = {"sliding_window": WINDOW, "layer_types": KINDS}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {**MOE, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
# What isn't small, or is off, by default
OTHERS: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {**WINDOWS, **MOE, "num_experts": 8, "num_dense_layers": 1, "head_dim": 16},
    "ApertusForCausalLM": {},
    "AriaTextForCausalLM": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "BioGptForCausalLM": {},
    "BitNetForCausalLM": {},
    "CohereForCausalLM": {},
    "Cohere2MoeForCausalLM": {**WINDOWS, **MOE, "num_experts": 4, "head_dim": 16},
    "CwmForCausalLM": {**WINDOWS, "head_dim": 16},
    "Dots1ForCausalLM": {**ROUTED, "head_dim": 16, "n_shared_experts": 1},
    "Ernie4_5ForCausalLM": {"head_dim": 16},
    "Ernie4_5_MoeForCausalLM": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "Exaone4ForCausalLM": {**WINDOWS, "head_dim": 16},
    "ExaoneMoeForCausalLM": {**WINDOWS, **MOE, "num_experts": 8, "head_dim": 16},
    "FlexOlmoForCausalLM": {**MOE, "num_experts": 4},
    "FlintForCausalLM": {**WINDOWS, "head_dim": 16},
    "GemmaForCausalLM": {"head_dim": 16},
    "GlmForCausalLM": {"head_dim": 16},
    "GPT2LMHeadModel": {},
    "GPTBigCodeForCausalLM": {},
    "GPTNeoXForCausalLM": {},
    "GraniteMoeForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GraniteMoeSharedForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
    "GraniteMoeSWAForCausalLM": {**WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GraniteSWAForCausalLM": WINDOWS,
    "HeliumForCausalLM": {"head_dim": 16},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 16},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "HYV3ForCausalLM": {**MOE, "num_experts": 4, "head_dim": 16},
    "HyperCLOVAXForCausalLM": {},
    "Jais2ForCausalLM": {"head_dim": 16},
    "Kolibri1ForCausalLM": {**WINDOWS, "head_dim": 16},
    "LagunaForCausalLM": {"head_dim": 16},
    "MellumForCausalLM": {**WINDOWS, "head_dim": 16},
    "MiniCPM3ForCausalLM": LATENT,
    "MinistralForCausalLM": {**WINDOWS, "head_dim": 16},
    "ModernBertDecoderForCausalLM": {},
    "NanoChatForCausalLM": {"head_dim": 16},
    "OlmoForCausalLM": {},
    "OlmoeForCausalLM": {"num_experts": 8, "num_experts_per_tok": 2},
    "OPTForCausalLM": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "PersimmonForCausalLM": {"num_key_value_heads": 4},
    "PhiForCausalLM": {},
    "PhimoeForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "Qwen2MoeForCausalLM": {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "SolarOpenForCausalLM": {**ROUTED, "head_dim": 16, "n_shared_experts": 1},
    "StableLmForCausalLM": {},
    "VaultGemmaForCausalLM": {**WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0},
    "YoutuForCausalLM": LATENT,
}
"""Architectures without a family of ours."""

NATIVE: dict[str, dict[str, Any]] = {
    "ArceeForCausalLM": {},
    "Cohere2ForCausalLM": {**WINDOWS, "head_dim": 16},
    "DeepseekV2ForCausalLM": {**LATENT, **ROUTED, "head_dim": 16, "topk_method": "greedy"},
    "DeepseekV3ForCausalLM": {**LATENT, **ROUTED, "head_dim": 16},
    "Gemma2ForCausalLM": {**WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0},
    "Gemma3ForCausalLM": {**WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 24},
    "Glm4ForCausalLM": {"head_dim": 16},
    "Glm4MoeForCausalLM": {**ROUTED, "head_dim": 16},
    "Glm4MoeLiteForCausalLM": {**LATENT, **ROUTED},
    "GptOssForCausalLM": {**WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "GraniteForCausalLM": {},
    "LlamaForCausalLM": {},
    "MiniMaxM2ForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "Ministral3ForCausalLM": {"sliding_window": WINDOW, "head_dim": 16},
    "MistralForCausalLM": {"sliding_window": WINDOW},
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "NemotronForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "Olmo3ForCausalLM": WINDOWS,
    "Phi3ForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 16},
    "Qwen3MoeForCausalLM": {**MOE, "num_experts": 4, "head_dim": 16},
    "SeedOssForCausalLM": {"head_dim": 16},
    "SmolLM3ForCausalLM": {},
    "Starcoder2ForCausalLM": {"sliding_window": WINDOW},
}
"""Architectures that have a family, too."""

EVERY = {**OTHERS, **NATIVE}
CHANGED = {"CodeGenForCausalLM": {"rotary_dim": 8}}
"""Architectures whose attention goes through transformers' interface in newer versions of it only."""
_NO_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # that a class needs some of


def make_model(architecture: str, **changes: Any) -> Any:
    """Return a random model of transformers. Matrices are large, all else is noisy."""
    import torch
    import transformers

    model_class = getattr(transformers, architecture)
    config = model_class.config_class(
        **{**SIZES, **dict.fromkeys(_NO_TOKENS, 0), **{**EVERY, **CHANGED}[architecture], **changes}
    )
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                noise = BIAS if name.endswith("bias") else NOISE
                parameter.add_(noise * torch.randn_like(parameter))
            else:
                parameter.normal_(0.0, 1.5 / min(parameter.shape[-2:]) ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(NOISE * torch.randn_like(buffer))
    return model


def write_transformers_model(path: Path, architecture: str, tokenizer: Path | None = None, **changes: Any) -> Path:
    """Write a random checkpoint to ``path``, with the tokenizer of the checkpoint ``tokenizer``."""
    make_model(architecture, **changes).save_pretrained(path)
    if tokenizer is not None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer / name, path / name)
    return path
