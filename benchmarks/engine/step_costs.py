"""Costs of a model's steps: the least that they must read and compute, against a device's measured ceilings. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.benchmarks.kernels.kv_cases import attended_pairs
from splitserve.benchmarks.kernels.times import Span, busy_share
from splitserve.models.config import ModelConfig
from splitserve.models.declared import declare, stored_weights
from splitserve.models.layers.weight import Role


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates of the device, measured in the same run as the steps."""

    copy_bytes_per_second: float  # read and written by a large copy
    read_bytes_per_second: float  # by the fastest of several operations that only read
    gemm_flops_per_second: float  # of a large bf16 matrix product


@dataclass(frozen=True, slots=True)
class DecodeFigure:
    batch: int
    context: int
    step_ms: float
    floor_ms: float  # weights and KV read once, at the copy's bandwidth
    floor_share: float  # floor / wall time
    read_floor_ms: float  # likewise, at the read bandwidth
    read_floor_share: float
    busy_share: float  # of wall time in which a kernel or a copy ran


@dataclass(frozen=True, slots=True)
class PrefillFigure:
    tokens: int
    ms: float
    tokens_per_second: float
    gemm_share: float  # floating-point operations over time, as a share of the large product's rate


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
    return (weight_elements(config) + batch * context * kv_token_elements(config)) * itemsize


def prefill_flops(config: ModelConfig, num_tokens: int, prefix: int = 0) -> int:
    """Return the floating-point operations of a prompt's last ``num_tokens``, after ``prefix`` tokens in KV.

    Products of all layers for each token (a multiplication and an addition per weight), causal attention (products
    with keys and with values), the head for one row. Norms, rotations and activations aren't counted.
    """
    projections = [weight for weight in stored_weights(config).values() if weight.role is Role.PROJECTION]
    body = sum(math.prod(weight.shape) for weight in projections)
    head = config.vocab_size * config.hidden_size
    pairs = attended_pairs(num_tokens, prefix + num_tokens)
    attention = 2 * 2 * config.num_layers * config.num_heads * config.head_dim * pairs
    return 2 * body * num_tokens + attention + 2 * head


def decode_figure(
    batch: int, context: int, num_bytes: int, seconds: float, *, spans: Sequence[Span], ceilings: Ceilings
) -> DecodeFigure:
    """Compare a step of ``seconds`` that must read ``num_bytes`` with the ceilings; ``spans``: the device's work."""
    floor, read_floor = num_bytes / ceilings.copy_bytes_per_second, num_bytes / ceilings.read_bytes_per_second
    return DecodeFigure(
        batch,
        context,
        step_ms=1e3 * seconds,
        floor_ms=1e3 * floor,
        floor_share=floor / seconds,
        read_floor_ms=1e3 * read_floor,
        read_floor_share=read_floor / seconds,
        busy_share=busy_share(spans),
    )


def prefill_figure(num_tokens: int, flops: int, seconds: float, ceilings: Ceilings) -> PrefillFigure:
    """Compare a prefill of ``seconds`` with the rate of the large product."""
    share = flops / seconds / ceilings.gemm_flops_per_second
    return PrefillFigure(num_tokens, 1e3 * seconds, num_tokens / seconds, share)
