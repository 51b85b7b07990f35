"""Products of a few rows with a large weight, as a decode step has them: bound by the bandwidth of reading the weight.

Two kernels, each with what stands around the product. ``_row_kernel`` is for a single row: weights go straight to
registers, and RMS norm is a scale of the finished sum. ``_tile_kernel`` is for more, with matrix instructions; with
``split_k`` the last program of a tile to arrive adds up the parts, in their order, so that the result doesn't depend on
who is last; or the parts are left to what reads them (:meth:`splitserve.kernels.api.Linear.parts`). Both fetch their
first weights before they wait for the kernel that computes their input, so that memory is busy while that one ends. For
many rows cuBLAS is the better one. Launch parameters come from :mod:`splitserve.kernels.tuning`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import functools
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from splitserve.kernels.api import RmsNorm, SiluMul
from splitserve.kernels.linear import PlainLinear
from splitserve.kernels.triton_launch import overlapped, prefetch, wait
from splitserve.kernels.triton_ops import add_parts
from splitserve.kernels.tuning import shape_key, tuned

Variant = Literal["plain", "add", "norm", "gated"]

MAX_ROWS = 512  # beyond, cuBLAS is never worse
_FEW_ROWS = 16
_ROW_BLOCK = 4096
_MAX_TILES = 1 << 16  # of tickets


@dataclass(frozen=True, slots=True)
class LinearLaunch:
    """How a product is launched. ``block_m`` 0 leaves it to cuBLAS, 1 takes the kernel for one row.

    ``block_n`` counts outputs, ``prefetch`` elements of each of the tile's weight rows, a power of two. ``tma``: the
    bulk copy engine (compute capability 9.0) brings the weights. ``joined``: a product in parts is added up by its own
    kernel, even where what reads it could do so. The defaults serve few rows of any shape.
    """

    block_m: int = 16
    block_n: int = 32
    block_k: int = 256
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4
    prefetch: int = 0
    tma: bool = False
    joined: bool = True

    @property
    def leaves_parts(self) -> bool:
        return not self.joined and self.split_k > 1 and self.block_m > 1


CUBLAS = LinearLaunch(block_m=0)


class TritonLinear(PlainLinear):
    """The weight as it is, [out_features, in_features]. See :class:`splitserve.kernels.api.Linear`."""

    def __init__(self, weight: Tensor, *, rms_norm: RmsNorm, silu_mul: SiluMul) -> None:
        super().__init__(weight, rms_norm=rms_norm, silu_mul=silu_mul)
        assert weight.is_contiguous()
        self._launches: dict[tuple[Variant, int], LinearLaunch | None] = {}

    def __call__(self, x: Tensor) -> Tensor:
        if (params := self._params("plain", x)) is None:
            return super().__call__(x)
        out = torch.empty((x.shape[0], self.out_features), dtype=x.dtype, device=x.device)
        launch(x, self.weight, out, params)
        return out

    def parts(self, x: Tensor) -> Tensor:
        params = self._params("plain", x)
        return self._apart(x, params) if params is not None and params.leaves_parts else super().parts(x)

    def add_to(self, residual: Tensor, x: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor | None:
        if (params := self._params("add", x)) is None:
            return super().add_to(residual, x)
        if norm is not None and params.leaves_parts:
            return add_parts(residual, self._apart(x, params), norm, eps)
        launch(x, self.weight, residual, params, adds=True)
        return None

    def after_norm(self, x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None) -> Tensor:
        if (params := self._params("norm", x)) is None:
            return super().after_norm(x, norm, eps, normed)
        out = torch.empty((x.shape[0], self.out_features), dtype=x.dtype, device=x.device)
        self._launch_after_norm(x, out, norm, eps, normed, params, gated=False)
        return out

    def parts_after_norm(self, x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None) -> Tensor:
        params = self._params("norm", x)
        if params is not None and params.leaves_parts:
            return self._apart(self._rms_norm(x, norm, eps) if normed is None else normed, params)
        return super().parts_after_norm(x, norm, eps, normed)

    def gated_after_norm(self, x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None) -> Tensor:
        if (params := self._params("gated", x)) is None:
            return super().gated_after_norm(x, norm, eps, normed)
        out = torch.empty((x.shape[0], self.out_features // 2), dtype=x.dtype, device=x.device)
        self._launch_after_norm(x, out, norm, eps, normed, params, gated=True)
        return out

    def _apart(self, x: Tensor, params: LinearLaunch) -> Tensor:
        parts = torch.empty((params.split_k, x.shape[0], self.out_features), dtype=torch.float32, device=x.device)
        launch(x, self.weight, parts, params)
        return parts

    def _launch_after_norm(
        self,
        x: Tensor,
        out: Tensor,
        norm: Tensor,
        eps: float,
        normed: Tensor | None,
        params: LinearLaunch,
        *,
        gated: bool,
    ) -> None:
        if params.block_m == 1:
            launch(x, self.weight, out, params, norm=norm, eps=eps, gated=gated)
        else:
            normed = self._rms_norm(x, norm, eps) if normed is None else normed
            launch(normed, self.weight, out, params, gated=gated)

    def _params(self, variant: Variant, x: Tensor) -> LinearLaunch | None:
        """None leaves the product to cuBLAS."""
        if x.shape[0] > MAX_ROWS:
            return None
        key = (variant, x.shape[0])
        if key not in self._launches:
            params = launch_params(variant, x.dtype, self.out_features, self.in_features, x.shape[0])
            self._launches[key] = params if params.block_m else None
        return self._launches[key]


def launch_params(
    variant: Variant, dtype: torch.dtype, out_features: int, in_features: int, num_rows: int
) -> LinearLaunch:
    """As tuned, else a default: the kernels of this module for few rows, cuBLAS for more."""
    if num_rows == 1:
        # Whole rows: all of a program's weights are under way before it waits.
        block_k = min(_ROW_BLOCK, triton.next_power_of_2(in_features))
        default = LinearLaunch(block_m=1, block_n=2 if variant == "gated" else 4, block_k=block_k)
    else:
        default = LinearLaunch() if num_rows <= _FEW_ROWS else CUBLAS
    return tuned(default, f"linear_{variant}", shape_key(dtype, n=out_features, k=in_features), num_rows)


def launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    params: LinearLaunch,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    adds: bool = False,
) -> None:
    """``x`` [T, K], ``weight`` [N, K] -> ``out`` [T, N]; [T, N / 2] if ``gated``; added to ``out`` if ``adds``.

    With ``out`` [``split_k``, T, N], in float32, the parts of the product stay apart. Only the kernel for one row takes
    ``norm`` [K].
    """
    assert x.stride(1) == 1 and weight.shape == (out.shape[-1] * (1 + gated), x.shape[1]) and out.is_contiguous()
    if params.block_m == 1:
        assert x.shape[0] == 1
        _launch_row(x, weight, out, params, norm=norm, eps=eps, gated=gated, adds=adds)
    else:
        assert norm is None
        _launch_tiles(x, weight, out, params, gated=gated, adds=adds)


# ---- one row ----


def _launch_row(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    params: LinearLaunch,
    *,
    norm: Tensor | None,
    eps: float,
    gated: bool,
    adds: bool,
) -> None:
    num_columns = out.shape[1]
    _row_kernel[(triton.cdiv(num_columns, params.block_n),)](
        x,
        weight,
        x if norm is None else norm,
        out,
        eps,
        N=num_columns,
        K=x.shape[1],
        HAS_NORM=norm is not None,
        GATED=gated,
        ADDS=adds,
        BLOCK_N=params.block_n,
        BLOCK_K=params.block_k,
        PREFETCH=params.prefetch,
        num_warps=params.num_warps,
        **overlapped(x.device),
    )


@triton.jit
def _row_kernel(
    x_ptr,
    weight_ptr,
    norm_ptr,
    out_ptr,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < N
    k = tl.arange(0, BLOCK_K)
    rows_at = weight_ptr + column.to(tl.int64)[:, None] * K  # [BLOCK_N, 1]
    weight = _row_tile(rows_at, k, is_column, N, K, BLOCK_N, BLOCK_K)
    if GATED:
        up = _row_tile(rows_at + N * K, k, is_column, N, K, BLOCK_N, BLOCK_K)
    if PREFETCH > 0 and OVERLAPPED:
        fetched_at = weight_ptr + tl.minimum(column, N - 1).to(tl.int64) * K
        prefetch(fetched_at, BLOCK_K, K, PREFETCH)
        if GATED:
            prefetch(fetched_at + N * K, BLOCK_K, K, PREFETCH)
    wait(OVERLAPPED)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for first in tl.static_range(0, K, BLOCK_K):
        if first > 0:
            weight = _row_tile(rows_at, first + k, is_column, N, K, BLOCK_N, BLOCK_K)
            if GATED:
                up = _row_tile(rows_at + N * K, first + k, is_column, N, K, BLOCK_N, BLOCK_K)
        x = tl.load(x_ptr + first + k, mask=first + k < K, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x *= tl.load(norm_ptr + first + k, mask=first + k < K, other=0.0).to(tl.float32)
        acc += weight.to(tl.float32) * x[None, :]
        if GATED:
            acc_up += up.to(tl.float32) * x[None, :]
    total = tl.sum(acc, 1)
    total_up = tl.sum(acc_up, 1) if GATED else total
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares) / K + eps)
        total *= scale
        total_up *= scale
    _store(total, total_up, out_ptr + column, is_column, GATED, ADDS)


@triton.jit
def _row_tile(rows_at, k, is_column, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_N, BLOCK_K] of the weight; read once, so it may leave the cache first."""
    if N % BLOCK_N == 0 and K % BLOCK_K == 0:
        return tl.load(rows_at + k[None, :], eviction_policy="evict_first")
    mask = is_column[:, None] & (k < K)[None, :]
    return tl.load(rows_at + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _store(total, up, out_at, mask, GATED: tl.constexpr, ADDS: tl.constexpr):
    """What stands after the product: gate, or the sum with what is there."""
    narrow = out_at.dtype.element_ty
    if GATED:
        gate = total.to(narrow).to(tl.float32)
        total = (gate / (1.0 + tl.exp(-gate))).to(narrow).to(tl.float32) * up.to(narrow).to(tl.float32)
    if ADDS:
        total += tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_at, total.to(narrow), mask=mask)


