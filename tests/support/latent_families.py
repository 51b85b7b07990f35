"""Random checkpoints with latent attention for the tests of families: their sizes, and mistakes that change tokens."""

from typing import Any

from splitserve.kernels.experts.spec import GroupScore, Score

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LATENT = {
    "num_key_value_heads": 8,
    "head_dim": 16,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPS = {"n_routed_experts": 8, "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
LATENT_FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {
        **LATENT,
        **EXPERTS,
        **GROUPS,
        "num_experts_per_tok": 3,  # groups of the best experts are kept: fewer would be the same without groups
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "first_k_dense_replace": 1,
    },
    "DeepseekV3ForCausalLM": {**LATENT, **EXPERTS, **GROUPS, "first_k_dense_replace": 1},
    "Glm4MoeLiteForCausalLM": {**LATENT, **EXPERTS, **GROUPS, "v_head_dim": 48},
}
LATENT_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("DeepseekV2ForCausalLM", {"attention_scale": None}),
    ("DeepseekV2ForCausalLM", {"rotates_neighbours": False}),
    ("DeepseekV2ForCausalLM", {"experts": {"router": {"score": Score.SIGMOID}}}),
    ("DeepseekV2ForCausalLM", {"experts": {"router": {"normalised": True}}}),
    ("DeepseekV2ForCausalLM", {"experts": {"router": {"scale": 1.0}}}),
    ("DeepseekV2ForCausalLM", {"experts": {"router": {"num_groups": 1, "kept_groups": 1}}}),
    ("DeepseekV2ForCausalLM", {"experts": {"router": {"group_score": GroupScore.TOP2_SUM}}}),
    ("DeepseekV3ForCausalLM", {"attention_scale": None}),
    ("DeepseekV3ForCausalLM", {"experts": {"router": {"score": Score.SOFTMAX}}}),
    ("DeepseekV3ForCausalLM", {"experts": {"router": {"normalised": False}}}),
    ("DeepseekV3ForCausalLM", {"experts": {"router": {"scale": 1.0}}}),
    ("DeepseekV3ForCausalLM", {"experts": {"router": {"num_groups": 1, "kept_groups": 1}}}),
    ("DeepseekV3ForCausalLM", {"experts": {"router": {"group_score": GroupScore.MAX}}}),
    ("DeepseekV3ForCausalLM", {"rope_scaling": None}),
    ("DeepseekV3ForCausalLM", {"rotates_neighbours": False}),
    ("Glm4MoeLiteForCausalLM", {"attention_scale": None}),
    ("Glm4MoeLiteForCausalLM", {"experts": {"router": {"num_groups": 1, "kept_groups": 1}}}),
]
