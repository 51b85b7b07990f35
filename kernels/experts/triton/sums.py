"""The end of both ways to compute experts: a token's sum is stored, or added to the residual."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl


@triton.jit
def store_sums(out_at, sums, mask, ADDS: tl.constexpr):
    """Store float32 ``sums``; with ``ADDS`` round each to the dtype at ``out_at``, and add it to what is there."""
    dtype: tl.constexpr = out_at.dtype.element_ty
    if ADDS:
        sums = tl.load(out_at, mask=mask, other=0.0).to(tl.float32) + sums.to(dtype).to(tl.float32)
    tl.store(out_at, sums.to(dtype), mask=mask)
