"""Times of single operations: in a CUDA graph on a GPU, which excludes launch overhead; by wall time on a CPU."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

Calls = Sequence[Callable[[], object]]

_MIN_GRAPH_CALLS = 20
_MAX_GRAPH_CALLS = 400
_GRAPH_SECONDS = 2e-3  # duration of one replay: far above the clock's resolution and the cost of a replay
_COPY_BYTES = 1 << 32
_CPU_COPY_BYTES = 64 << 20
_READ_ROW = 8192  # elements
_CHUNK = 1 << 24  # elements that are compared at a time, in float64


def seconds_per_call(calls: Calls, device: torch.device, repeats: int = 7) -> float:
    """Return the median over ``repeats`` of the mean seconds of one call, when all of ``calls`` run in turn, over and
    over.

    Callers must provide cold memory: ``calls`` with inputs that together are larger than the caches. An operation that
    can't be captured in a CUDA graph raises the capture's error; :func:`eager_seconds` times it, launches included.
    """
    if device.type == "cuda":
        return _graph_seconds(calls, repeats)
    calls[0]()
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        for call in calls:
            call()
        samples.append((time.perf_counter() - started) / len(calls))
    return statistics.median(samples)


def eager_seconds(calls: Calls, repeats: int = 7) -> float:
    """Measure like :func:`seconds_per_call` on a GPU, but with separate launches: short calls wait for the host."""
    for call in calls:
        call()
    return statistics.median(_event_seconds(calls) for _ in range(repeats)) / len(calls)


def _graph_seconds(calls: Calls, repeats: int) -> float:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles, initialises libraries
            call()
        rounds = _rounds(_event_seconds(calls) / len(calls), len(calls))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in [*calls] * rounds:
                call()
        graph.replay()
        samples = [_event_seconds([graph.replay]) for _ in range(repeats)]
    stream.synchronize()
    return statistics.median(samples) / (rounds * len(calls))


def _rounds(seconds: float, num_calls: int) -> int:
    """Return how often a graph runs all calls; ``seconds`` of one call, launch included, is an upper bound."""
    wanted = min(_MAX_GRAPH_CALLS, max(_MIN_GRAPH_CALLS, _GRAPH_SECONDS / max(seconds, 1e-7)))
    return max(1, round(wanted / num_calls))


def _event_seconds(calls: Calls) -> float:
    """Return the seconds in which the device runs all of ``calls``."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def copy_bandwidth(device: torch.device) -> float:
    """Measure the bytes read and written per second by a large copy on ``device``."""
    size = _COPY_BYTES if device.type == "cuda" else _CPU_COPY_BYTES
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    calls = [lambda: target.copy_(source)]
    # Not in a graph: there a copy engine would copy, more slowly.
    return 2 * size / (eager_seconds(calls) if device.type == "cuda" else seconds_per_call(calls, device))


def read_bandwidth(device: torch.device) -> float:
    """Measure bytes read per second by the fastest of a sum, a sum of each row and a matrix-vector product.

    Each writes next to nothing; which one comes closest to the memory's bandwidth depends on the device.
    """
    size = _COPY_BYTES if device.type == "cuda" else _CPU_COPY_BYTES
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # products of narrow rows are slow on CPUs
    matrix = torch.ones(size // _READ_ROW // dtype.itemsize, _READ_ROW, dtype=dtype, device=device)
    vector = torch.ones(_READ_ROW, dtype=dtype, device=device)
    words = matrix.view(torch.float32)
    ways: list[Callable[[], object]] = [words.sum, lambda: words.sum(dim=1), lambda: matrix @ vector]
    time_calls = eager_seconds if device.type == "cuda" else partial(seconds_per_call, device=device)
    return matrix.nbytes / min(time_calls([way]) for way in ways)


def gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the floating-point operations per second of a large matrix product on ``device``."""
    size = 8192 if device.type == "cuda" else 512
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds_per_call([lambda: left @ right], device)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return ``|actual - expected|`` over ``|expected|`` (norms), or a tenth of the largest difference over the root
    mean square if that is more, so that a single wrong value shows; inf for values that aren't finite."""
    left, right = actual.flatten(), expected.flatten()
    error = square = largest = 0.0
    for first in range(0, right.numel(), _CHUNK):
        wide = right[first : first + _CHUNK].double()
        difference = left[first : first + _CHUNK].double() - wide
        error += float(difference.square().sum())
        square += float(wide.square().sum())
        largest = max(largest, float(difference.abs().max()))
    mean = math.sqrt(max(square, 1e-60) / max(1, right.numel()))
    result = max(math.sqrt(error / max(square, 1e-60)), largest / mean / 10)
    return result if math.isfinite(error) else math.inf


TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-3}
"""Bounds of :func:`relative_error` by the dtype of the computation: a few roundings. float32 products may use TF32."""
