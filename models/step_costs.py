"""Least costs of a model's steps: bytes that they must read, floating-point operations. Pure; from the declaration."""

import math

from splitserve.models.config import ModelConfig
from splitserve.models.declared import declare, stored_weights
from splitserve.models.layers.weight import Role
from splitserve.models.weights.shard import Kept


def weight_elements(config: ModelConfig) -> int:
    """Return the number of weights that a step reads: all but the embedding, unless that is the head as well."""
    weights = stored_weights(config).values()
    read = [weight for weight in weights if weight.role is not Role.EMBEDDING or config.tie_word_embeddings]
    return sum(math.prod(weight.shape) for weight in read)


def kv_token_elements(config: ModelConfig) -> int:
    """Return the elements of one token's keys and values in all layers."""
    return declare(config).kv_elements


def decode_bytes(config: ModelConfig, batch: int, context: int, itemsize: int) -> int:
    """Return the bytes of weights and KV that a decode step of ``batch`` sequences must read."""
    packed = sum(math.prod(weight.shape) for weight in stored_weights(config).values() if weight.kept is Kept.BYTES)
    elements = weight_elements(config) - packed + batch * context * kv_token_elements(config)
    return packed + elements * itemsize


def token_flops(config: ModelConfig) -> int:
    """Return the operations of all layers' products for one token: a multiplication and an addition per weight.

    Of experts, those count that a token has.
    """
    counts = dict.fromkeys((Role.PROJECTION, Role.EXPERT), 0)
    for weight in stored_weights(config).values():
        if weight.role in counts:
            counts[weight.role] += math.prod(weight.shape)
        elif weight.role is Role.EXPERT_BLOCKS:
            counts[Role.EXPERT] += 2 * math.prod(weight.shape)
    if config.experts is not None:
        router = config.experts.router
        counts[Role.EXPERT] = counts[Role.EXPERT] * router.top_k // router.num_experts
    return 2 * sum(counts.values())


def head_flops(config: ModelConfig) -> int:
    """Return the operations of the language-model head for one row."""
    return 2 * config.vocab_size * config.hidden_size


def pair_flops(config: ModelConfig) -> int:
    """Return the operations of attention for one pair of tokens in all layers: products with keys and with values.

    Latents are taken as expanded to them.
    """
    if (latent := config.latent) is not None:
        return 2 * config.num_layers * config.num_heads * (latent.query_dim + latent.value_dim)
    return 2 * 2 * config.num_layers * config.num_heads * config.head_dim


def attended_pairs(query_len: int, context: int) -> int:
    """Count the (query, key) pairs of causal attention, the queries being the last of the context."""
    return query_len * (2 * context - query_len + 1) // 2


def prefill_flops(config: ModelConfig, num_tokens: int, prefix: int = 0) -> int:
    """Return the floating-point operations of a prompt's last ``num_tokens``, after ``prefix`` tokens in KV.

    Norms, rotations and activations aren't counted; the head is computed for one row.
    """
    attention = pair_flops(config) * attended_pairs(num_tokens, prefix + num_tokens)
    return token_flops(config) * num_tokens + attention + head_flops(config)
