"""Memory that a model takes beside its weights: lower bounds from its declaration alone, without torch."""

from splitserve.models.config import ModelConfig
from splitserve.models.declared import declare, kv_elements
from splitserve.models.layers.weight import Role

_LOGIT_BYTES = 4


def kv_token_bytes(config: ModelConfig, element_bytes: int, num_ranks: int = 1) -> int:
    """Return the bytes of one token's keys and values, over all layers and ranks. Each rank has all of a latent."""
    copies = num_ranks if config.latent is not None else 1
    return kv_elements(config) * element_bytes * copies


def logits_bytes(config: ModelConfig, num_seqs: int) -> int:
    """Return the bytes of a step's logits that draws a token for each of ``num_seqs`` sequences."""
    return num_seqs * config.vocab_size * _LOGIT_BYTES


def activation_bytes(config: ModelConfig, num_tokens: int, element_bytes: int) -> int:
    """Return the bytes of the residual and of the widest product's input and output, for ``num_tokens`` tokens."""
    if config.transformers is not None:
        return num_tokens * (config.hidden_size + config.transformers.widest) * element_bytes
    stacks = [stack for stack in declare(config).stacks() if stack[0].role is Role.PROJECTION]
    widths = [stack[0].shape[1] + sum(weight.num_rows for weight in stack) for stack in stacks]
    if (experts := config.experts) is not None:
        widths.append(config.hidden_size + 2 * experts.inner_size * experts.router.top_k)
    return num_tokens * (config.hidden_size + max(widths)) * element_bytes
