"""Memory that a model takes beside its weights: lower bounds from its configuration alone, without torch."""

from splitserve.models.config import ModelConfig

_LOGIT_BYTES = 4


def kv_token_bytes(config: ModelConfig, element_bytes: int) -> int:
    """KV of one token, over all layers and ranks."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * element_bytes


def logits_bytes(config: ModelConfig, num_seqs: int) -> int:
    """Logits of a step that draws a token for each of ``num_seqs`` sequences."""
    return num_seqs * config.vocab_size * _LOGIT_BYTES


def activation_bytes(config: ModelConfig, num_tokens: int, element_bytes: int) -> int:
    """The widest layer's inputs and outputs in a step of ``num_tokens`` tokens."""
    return num_tokens * (2 * config.hidden_size + 2 * config.intermediate_size) * element_bytes
