"""Figures of a model's steps against a device's measured ceilings. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.benchmarks.kernels.times import Span, busy_share


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
