"""Products of a few rows with a large weight, as a decode step has them: bound by the bandwidth of reading the weight.

One kernel with what stands around it: RMS norm before (as a scale of the finished sum, so that no pass is needed
first), gate or residual after. Each program fetches the first part of its weights into the L2 cache before it waits for
the kernel that computes its input, so that memory is busy while that one ends. With ``SPLIT_K`` the last program of a
tile to arrive adds up the parts, in their order: the result doesn't depend on who is last. For many rows cuBLAS is the
better one. Launch parameters come from :mod:`splitserve.kernels.tuning`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import functools
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.api import RmsNorm, SiluMul
from splitserve.kernels.linear import PlainLinear
from splitserve.kernels.triton_launch import overlapped, wait
from splitserve.kernels.tuning import shape_key, tuned

Variant = Literal["plain", "add", "norm", "gated"]

_MIN_ROWS = 16  # of a matrix instruction
MAX_ROWS = 512  # beyond, cuBLAS is never worse
_MAX_TILES = 1 << 16  # of tickets


@dataclass(frozen=True, slots=True)
class LinearLaunch:
    """How a product is launched. ``block_m`` 0 leaves it to cuBLAS. ``prefetch`` counts elements of the weight's rows.

    The defaults serve few rows of any shape.
    """

    block_m: int = 16
    block_n: int = 32
    block_k: int = 256
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4
    prefetch: int = 512


_CUBLAS = LinearLaunch(block_m=0)


class TritonLinear(PlainLinear):
    """The weight as it is, [out_features, in_features]. See :class:`splitserve.kernels.api.Linear`."""

    def __init__(self, weight: Tensor, *, rms_norm: RmsNorm, silu_mul: SiluMul) -> None:
        super().__init__(weight, rms_norm=rms_norm, silu_mul=silu_mul)
        assert weight.is_contiguous()
        # The sum of squares comes from the rows as they are; in float16 their product with the norm could overflow.
        self._fuses_norm = weight.dtype != torch.float16
        self._launches: dict[tuple[Variant, int], LinearLaunch | None] = {}

    def __call__(self, x: Tensor) -> Tensor:
        if (params := self._params("plain", x)) is None:
            return super().__call__(x)
        out = torch.empty((x.shape[0], self.out_features), dtype=x.dtype, device=x.device)
        launch(x, self.weight, out, params)
        return out

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        if (params := self._params("add", x)) is None:
            super().add_to(residual, x)
        else:
            launch(x, self.weight, residual, params, adds=True)

    def after_norm(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        if (params := self._params("norm", x)) is None:
            return super().after_norm(x, norm, eps)
        out = torch.empty((x.shape[0], self.out_features), dtype=x.dtype, device=x.device)
        self._launch_after_norm(x, out, norm, eps, params, gated=False)
        return out

    def gated_after_norm(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        if (params := self._params("gated", x)) is None:
            return super().gated_after_norm(x, norm, eps)
        out = torch.empty((x.shape[0], self.out_features // 2), dtype=x.dtype, device=x.device)
        self._launch_after_norm(x, out, norm, eps, params, gated=True)
        return out

    def _launch_after_norm(
        self, x: Tensor, out: Tensor, norm: Tensor, eps: float, params: LinearLaunch, *, gated: bool
    ) -> None:
        if self._fuses_norm and params.split_k == 1:
            launch(x, self.weight, out, params, norm=norm, eps=eps, gated=gated)
        else:
            launch(self._rms_norm(x, norm, eps), self.weight, out, params, gated=gated)

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
    """As tuned, else a default: this kernel for few rows, cuBLAS for more."""
    default = LinearLaunch() if num_rows <= _MIN_ROWS else _CUBLAS
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
    """``x`` [T, K], ``weight`` [N, K] -> ``out`` [T, N]; [T, N / 2] if ``gated``; added to ``out`` if ``adds``."""
    num_rows, in_features = x.shape
    num_columns = out.shape[1]
    assert x.stride(1) == 1 and weight.shape == (num_columns * (1 + gated), in_features) and out.is_contiguous()
    num_tiles = triton.cdiv(num_rows, params.block_m) * triton.cdiv(num_columns, params.block_n)
    parts, tickets = _split_workspace(x.device) if params.split_k > 1 else (out, out)
    if params.split_k > 1:
        assert norm is None and num_tiles <= tickets.shape[0]
        tile_elements = params.block_m * params.block_n * (1 + gated)
        assert num_tiles * params.split_k * tile_elements <= parts.shape[0], "the tuned split needs too much workspace"
    _linear_kernel[(num_tiles, params.split_k)](
        x,
        weight,
        x if norm is None else norm,
        out,
        parts,
        tickets,
        num_rows,
        x.stride(0),
        eps,
        N=num_columns,
        K=in_features,
        HAS_NORM=norm is not None,
        GATED=gated,
        ADDS=adds,
        BLOCK_M=params.block_m,
        BLOCK_N=params.block_n,
        BLOCK_K=params.block_k,
        SPLIT_K=params.split_k,
        PREFETCH=params.prefetch,
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
def _linear_kernel(
    x_ptr,
    weight_ptr,
    norm_ptr,
    out_ptr,
    parts_ptr,
    tickets_ptr,
    num_rows,
    x_stride,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    num_row_tiles = tl.cdiv(num_rows, BLOCK_M)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    row = (tile % num_row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (tile // num_row_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    PART_K: tl.constexpr = (K + SPLIT_K * BLOCK_K - 1) // (SPLIT_K * BLOCK_K) * BLOCK_K
    IS_EVEN: tl.constexpr = N % BLOCK_N == 0 and K % (SPLIT_K * BLOCK_K) == 0
    first_k = part * PART_K
    weights_at = weight_ptr + column.to(tl.int64) * K  # [BLOCK_N]
    if PREFETCH > 0 and OVERLAPPED:
        fetched_at = weight_ptr + tl.minimum(column, N - 1).to(tl.int64) * K
        _prefetch(fetched_at, first_k, K, PREFETCH)
        if GATED:
            _prefetch(fetched_at + N * K, first_k, K, PREFETCH)
    wait(OVERLAPPED)

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    rows_at = x_ptr + row.to(tl.int64) * x_stride  # [BLOCK_M]
    is_row, is_column = row < num_rows, column < N
    for offset in range(0, PART_K, BLOCK_K):
        k = first_k + offset + tl.arange(0, BLOCK_K)
        is_k = k < K
        x = tl.load(rows_at[:, None] + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0.0)
        weight = _load_weight(weights_at, k, is_k, is_column, IS_EVEN)
        if HAS_NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            norm = tl.load(norm_ptr + k, mask=is_k, other=0.0).to(tl.float32)
            x = (wide * norm[None, :]).to(x.dtype)
        acc = tl.dot(x, weight, acc, input_precision=PRECISION)
        if GATED:
            up = _load_weight(weights_at + N * K, k, is_k, is_column, IS_EVEN)
            acc_up = tl.dot(x, up, acc_up, input_precision=PRECISION)

    if SPLIT_K > 1:
        acc, acc_up, is_last = _join(acc, acc_up, parts_ptr, tickets_ptr, tile, part, GATED, SPLIT_K, BLOCK_M, BLOCK_N)
        if not is_last:
            return
    if HAS_NORM:
        scale = tl.rsqrt(squares / K + eps)
        acc *= scale[:, None]
        acc_up *= scale[:, None]
    narrow = out_ptr.dtype.element_ty
    if GATED:
        gate = acc.to(narrow).to(tl.float32)
        acc = (gate / (1.0 + tl.exp(-gate))).to(narrow).to(tl.float32) * acc_up.to(narrow).to(tl.float32)
    out_at = out_ptr + row.to(tl.int64)[:, None] * N + column[None, :]
    is_out = is_row[:, None] & is_column[None, :]
    if ADDS:
        acc += tl.load(out_at, mask=is_out, other=0.0).to(tl.float32)
    tl.store(out_at, acc.to(narrow), mask=is_out)


@triton.jit
def _load_weight(weights_at, k, is_k, is_column, IS_EVEN: tl.constexpr):
    """[BLOCK_K, BLOCK_N] of the transposed weight; read once, so it may leave the cache first."""
    at = weights_at[None, :] + k[:, None]
    if IS_EVEN:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=is_k[:, None] & is_column[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _prefetch(weights_at, first_k, K: tl.constexpr, COUNT: tl.constexpr):
    """Into the L2 cache: ``COUNT`` elements of each row, a line of 128 bytes at a time."""
    LINE: tl.constexpr = 128 // (weights_at.dtype.element_ty.primitive_bitwidth // 8)
    at = weights_at[:, None] + tl.minimum(first_k + tl.arange(0, COUNT // LINE) * LINE, K - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _join(
    acc,
    acc_up,
    parts_ptr,
    tickets_ptr,
    tile,
    part,
    GATED: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The sums over all parts of ``tile``, for the last program of it to arrive; others are told that they aren't."""
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    ROOM: tl.constexpr = SIZE * (1 + GATED)
    at = parts_ptr + tile.to(tl.int64) * (SPLIT_K * ROOM)
    inner = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(at + part * ROOM + inner, acc)
    if GATED:
        tl.store(at + part * ROOM + SIZE + inner, acc_up)
    tl.debug_barrier()  # every thread's part is stored before the ticket says so
    is_last = tl.atomic_add(tickets_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1
    if is_last:
        tl.debug_barrier()
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for index in tl.static_range(SPLIT_K):
            acc += tl.load(at + index * ROOM + inner, cache_modifier=".cg")
            if GATED:
                acc_up += tl.load(at + index * ROOM + SIZE + inner, cache_modifier=".cg")
        tl.store(tickets_ptr + tile, 0)
    return acc, acc_up, is_last
