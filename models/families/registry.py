"""The model families that are served: one line each."""

from collections.abc import Mapping

FAMILIES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
}
"""Modules of this folder by the names that ``architectures`` of a config.json has for them."""