# ---- several rows ----


def _launch_tiles(x: Tensor, weight: Tensor, out: Tensor, params: LinearLaunch, *, gated: bool, adds: bool) -> None:
    num_rows, in_features = x.shape
    num_columns, joined = out.shape[-1], out.dim() == 2
    width = params.block_n * (1 + gated)
    num_tiles = triton.cdiv(num_rows, params.block_m) * triton.cdiv(num_columns, params.block_n)
    parts, tickets = out, out
    if not joined:
        assert out.shape[0] == params.split_k and out.dtype == torch.float32 and not gated and not adds
    elif params.split_k > 1:
        parts, tickets = _split_workspace(x.device)
        room = num_tiles * params.split_k * params.block_m * width
        assert num_tiles <= _MAX_TILES and room <= parts.shape[0], "the tuned split needs too much workspace"
    descriptor = weight
    if params.tma:
        three = weight.view(1 + gated, num_columns, in_features)
        descriptor = TensorDescriptor.from_tensor(three, [1 + gated, params.block_n, params.block_k])
    _tile_kernel[(num_tiles, params.split_k)](
        x,
        weight,
        descriptor,
        out,
        parts,
        tickets,
        num_rows,
        x.stride(0),
        N=num_columns,
        K=in_features,
        GATED=gated,
        ADDS=adds,
        BLOCK_M=params.block_m,
        BLOCK_N=params.block_n,
        BLOCK_K=params.block_k,
        SPLIT_K=params.split_k,
        JOINED=joined,
        PREFETCH=params.prefetch,
        TMA=params.tma,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=params.num_warps,
        num_stages=params.num_stages,
        **overlapped(x.device),
    )


