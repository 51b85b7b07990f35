"""The model families that are served: one line each."""

from collections.abc import Mapping

FAMILIES: Mapping[str, str] = {
    "ArceeForCausalLM": "arcee",
    "Cohere2ForCausalLM": "cohere2",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "LlamaForCausalLM": "llama",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Ministral3ForCausalLM": "ministral3",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "NemotronForCausalLM": "nemotron",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "Starcoder2ForCausalLM": "starcoder2",
}
"""Modules of this folder by the names that ``architectures`` of a config.json has for them."""

TEXT_OF: Mapping[str, str] = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Kimi_K25ForConditionalGeneration": "DeepseekV3ForCausalLM",
}
"""Architectures with other parts, vision for one, and the one of their text model, which is what is served."""

TEXT_BY_TYPE: Mapping[str, Mapping[str, str]] = {
    "Cohere2VisionForConditionalGeneration": {"cohere2": "Cohere2ForCausalLM"},
    "Mistral3ForConditionalGeneration": {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
}
"""Such architectures whose text model has the architecture that ``text_config.model_type`` names."""

WITH_TEXT = frozenset((*TEXT_OF, *TEXT_BY_TYPE))
"""All architectures whose text model alone is served."""
