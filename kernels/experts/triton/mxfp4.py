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
def packed_product(
    x_at, words_ptr, scales_ptr, row, total, part, ROWS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    SPLIT_K: tl.constexpr, BLOCK_K: tl.constexpr, PAIRED: tl.constexpr, ALL_ROWS: tl.constexpr,
):  # fmt: skip
    """Return float32 ``total`` [N, M] plus the products of N rows of a weight with M vectors, of part ``part`` of
    ``SPLIT_K``.

    ``x_at`` [M] points to the vectors, ``words_ptr`` and ``scales_ptr`` to a matrix of ``ROWS`` rows of ``SIZE``
    elements, padded to ``PADDED`` (:func:`splitserve.kernels.experts.mxfp4.padded_size`); ``row`` [N] are those to
    multiply. They are below ``ROWS`` if ``ALL_ROWS``; others count as zeros.
    ``PAIRED``: elements become bfloat16, two at once; otherwise they become x's dtype by way of float32.
    """
    NUM_ROWS: tl.constexpr = total.shape[0]
    is_row = row < ROWS
    WORDS: tl.constexpr = BLOCK_K // 4
    BLOCKS: tl.constexpr = BLOCK_K // 128
    REST: tl.constexpr = PADDED % 128
    PART_K: tl.constexpr = (PADDED + SPLIT_K * BLOCK_K - 1) // (SPLIT_K * BLOCK_K) * BLOCK_K
    ALL_WORDS: tl.constexpr = PADDED == SPLIT_K * PART_K
    ALL_BLOCKS: tl.constexpr = (PADDED + 127) // 128 * 128 == SPLIT_K * PART_K
    words, blocks = tl.arange(0, WORDS), tl.arange(0, BLOCKS)
    if PAIRED:
        total *= 1 / _TWO_TO_64
    for offset in range(0, PART_K, BLOCK_K):
        start = part * PART_K + offset
        block = start
        if BLOCKS > 1:
            block += words // 32 * 128
        width = 32
        if REST > 0:
            width = tl.where(block + 128 <= PADDED, 32, REST // 4)
        has_word = words < (PADDED - start) // 4
        at = ((block // 4 * ROWS) + words % 32)[None, :] + row[:, None] * (width + words * 0)[None, :]
        at = tl.max_contiguous(tl.multiple_of(at, [1, 8]), [1, 8])
        packed = _load(words_ptr + at, is_row[:, None], has_word[None, :], ALL_ROWS, ALL_WORDS)
        if not PAIRED:
            packed = _with_other(words_ptr, at, packed, words, is_row[:, None] & has_word[None, :])
        number = start // 128 + blocks
        scales_at = scales_ptr + row[:, None] + number[None, :] * ROWS
        has_block = number < (PADDED + 127) // 128
        all_scales = _load(scales_at, is_row[:, None], has_block[None, :], ALL_ROWS, ALL_BLOCKS)
        for quarter in tl.static_range(4):
            # Copies of 16 bytes would pass by the L1 cache, where other programs of the expert find the line
            at = tl.max_contiguous(tl.multiple_of(block + width * quarter + words % 32, 4), 4)
            in_x = has_word
            if SIZE != PADDED:
                in_x &= at < SIZE
            x = _load(x_at[None, :] + at[:, None], in_x[:, None], in_x[:, None], ALL_WORDS and SIZE == PADDED, True)
            scales = (all_scales >> (8 * quarter)) & 255
            scales = scales * 0x00800080 if PAIRED else (scales << 23).to(tl.float32, bitcast=True)
            scales = tl.reshape(tl.broadcast_to(scales[:, :, None], (NUM_ROWS, BLOCKS, 32)), (NUM_ROWS, WORDS))
            if PAIRED:
                total = tl.dot(_paired(packed, scales, quarter), x, total)
            else:
                weight = _wide(packed, scales, (words % 2 * 16)[None, :], quarter).to(x.dtype)
                total = tl.dot(weight, x, total, input_precision="ieee")
    if PAIRED:
        total *= _TWO_TO_64
    return total


@triton.jit
def _load(at, first, second, ALL_FIRST: tl.constexpr, ALL_SECOND: tl.constexpr):
    """Load what both masks let through, zeros elsewhere; a mask that is all true isn't read."""
    if ALL_FIRST and ALL_SECOND:
        values = tl.load(at)
    elif ALL_FIRST:
        values = tl.load(at, mask=second, other=0)
    elif ALL_SECOND:
        values = tl.load(at, mask=first, other=0)
    else:
        values = tl.load(at, mask=first & second, other=0)
    return values


@triton.constexpr_function
def unpacking(quarter, words, scales):
    """Return PTX that leaves a quarter's elements of a pair of words, times their scales, in register ``t``, two
    bfloat16. ``words`` and ``scales``: the operands' names. See :data:`splitserve.kernels.experts.mxfp4.ROTATIONS`."""
    places = (
        f"and.b32 t, {words}, 0x81C081C0; ",
        f"shl.b32 t, {words}, 4; and.b32 t, t, 0x81C081C0; ",
        f"shf.l.wrap.b32 t, {words}, {words}, 10; and.b32 t, t, 0x81C081C0; ",
        f"shf.l.wrap.b32 t, {words}, {words}, 14; shl.b32 u, {words}, 6; and.b32 u, u, 0x00400040; "
        "lop3.b32 t, t, 0x81808180, u, 0xEA; ",
    )
    return f" .reg .b32 t, u; {places[quarter]}mul.rn.bf16x2 t, t, {scales}; "


@triton.jit
def _paired(words, scales, QUARTER: tl.constexpr):
    """Return a quarter's elements times ``scales``, bfloat16; two neighbours share a register in each instruction.

    ``scales`` are int32, twice the bfloat16; the neighbours have the same one, and the second's isn't read. A register
    must hold a pair of words as :func:`splitserve.kernels.experts.mxfp4.by_quarters` made it: bits of an element are in
    both. Triton's layouts for matrix instructions do so; the tests on GPUs would show it if they didn't.
    """
    PTX: tl.constexpr = unpacking(QUARTER, "$1", "$2")
    return tl.inline_asm_elementwise(
        "{" + PTX + "mov.b32 $0, t; }", "=r,r,r,r", [words, scales], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def _with_other(words_ptr, at, packed, words, mask):
    """Return the pairs uint32 of which ``packed`` are one word each."""
    own = packed.to(tl.uint32) & 0xFFFF
    other = tl.load(words_ptr + (at ^ 1), mask=mask, other=0).to(tl.uint32) & 0xFFFF
    is_second = (words % 2 == 1)[None, :]
    return tl.where(is_second, (own << 16) | other, (other << 16) | own)


@triton.jit
def _wide(pairs, scales, half, QUARTER: tl.constexpr):
    """Return a quarter's elements times ``scales`` in float32, of each pair those from bit ``half`` on. 0.5 is a
    subnormal number until it is made larger, as it is in E2M1."""
    if QUARTER == 0:
        bits = pairs
    elif QUARTER == 1:
        bits = pairs << 4
    elif QUARTER == 2:
        bits = (pairs << 10) | (pairs >> 22)
    else:
        bits = (((pairs << 14) | (pairs >> 18)) & 0x81808180) | ((pairs << 6) & 0x00400040)
    bits = (bits >> half) & 0x81C0
    return (bits << 16).to(tl.float32, bitcast=True) * _TWO_TO_126 * (scales / (_TWO_TO_64 / 4))
