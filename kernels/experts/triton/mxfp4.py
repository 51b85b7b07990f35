"""Products with weights in MXFP4 (:mod:`splitserve.kernels.experts.mxfp4`, ordered ``by_quarters``) in Triton kernels.

The weights are the left operand: a warp group unpacks them in registers, two elements at once, where its matrix
instructions take them. As the right operand they would go through shared memory as bfloat16.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

_TWO_TO_64 = tl.constexpr(2.0**64)
_TWO_TO_126 = tl.constexpr(2.0**126)


@triton.jit
def packed_product(x_at, words_at, scales_at, total, SIZE: tl.constexpr, BLOCK_K: tl.constexpr, PAIRED: tl.constexpr):
    """Return float32 ``total`` [N, M] plus the products of N rows of a weight with M vectors.

    ``x_at`` [M], ``words_at`` and ``scales_at`` [N] point to vectors and rows of ``SIZE`` elements, a whole number of
    groups. ``PAIRED``: elements become bfloat16, two at once; otherwise they become x's dtype by way of float32.
    """
    NUM_ROWS: tl.constexpr = total.shape[0]
    WORDS: tl.constexpr = BLOCK_K // 4
    GROUPS: tl.constexpr = BLOCK_K // 32
    words, groups = tl.arange(0, WORDS), tl.arange(0, GROUPS)
    columns = words // 8 * 32 + words % 8
    if PAIRED:
        total *= 1 / _TWO_TO_64
    for start in range(0, SIZE, BLOCK_K):
        packed_at = words_at[:, None] + (start // 4 + words)[None, :]
        if SIZE % BLOCK_K == 0:
            packed = tl.load(packed_at)
        else:
            packed = tl.load(packed_at, mask=(start + columns < SIZE)[None, :], other=0)
        scales = tl.load(scales_at[:, None] + (start // 32 + groups)[None, :])  # beyond the row: zeros, or unused
        if PAIRED:
            scales = (scales.to(tl.uint16) << 7).to(tl.bfloat16, bitcast=True)
        else:
            scales = (scales.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
        scales = tl.reshape(tl.broadcast_to(scales[:, :, None], (NUM_ROWS, GROUPS, 8)), (NUM_ROWS, WORDS))
        for quarter in tl.static_range(4):
            # Copies of 16 bytes would pass by the L1 cache, where the other quarters find the rest of a line
            at = tl.max_contiguous(start + 8 * quarter + columns, 4)
            if SIZE % BLOCK_K == 0:
                x = tl.load(x_at[None, :] + at[:, None])
            else:
                x = tl.load(x_at[None, :] + at[:, None], mask=(at < SIZE)[:, None], other=0.0)
            if PAIRED:
                total = tl.dot(_paired(packed, scales, quarter), x, total)
            else:
                weight = _wide(packed, scales, quarter).to(x.dtype)
                total = tl.dot(weight, x, total, input_precision="ieee")
    if PAIRED:
        total *= _TWO_TO_64
    return total


@triton.jit
def _paired(words, scales, QUARTER: tl.constexpr):
    """Return a quarter's elements times ``scales``, bfloat16; two neighbours share a register in each instruction."""
    if QUARTER == 0:
        values = tl.inline_asm_elementwise(
            "{ .reg .b32 t; and.b32 t, $1, 0x81C081C0; mul.rn.bf16x2 $0, t, $2; }",
            "=r,r,r", [words, scales], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    elif QUARTER == 1:
        values = tl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $1, 3; and.b32 t, t, 0x81C081C0; mul.rn.bf16x2 $0, t, $2; }",
            "=r,r,r", [words, scales], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    elif QUARTER == 2:
        values = tl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $1, 6; and.b32 t, t, 0x81C081C0; mul.rn.bf16x2 $0, t, $2; }",
            "=r,r,r", [words, scales], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        values = tl.inline_asm_elementwise(
            "{ .reg .b32 t, u; shl.b32 t, $1, 1; and.b32 t, t, 0x80008000; shr.b32 u, $1, 4; and.b32 u, u, 0x00C000C0; "
            "or.b32 t, t, u; shr.b32 u, $1, 5; and.b32 u, u, 0x01000100; or.b32 t, t, u; mul.rn.bf16x2 $0, t, $2; }",
            "=r,r,r", [words, scales], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    return values


@triton.jit
def _wide(words, scales, QUARTER: tl.constexpr):
    """Return a quarter's elements times ``scales`` in float32. 0.5 is a subnormal number until it is made larger, as it
    is in E2M1."""
    words = words.to(tl.int32)
    if QUARTER < 3:
        bits = (words << (3 * QUARTER)) & 0x81C0
    else:
        bits = ((words << 1) & 0x8000) | ((words >> 4) & 0x00C0) | ((words >> 5) & 0x0100)
    return (bits << 16).to(tl.float32, bitcast=True) * _TWO_TO_126 * (scales / (_TWO_TO_64 / 4))
