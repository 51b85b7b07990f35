"""Quantisation of activations to FP8 on GPUs, with a scale for each group of a row's elements."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # largest number of that format
TINY = 1e-12  # the scale of a row of zeros
_BLOCK = 1024  # elements of a program, if groups are shorter


def quantise_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantise ``x`` [T, K] -> float8 [T, K], scales float32 [T, ceil(K / group)]: the largest of each group becomes
    448."""
    rows, columns = x.shape
    num_groups = triton.cdiv(columns, group)
    quantised = torch.empty((rows, columns), dtype=FP8, device=x.device)
    scales = torch.empty((rows, num_groups), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(min(group, columns))
    groups = min(triton.next_power_of_2(num_groups), max(1, _BLOCK // block))
    _quantise_kernel[(rows, triton.cdiv(num_groups, groups))](
        x, quantised, scales, x.stride(0), columns, num_groups, GROUP_COLUMNS=min(group, columns), GROUPS=groups,
        BLOCK=block, LARGEST=LARGEST, TINY=TINY, num_warps=max(1, min(16, groups * block // 256)),
    )  # fmt: skip
    return quantised, scales


@triton.jit
def _quantise_kernel(
    x,
    quantised,
    scales,
    stride,
    columns,
    num_groups,
    GROUP_COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,  # of a program
    BLOCK: tl.constexpr,  # at least a group's columns
    LARGEST: tl.constexpr,
    TINY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    within = tl.arange(0, BLOCK)
    at = group[:, None] * GROUP_COLUMNS + within[None, :]
    inside = (within < GROUP_COLUMNS)[None, :] & (at < columns)
    values = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 1), TINY) / LARGEST
    scaled = tl.clamp(values / scale[:, None], -LARGEST, LARGEST)
    tl.store(quantised + row * columns + at, scaled.to(quantised.dtype.element_ty), mask=inside)
    tl.store(scales + row * num_groups + group, scale, mask=group < num_groups)
