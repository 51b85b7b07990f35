"""Ceilings of ``splitserve bench engine``: rates of a GPU at its best, measured; and the device that it measures."""

import statistics
import time
from collections.abc import Callable

import torch

from splitserve.benchmarks.engine.step_costs import Ceilings
from splitserve.benchmarks.kernels.device_timing import read_bandwidth

_KV_RESERVE_BYTES = 12 << 30  # for activations of the longest prefill, graphs and workspaces
_PRODUCT_SIZE = 8192  # rows and columns of the large product


def measure_ceilings() -> Ceilings:
    """Measure copy bandwidth (read + write), read bandwidth and bf16 GEMM rate of the current device."""
    left, right = _factors()
    gemm_seconds = _median_seconds(lambda: left @ right)
    return Ceilings(_copy_rate(), read_bandwidth(bench_device()), 2 * _PRODUCT_SIZE**3 / gemm_seconds)


def _factors() -> list[torch.Tensor]:
    sizes, device = (_PRODUCT_SIZE, _PRODUCT_SIZE), bench_device()
    return [torch.randn(sizes, device=device).to(torch.bfloat16) for _ in range(2)]


def product_rate(seconds: float, burst_rate: float) -> float:
    """Return the operations per second of as many large products as take ``seconds`` at ``burst_rate``."""
    flops = 2 * _PRODUCT_SIZE**3
    count = max(1, round(seconds * burst_rate / flops))
    left, right = _factors()
    synchronize()
    started = time.perf_counter()
    for _ in range(count):
        left @ right
    synchronize()
    return count * flops / (time.perf_counter() - started)


def _copy_rate() -> float:
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_seconds(lambda: target.copy_(source))


def _median_seconds(run: Callable[[], object], repeats: int = 20) -> float:
    seconds: list[float] = []
    for index in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        if index >= 3:
            seconds.append(start.elapsed_time(end) * 1e-3)
    return float(statistics.median(seconds))


def bench_device() -> torch.device:
    """Return the device that is measured."""
    return torch.device("cuda", torch.cuda.current_device())


def free_bytes() -> int:
    """Return the device's memory that KV may take."""
    return int(torch.cuda.mem_get_info()[0]) - _KV_RESERVE_BYTES


def synchronize() -> None:
    """Wait for the device."""
    torch.cuda.synchronize()
