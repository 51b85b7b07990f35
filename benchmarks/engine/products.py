"""The products of a dense model's decode step by themselves, for ``splitserve bench engine``.

They are computed as PyTorch does it (cuBLAS), replayed from a CUDA graph, with nothing between them. With the time in
which a copy moves the KV they tell how much of a step's time is left for all else.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from splitserve.benchmarks.engine.ceilings import bench_device
from splitserve.models.config import ModelConfig

_LEAST_BYTES = 512 << 20  # of different layers' weights: far more than a level-2 cache holds


def products_of(config: ModelConfig, rows: int, dtype: torch.dtype) -> "Products | None":
    """Return the products of a step of ``rows`` tokens on the device that is measured; None if the model has experts,
    latent attention, or transformers' code."""
    if config.experts is not None or config.latent is not None or config.transformers is not None:
        return None
    return Products(product_shapes(config), config.num_layers, rows, dtype=dtype, device=bench_device())


def product_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of the products of a dense model's layer, then of its head."""
    attended = config.num_heads * config.head_dim
    return [
        (attended + 2 * config.num_kv_heads * config.head_dim, config.hidden_size),
        (config.hidden_size, attended),
        (2 * config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
        (config.vocab_size, config.hidden_size),
    ]


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
        inputs = {size: _random((rows, size), dtype, device) for _, size in shapes}
        weights = [weight for _ in range(-(-num_layers // kept)) for layer in layers for weight in layer]
        weights = [*weights[: num_layers * (len(shapes) - 1)], head]

        def run() -> None:
            for weight in weights:
                linear(inputs[weight.shape[1]], weight)

        self._run, self._wait = (_captured(run), torch.cuda.synchronize) if device.type == "cuda" else (run, _no_wait)

    def seconds(self, count: int) -> float:
        """Return the seconds of a step's products: the mean of ``count`` times, after one more."""
        self._run()
        self._wait()
        started = time.perf_counter()
        for _ in range(count):
            self._run()
        self._wait()
        return (time.perf_counter() - started) / count


def _no_wait() -> None:
    """A CPU has computed when a call returns."""


def _random(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device)


def _captured(run: Callable[[], None]) -> Callable[[], None]:
    """Return the replay of a CUDA graph of ``run``."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
