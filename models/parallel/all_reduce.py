"""Implementations of the all-reduce over the ranks' GPUs, and the choice among them by size, measured at start.

NCCL can do all sizes. For small ones the kernels of :mod:`splitserve.kernels.triton.all_reduce` are faster, where the
GPUs can address each other's memory. The results of each implementation are checked before it is used at all.
"""

import bisect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from splitserve.kernels.reference.operations import join_parts, rms_norm

logger = logging.getLogger(__name__)

CAPACITY_BYTES = 4 << 20
FLAGLESS_CAPACITY_BYTES = 1 << 20
TRIAL_SPINS = 1 << 24  # looks at a flag
_WARM_UP_CALLS = 2
_CALLS_PER_GRAPH = 20
_REPLAYS = 5
_EPS = 1e-5
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}

Add = Callable[[Tensor, Tensor, Tensor | None, float], Tensor | None]
"""A function of (residual, parts, norm, eps): see :meth:`splitserve.models.parallel.ranks.Collectives.add_reduced`."""


class AllReduce(Protocol):
    """One implementation. ``capacity_bytes``: size of the largest tensor; None: any size."""

    @property
    def name(self) -> str: ...

    @property
    def capacity_bytes(self) -> int | None: ...

    def add(self, residual: Tensor, parts: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor | None:
        """See :meth:`splitserve.models.parallel.ranks.Collectives.add_reduced`."""

    def try_add(self, residual: Tensor, parts: Tensor, norm: Tensor, eps: float) -> Tensor | None:
        """The same, but it ends after some seconds even where it doesn't work; the result is wrong then."""


class NcclAllReduce:
    """Through NCCL: any size. See :class:`AllReduce`."""

    name = "nccl"
    capacity_bytes = None

    def add(self, residual: Tensor, parts: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> None:  # noqa: ARG002
        partial = join_parts(parts, residual.dtype)
        dist.all_reduce(partial)
        residual.add_(partial)

    try_add = add


@dataclass(frozen=True, slots=True)
class KernelAllReduce:
    """A kernel that takes (residual, parts, max_spins, norm, eps), and reads the peers' memory.

    See :class:`AllReduce`.
    """

    name: str
    capacity_bytes: int
    kernel: Callable[[Tensor, Tensor, int, Tensor | None, float], Tensor | None]

    def add(self, residual: Tensor, parts: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor | None:
        return self.kernel(residual, parts, 0, norm, eps)

    def try_add(self, residual: Tensor, parts: Tensor, norm: Tensor, eps: float) -> Tensor | None:
        return self.kernel(residual, parts, TRIAL_SPINS, norm, eps)


@dataclass(frozen=True, slots=True)
class Measured:
    """Microseconds of one size with each implementation that can do it: the slowest rank's, back to back in a graph."""

    num_bytes: int
    microseconds: Mapping[str, float]

    @property
    def best(self) -> str:
        return min(self.microseconds, key=lambda name: self.microseconds[name])


class ChosenAllReduce:
    """The fastest implementation for each size, by measurements of growing sizes. Beyond the largest: NCCL."""

    def __init__(self, ways: Sequence[AllReduce], measured: Sequence[Measured]) -> None:
        """``ways``: NCCL first."""
        self.measured = tuple(measured)
        by_name = {way.name: way for way in ways}
        self._bounds = [entry.num_bytes for entry in measured]
        self._ways = [*(by_name[entry.best] for entry in measured), ways[0]]

    def way(self, num_bytes: int) -> AllReduce:
        """Return the implementation for a size. A size between two measured ones takes that of the larger one."""
        return self._ways[bisect.bisect_left(self._bounds, num_bytes)]

    def add(self, residual: Tensor, parts: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor | None:
        return self.way(residual.nbytes).add(residual, parts, norm, eps)

    def describe(self) -> str:
        """Like ``one-shot up to 1024 KiB, then nccl``."""
        parts = []
        for index, way in enumerate(self._ways[:-1]):
            if way is not self._ways[index + 1]:
                parts.append(f"{way.name} up to {self._bounds[index] / 1024:g} KiB")
        return ", then ".join([*parts, self._ways[-1].name])


def sizes_to_measure(row_bytes: int) -> list[int]:
    """Bytes of 1, 2, 4, ... rows, up to :data:`CAPACITY_BYTES`."""
    sizes = [row_bytes]
    while 2 * sizes[-1] <= CAPACITY_BYTES:
        sizes.append(2 * sizes[-1])
    return sizes


def choose(ways: Sequence[AllReduce], row_bytes: int, dtype: torch.dtype, device: torch.device) -> ChosenAllReduce:
    """The best of ``ways`` (NCCL first) for tensors of ``row_bytes`` a row. All ranks choose the same, together."""
    right = [ways[0], *(way for way in ways[1:] if _works(way, row_bytes, dtype, device))]
    measured = measure(right, sizes_to_measure(row_bytes), dtype, device)
    chosen = ChosenAllReduce(right, measured)
    logger.info("all-reduce over %d ranks: %s", dist.get_world_size(), chosen.describe())
    for entry in measured:
        times = ", ".join(f"{name} {value:.1f} us" for name, value in entry.microseconds.items())
        logger.debug("all-reduce of %g KiB: %s", entry.num_bytes / 1024, times)
    return chosen


def measure(
    ways: Sequence[AllReduce], sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> list[Measured]:
    """Measure every implementation that can do a size, at each of ``sizes`` (bytes). All ranks call it together."""
    names, times = [], []
    for num_bytes in sizes:
        able = [way for way in ways if _fits(way, num_bytes)]
        names.append([way.name for way in able])
        times += [_microseconds(way, num_bytes, dtype, device) for way in able]
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    results = iter(slowest.tolist())
    return [
        Measured(num_bytes, {name: next(results) for name in able})
        for num_bytes, able in zip(sizes, names, strict=True)
    ]


def _fits(way: AllReduce, num_bytes: int) -> bool:
    return way.capacity_bytes is None or num_bytes <= way.capacity_bytes


def _works(way: AllReduce, row_bytes: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether ``way`` gives right sums, on all ranks, several times in a row."""
    ok, why = 1, "wrong sums"
    try:
        for num_parts in (1, 2):
            for num_bytes in [size for size in sizes_to_measure(row_bytes) if _fits(way, size)][::3]:
                shape = (num_parts, num_bytes // row_bytes, row_bytes // dtype.itemsize)
                ok &= _adds_up(way, shape, dtype, device)
    except Exception as error:  # whatever it is: NCCL is there
        ok, why = 0, f"{type(error).__name__}: {error}"
    agreed = torch.tensor(ok, device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    if not int(agreed):
        logger.warning("all-reduce %s isn't used: %s", way.name, why if not ok else "it failed on another rank")
    return bool(agreed)


def _adds_up(way: AllReduce, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """``shape``: of the parts."""

    def random(seed: int) -> Tensor:
        parts = torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(seed))
        return parts.to(dtype) if shape[0] == 1 else parts

    residual = random(0)[0].to(dtype)
    expected = residual.float()
    for rank in range(dist.get_world_size()):
        expected += join_parts(random(rank + 1), dtype).float()
    norm = random(0)[0, 0].to(dtype)
    normed = way.try_add(residual, random(dist.get_rank() + 1), norm, _EPS)

    def is_close(actual: Tensor, wanted: Tensor) -> bool:
        return torch.allclose(actual.float(), wanted, rtol=_TOLERANCE[dtype], atol=4 * _TOLERANCE[dtype])

    if normed is not None and not is_close(normed, rms_norm(residual, norm, _EPS).float()):
        return False
    return is_close(residual, expected)


def _microseconds(way: AllReduce, num_bytes: int, dtype: torch.dtype, device: torch.device) -> float:
    residual, parts = (torch.zeros((1, num_bytes // dtype.itemsize), dtype=dtype, device=device) for _ in range(2))
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP_CALLS):
            way.add(residual[0], parts)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(_CALLS_PER_GRAPH):
                way.add(residual[0], parts)
        graph.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record(stream)
        for _ in range(_REPLAYS):
            graph.replay()
        end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / (_REPLAYS * _CALLS_PER_GRAPH)
