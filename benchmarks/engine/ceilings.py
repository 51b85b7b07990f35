"""Comparisons for the steps of ``splitserve bench engine``: the GPU's rates at their best, and the products of a dense
model's step by themselves.

Those products are computed as PyTorch does it (cuBLAS), replayed from a CUDA graph, with nothing between them. With the
time in which a copy moves the KV they tell how much of a step's time is left for all else.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from splitserve.benchmarks.engine.step_costs import Ceilings
from splitserve.benchmarks.kernels.device_timing import read_bandwidth
from splitserve.models.config import ModelConfig
from splitserve.models.declared import declare
from splitserve.models.layers.weight import Role

_KV_RESERVE_BYTES = 12 << 30  # for activations of the longest prefill, graphs and workspaces
_PRODUCT_SIZE = 8192  # rows and columns of the large product
_LEAST_BYTES = 512 << 20  # of different layers' weights: far more than a level-2 cache holds


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


def products_of(config: ModelConfig, rows: int, dtype: torch.dtype) -> "Products | None":
    """Return the products of a step of ``rows`` tokens on the device that is measured; None if the model has experts,
    latent attention, or transformers' code."""
    if config.experts is not None or config.latent is not None or config.transformers is not None:
        return None
    return Products(product_shapes(config), config.num_layers, rows, dtype=dtype, device=bench_device())


def product_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of the products of a dense model's first layer, then of its head."""
    decoder = declare(config)
    stacks = [stack for stack in decoder.layers[0].stacks() if stack[0].role is Role.PROJECTION]
    layer = [(sum(weight.num_rows for weight in stack), stack[0].shape[1]) for stack in stacks]
    return [*layer, (config.vocab_size, config.hidden_size)]


class Products:
    """Random weights [outputs, inputs] of these shapes, of as many layers as no cache holds, and random inputs
    [``rows``, inputs]."""

    def __init__(
        self, shapes: list[tuple[int, int]], num_layers: int, rows: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        layer_bytes = sum(outputs * inputs for outputs, inputs in shapes[:-1]) * dtype.itemsize
        kept = min(num_layers, -(-_LEAST_BYTES // layer_bytes))
        layers = [[_random(shape, dtype, device) for shape in shapes[:-1]] for _ in range(kept)]
        head = _random(shapes[-1], dtype, device)
        weights = [weight for _ in range(-(-num_layers // kept)) for layer in layers for weight in layer]
        # A graph doesn't keep the tensors that it reads.
        self._weights = [*weights[: num_layers * (len(shapes) - 1)], head]
        self._inputs = {size: _random((rows, size), dtype, device) for _, size in shapes}
        self._run = _captured(self._compute) if device.type == "cuda" else self._compute

    def _compute(self) -> None:
        for weight in self._weights:
            linear(self._inputs[weight.shape[1]], weight)

    def seconds(self, count: int) -> float:
        """Return the seconds of a step's products: the mean of ``count`` times, after one more."""
        self._run()
        synchronize()
        started = time.perf_counter()
        for _ in range(count):
            self._run()
        synchronize()
        return (time.perf_counter() - started) / count


def _random(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device)


def _captured(run: Callable[[], None]) -> Callable[[], None]:
    """Return the replay of a CUDA graph of ``run``."""
    run()
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