@functools.cache
def _split_workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for the parts of split products, float32, and tickets, which are zero between launches.

    Products of one stream share it: each waits for the one before.
    """
    return (
        torch.empty(1 << 23, dtype=torch.float32, device=device),
        torch.zeros(_MAX_TILES, dtype=torch.int32, device=device),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _tile_kernel(
    x_ptr,
    weight_ptr,
    descriptor,
    out_ptr,
    parts_ptr,
    tickets_ptr,
    num_rows,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    JOINED: tl.constexpr,
    PREFETCH: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    WIDTH: tl.constexpr = BLOCK_N * (1 + GATED)
    PART_K: tl.constexpr = (K + SPLIT_K * BLOCK_K - 1) // (SPLIT_K * BLOCK_K) * BLOCK_K
    num_row_tiles = tl.cdiv(num_rows, BLOCK_M)
    tile, part = tl.program_id(0), tl.program_id(1)
    row = (tile % num_row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_column = (tile // num_row_tiles) * BLOCK_N
    first_k = part * PART_K
    inner = tl.arange(0, WIDTH)  # outputs of the tile; with a gate, then the same of its other half
    weight_row = tl.minimum(first_column + inner % BLOCK_N, N - 1) + inner // BLOCK_N * N
    rows_at = weight_ptr + weight_row.to(tl.int64) * K
    if PREFETCH > 0 and OVERLAPPED:
        prefetch(rows_at, first_k, K, PREFETCH)
    wait(OVERLAPPED)

    acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    # Rows beyond the last aren't read: all programs reading one row in their stead would wait for the same memory.
    x_rows, is_row = x_ptr + row.to(tl.int64) * x_stride, (row < num_rows)[:, None]
    for offset in range(0, PART_K, BLOCK_K):
        k = first_k + offset + tl.arange(0, BLOCK_K)
        x = _tile_input(x_rows, is_row, k, K, K % (SPLIT_K * BLOCK_K) == 0)
        if TMA:
            weight = tl.reshape(descriptor.load([0, first_column, first_k + offset]), (WIDTH, BLOCK_K))
        else:
            weight = _tile_weight(rows_at, k, K, K % (SPLIT_K * BLOCK_K) == 0)
        acc = tl.dot(x, weight.T, acc, input_precision=PRECISION)

    if JOINED and SPLIT_K > 1:
        acc, is_last = _join(acc, parts_ptr, tickets_ptr, tile, part, SPLIT_K, BLOCK_M, WIDTH)
        if not is_last:
            return
    total, up = _halves(acc, BLOCK_M, BLOCK_N) if GATED else (acc, acc)
    column = first_column + tl.arange(0, BLOCK_N)
    out_at = out_ptr + row.to(tl.int64)[:, None] * N + column[None, :]
    if not JOINED:
        out_at += part.to(tl.int64) * num_rows * N
    _store(total, up, out_at, (row < num_rows)[:, None] & (column < N)[None, :], GATED, ADDS)


@triton.jit
def _tile_input(x_rows, is_row, k, K: tl.constexpr, IS_WHOLE: tl.constexpr):
    """[BLOCK_M, BLOCK_K]. ``IS_WHOLE``: no ``k`` is beyond the last one."""
    if IS_WHOLE:
        return tl.load(x_rows[:, None] + k[None, :], mask=is_row, other=0.0)
    return tl.load(x_rows[:, None] + k[None, :], mask=is_row & (k < K)[None, :], other=0.0)


@triton.jit
def _tile_weight(rows_at, k, K: tl.constexpr, IS_WHOLE: tl.constexpr):
    """[WIDTH, BLOCK_K]; read once, so it may leave the cache first."""
    if IS_WHOLE:
        return tl.load(rows_at[:, None] + k[None, :], eviction_policy="evict_first")
    return tl.load(rows_at[:, None] + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _halves(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The gate's outputs and the others, [BLOCK_M, BLOCK_N] each, of [BLOCK_M, 2 * BLOCK_N]."""
    return tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))


@triton.jit
def _join(
    acc,
    parts_ptr,
    tickets_ptr,
    tile,
    part,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The sum over all parts of ``tile``, for the last program of it to arrive; others are told that they aren't."""
    SIZE: tl.constexpr = BLOCK_M * WIDTH
    at = parts_ptr + tile.to(tl.int64) * (SPLIT_K * SIZE)
    inner = tl.arange(0, BLOCK_M)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(at + part * SIZE + inner, acc)
    tl.debug_barrier()  # every thread's part is stored before the ticket says so
    is_last = tl.atomic_add(tickets_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1
    if is_last:
        tl.debug_barrier()
        acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
        for index in tl.static_range(SPLIT_K):
            acc += tl.load(at + index * SIZE + inner, cache_modifier=".cg")
        tl.store(tickets_ptr + tile, 0)
    return acc, is_last
