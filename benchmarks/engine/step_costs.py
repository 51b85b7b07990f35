"""Figures of a model's steps against a device's measured ceilings. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

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
    busy_share: float  # of wall time in which a kernel or a copy ran; 0: not measured
    sampling: str = "greedy"  # a name of splitserve.benchmarks.engine.sampling_modes
    least_ms: float = 0.0  # of all rounds; step_ms is the median's
    most_ms: float = 0.0
    beyond_greedy: float = 0.0  # share of the greedy step of the same round: median
    experts_hit: float | None = None  # per layer, which the floors count; None: no experts
    parts_ms: float = 0.0  # a dense model's products alone, median, and its KV at the copy's bandwidth; 0: not measured
    parts_share: float = 0.0  # parts / wall time of the same round: median


@dataclass(frozen=True, slots=True)
class PrefillFigure:
    tokens: int
    ms: float
    tokens_per_second: float
    gemm_share: float  # floating-point operations over time, as a share of the large product's rate
    least_ms: float = 0.0
    most_ms: float = 0.0
    beside_share: float = 0.0  # of the product's rate in the same rounds, for as long as the prefills: median; 0: no


@dataclass(frozen=True, slots=True)
class MixedFigure:
    """A step in which ``batch`` sequences of ``context`` tokens decode beside part of a prompt."""

    batch: int
    context: int
    prompt_tokens: int
    step_ms: float
    least_ms: float  # of all rounds; step_ms is the median's
    most_ms: float


def mixed_figure(batch: int, context: int, prompt_tokens: int, seconds: Sequence[float]) -> MixedFigure:
    """Return the figure of steps that decode beside ``prompt_tokens``; ``seconds``: of a step in each round."""
    of_rounds = (median(seconds), min(seconds), max(seconds))
    return MixedFigure(batch, context, prompt_tokens, *(1e3 * value for value in of_rounds))


def decode_figure(
    batch: int,
    context: int,
    num_bytes: int,
    seconds: Sequence[float],
    *,
    ceilings: Ceilings,
    spans: Sequence[Span] = (),
    sampling: str = "greedy",
    greedy_seconds: Sequence[float] = (),
    experts_hit: float | None = None,
    product_seconds: Sequence[float] = (),
    kv_bytes: int = 0,
) -> DecodeFigure:
    """Compare steps that must read ``num_bytes`` with the ceilings; ``seconds``: of a step in each round; ``spans``:
    the device's work; ``greedy_seconds``, ``product_seconds``: of greedy steps and of a step's products alone in the
    same rounds; ``kv_bytes``: how many of the bytes are KV."""
    floor, read_floor = num_bytes / ceilings.copy_bytes_per_second, num_bytes / ceilings.read_bytes_per_second
    middle = median(seconds)
    pairs = zip(seconds, greedy_seconds or seconds, strict=True)
    beyond = [own / greedy - 1 for own, greedy in pairs]
    parts = [products + kv_bytes / ceilings.copy_bytes_per_second for products in product_seconds]
    shares = [both / own for both, own in zip(parts, seconds, strict=True)] if parts else [0.0]
    return DecodeFigure(
        batch,
        context,
        step_ms=1e3 * middle,
        floor_ms=1e3 * floor,
        floor_share=floor / middle,
        read_floor_ms=1e3 * read_floor,
        read_floor_share=read_floor / middle,
        busy_share=busy_share(spans),
        sampling=sampling,
        least_ms=1e3 * min(seconds),
        most_ms=1e3 * max(seconds),
        beyond_greedy=median(beyond),
        experts_hit=experts_hit,
        parts_ms=1e3 * median(parts or [0.0]),
        parts_share=median(shares),
    )


def prefill_figure(
    num_tokens: int, flops: int, seconds: Sequence[float], ceilings: Ceilings, beside: Sequence[float] = ()
) -> PrefillFigure:
    """Compare prefills with the rate of the large product; ``seconds``: of one in each round; ``beside``: the product's
    operations per second in the same rounds."""
    middle = median(seconds)
    share = flops / middle / ceilings.gemm_flops_per_second
    beside_share = median(flops / own / rate for own, rate in zip(seconds, beside, strict=True)) if beside else 0.0
    return PrefillFigure(
        num_tokens, 1e3 * middle, num_tokens / middle, share, 1e3 * min(seconds), 1e3 * max(seconds), beside_share
    )
