"""Least costs of a model's steps: bytes that they must read, floating-point operations. Pure; from the declaration."""

import math

from splitserve.models.config import ModelConfig
from splitserve.models.declared import kv_elements, stored_weights
from splitserve.models.layers.weight import Role, Weight
from splitserve.models.weights.shard import Kept


def weight_elements(config: ModelConfig) -> int:
    """Return the number of weights that a step reads: all but the embedding, unless that is the head as well."""
    if config.transformers is not None:
        return config.transformers.read_elements
    return sum(math.prod(weight.shape) for weight in _read_weights(config))


def kv_token_elements(config: ModelConfig) -> int:
    """Return the elements of one token's keys and values in all layers."""
    return kv_elements(config)


def decode_bytes(config: ModelConfig, batch: int, context: int, itemsize: int, experts_hit: float | None = None) -> int:
    """Return the bytes of weights and KV that a decode step of ``batch`` sequences must read.

    ``experts_hit``: experts that any token of the step has, in the mean over layers; None: all. Scales of weights in
    FP8 aren't counted. A layer with a window reads no more than that.
    """
    if config.transformers is not None:
        return (weight_elements(config) + batch * context * kv_token_elements(config)) * itemsize
    share = 1.0
    if experts_hit is not None and config.experts is not None:
        share = experts_hit / config.experts.router.num_experts
    read = _read_weights(config)
    of_experts = sum(_stored_bytes(config, weight, itemsize) for weight in read if weight.expert is not None)
    others = sum(_stored_bytes(config, weight, itemsize) for weight in read if weight.expert is None)
    return others + round(share * of_experts) + batch * _kv_bytes(config, context, itemsize)


def _read_weights(config: ModelConfig) -> list[Weight]:
    """Return the weights that a step reads: all but the embedding, unless that is the head as well."""
    weights = stored_weights(config).values()
    return [weight for weight in weights if weight.role is not Role.EMBEDDING or config.tie_word_embeddings]


def _stored_bytes(config: ModelConfig, weight: Weight, itemsize: int) -> int:
    is_byte = weight.kept is Kept.BYTES or (config.fp8 is not None and weight.may_be_fp8)
    return math.prod(weight.shape) * (1 if is_byte else itemsize)


def _kv_bytes(config: ModelConfig, context: int, itemsize: int) -> int:
    """Return the bytes of one sequence's KV that a token attends to."""
    seen = sum(min(context, config.layer(index).window or context) for index in range(config.num_layers))
    return kv_token_elements(config) * seen // config.num_layers * itemsize


def token_flops(config: ModelConfig) -> int:
    """Return the operations of all layers' products for one token: a multiplication and an addition per weight.

    Of experts, those count that a token has.
    """
    if config.transformers is not None:
        return 2 * config.transformers.token_elements
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


def attended_pairs(query_len: int, context: int, window: int | None = None) -> int:
    """Count the (query, key) pairs of causal attention, the queries being the last of the context."""
    pairs = query_len * (2 * context - query_len + 1) // 2
    if window is not None:
        most = max(0, context - window)  # keys beyond the last query's window
        least = max(0, most - query_len)  # beyond that of the query before the first
        pairs -= (most * (most + 1) - least * (least + 1)) // 2
    return pairs


def prefill_flops(config: ModelConfig, num_tokens: int, prefix: int = 0) -> int:
    """Return the floating-point operations of a prompt's last ``num_tokens``, after ``prefix`` tokens in KV.

    Norms, rotations and activations aren't counted; the head is computed for one row.
    """
    windows = [config.layer(index).window for index in range(config.num_layers)]
    pairs = sum(attended_pairs(num_tokens, prefix + num_tokens, window) for window in windows)
    attention = pair_flops(config) * pairs // config.num_layers
    return token_flops(config) * num_tokens + attention + head_flops(config)
