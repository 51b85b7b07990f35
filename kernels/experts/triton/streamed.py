"""Products of few pairs with their experts' weights in MXFP4, whose words go straight from memory to the registers from
which matrix instructions take them.

The kernels are memory-bound: each warp has rows of its own and loads blocks ahead, without shared memory and
barriers. They are in Gluon, Triton's language with layouts, since layouts are their point: a lane reads the words of
its own elements, 16 bytes at once (:func:`splitserve.kernels.experts.mxfp4.by_quarters`), and the vectors' elements
likewise. Sums have one order, as in :mod:`splitserve.kernels.experts.triton.grouped`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from splitserve.kernels.experts.triton.activation import activate
from splitserve.kernels.experts.triton.mxfp4 import unpacking

ROWS_OF_WARP = 16  # of a matrix instruction: a warp has as many or a multiple
_TWO_TO_64 = gl.constexpr(2.0**64)


@gluon.constexpr_function
def _word_layout(rows, warps):
    """Return the layout of a block's pairs of words [rows, 16]: a lane has a quarter of a row."""
    first = ROWS_OF_WARP * warps
    own = [[0, 1], [0, 2], [8, 0]] + [[first << i, 0] for i in range((rows // first).bit_length() - 1)]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    others = [[ROWS_OF_WARP << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(own, lanes, others, [], [rows, 16])


@gluon.constexpr_function
def _vector_layout(columns, warps):
    """Return the layout of a quarter's elements of vectors [32, columns]: all warps have the same."""
    own = [[1, 0], [2, 0], [4, 0]] + [[0, 8 << i] for i in range((columns // 8).bit_length() - 1)]
    lanes = [[8, 0], [16, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout(own, lanes, [[0, 0]] * (warps.bit_length() - 1), [], [32, columns])


@gluon.constexpr_function
def _sum_layout(warps):
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@gluon.constexpr_function
def _padded(size):
    """See :func:`splitserve.kernels.experts.mxfp4.padded_size`."""
    return size + 32 if size % 128 == 96 else size


@gluon.jit
def _wait(OVERLAPPED: gl.constexpr):
    """Wait for the end of the previous kernel."""
    if OVERLAPPED:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _let_next_start(OVERLAPPED: gl.constexpr):
    """Let the next kernel start once all programs have come here."""
    if OVERLAPPED:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _unpacked(pairs, scales, QUARTER: gl.constexpr):
    """Return a quarter's elements times ``scales``, bfloat16 [R, 32], of pairs of words [R, 16].

    ``scales`` are int32, twice the bfloat16.
    """
    PTX: gl.constexpr = unpacking(QUARTER, "$2", "$3")
    first, second = gl.inline_asm_elementwise(
        "{" + PTX + "mov.b32 {$0, $1}, t; }",
        "=h,=h,r,r", [pairs, scales], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.reshape(gl.join(first, second), [pairs.shape[0], 32])


@gluon.jit
def _vectors(x_at):
    """Load the vectors' elements of a block, by quarter."""
    return (gl.load(x_at), gl.load(x_at + 32), gl.load(x_at + 64), gl.load(x_at + 96))


@gluon.jit
def _add_block(total, pairs, scales, vectors):
    """Return ``total`` plus the products of a block."""
    ROWS: gl.constexpr = total.shape[0]
    COLUMNS: gl.constexpr = total.shape[1]
    SUMS: gl.constexpr = total.type.layout
    for quarter in gl.static_range(4):
        # A byte is taken twice, and comes to a bfloat16's exponent
        doubled = gl.inline_asm_elementwise(
            "{ .reg .b32 t; prmt.b32 t, $1, 0, $2; shl.b32 $0, t, 7; }",
            "=r,r,n", [scales, 0x4040 + 0x0101 * quarter], dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        # A lane's elements in one order in both: those that a matrix instruction takes at once are neighbours
        weight = gl.reshape(_unpacked(pairs, doubled[:, None] + gl.zeros_like(pairs), quarter), [ROWS, 4, 2, 2, 2])
        weight = gl.reshape(gl.permute(weight, (0, 3, 1, 2, 4)), [ROWS, 32])
        x = gl.permute(gl.reshape(vectors[quarter], [4, 2, 2, 2, COLUMNS]), (2, 0, 1, 3, 4))
        x = gl.reshape(x, [32, COLUMNS])
        weight = gl.convert_layout(weight, gl.DotOperandLayout(0, SUMS, 4), assert_trivial=True)
        x = gl.convert_layout(x, gl.DotOperandLayout(1, SUMS, 4), assert_trivial=True)
        total = mma_v2(weight, x, total)
    return total


@gluon.jit
def _product(
    x_at, words_ptr, scales_ptr, row, part, NUM_ROWS: gl.constexpr, SIZE: gl.constexpr, SPLIT_K: gl.constexpr,
    AHEAD: gl.constexpr, WARPS: gl.constexpr, SORTED: gl.constexpr,
):  # fmt: skip
    """Return the products float32 [R, M] of R rows of a matrix with M vectors, of part ``part`` of ``SPLIT_K``.

    ``x_at`` [M] points to the vectors, ``words_ptr`` (int32, a pair each) and ``scales_ptr`` to a matrix of
    ``NUM_ROWS`` rows of ``SIZE`` elements; ``row`` [R] are those to multiply. ``AHEAD``: blocks that are loaded ahead.
    """
    VECTORS: gl.constexpr = _vector_layout(x_at.shape[0], WARPS)
    WORDS: gl.constexpr = _word_layout(row.shape[0], WARPS)
    BLOCKS: gl.constexpr = SIZE // 128 // SPLIT_K  # of each part; the last part has those that are left, too
    LEFT: gl.constexpr = SIZE // 128 % SPLIT_K
    POLICY: gl.constexpr = "evict_first" if SORTED else ""  # of a single token it made nothing quicker
    REST: gl.constexpr = _padded(SIZE) // 16 - SIZE // 128 * 8  # words of a lane in a last, shorter block
    column, k = gl.arange(0, 16, layout=gl.SliceLayout(0, WORDS)), gl.arange(0, 32, layout=gl.SliceLayout(1, VECTORS))
    pairs_at = words_ptr + (row[:, None] * 16 + column[None, :])
    vectors_at = x_at[None, :] + k[:, None]
    first = part * BLOCKS
    pairs, scales, left_pairs, left_scales = (), (), (), ()
    if BLOCKS > 0:
        for ahead in gl.static_range(AHEAD):
            number = first + gl.minimum(ahead, BLOCKS - 1)
            pairs += (gl.load(pairs_at + number * (NUM_ROWS * 16), eviction_policy=POLICY),)
            scales += (gl.load(scales_ptr + row + number * NUM_ROWS),)
        vectors = _vectors(vectors_at + first * 128)
    is_last = gl.where(part == SPLIT_K - 1, 16, 0) > column
    for left in gl.static_range(LEFT):
        number = SPLIT_K * BLOCKS + left
        left_pairs += (gl.load(pairs_at + number * (NUM_ROWS * 16), mask=is_last[None, :], other=0),)
        left_scales += (gl.load(scales_ptr + row + number * NUM_ROWS),)
    if REST > 0:
        rest_at = row[:, None] * (2 * REST) + (column // 4 * (REST // 2) + column % 4)[None, :]
        has_pair = is_last & (column % 4 < REST // 2)
        rest_pairs = gl.load(words_ptr + SIZE // 128 * (NUM_ROWS * 16) + rest_at, mask=has_pair[None, :], other=0)
        rest_scales = gl.load(scales_ptr + row + SIZE // 128 * NUM_ROWS)
    total = gl.zeros([row.shape[0], x_at.shape[0]], gl.float32, layout=_sum_layout(WARPS))
    if BLOCKS > 0:
        for base in range(0, BLOCKS // AHEAD * AHEAD, AHEAD):
            next_pairs, next_scales = (), ()
            for ahead in gl.static_range(AHEAD):
                number = first + gl.minimum(base + ahead + 1, BLOCKS - 1)
                next_vectors = _vectors(vectors_at + number * 128)
                total = _add_block(total, pairs[ahead], scales[ahead], vectors)
                vectors = next_vectors
                number = first + gl.minimum(base + ahead + AHEAD, BLOCKS - 1)
                next_pairs += (gl.load(pairs_at + number * (NUM_ROWS * 16), eviction_policy=POLICY),)
                next_scales += (gl.load(scales_ptr + row + number * NUM_ROWS),)
            pairs, scales = next_pairs, next_scales
        for ahead in gl.static_range(BLOCKS % AHEAD):
            if ahead > 0:
                vectors = _vectors(vectors_at + (first + BLOCKS - BLOCKS % AHEAD + ahead) * 128)
            total = _add_block(total, pairs[ahead], scales[ahead], vectors)
    for left in gl.static_range(LEFT):
        vectors = _vectors(vectors_at + (SPLIT_K * BLOCKS + left) * 128)
        total = _add_block(total, left_pairs[left], left_scales[left], vectors)
    if REST > 0:
        vectors = _rest_vectors(x_at, k, SIZE, REST)
        total = _add_block(total, rest_pairs, rest_scales, vectors)
    return total * _TWO_TO_64


@gluon.jit
def _rest_vectors(x_at, k, SIZE: gl.constexpr, REST: gl.constexpr):
    """Load the vectors' elements of the last, shorter block, of which a quarter has ``4 * REST``."""
    vectors = ()
    for quarter in gl.static_range(4):
        at = SIZE // 128 * 128 + quarter * (4 * REST) + k // 8 * REST + k % 8
        inside = (k % 8 < REST) & (at < SIZE)
        vectors += (gl.load(x_at[None, :] + at[:, None], mask=inside[:, None], other=0.0),)
    return vectors


@gluon.jit
def _pairs_of(pairs_ptr, experts_ptr, num_pairs, first, SORTED: gl.constexpr, COLUMNS: gl.constexpr,
              LAYOUT: gl.constexpr):  # fmt: skip
    """Return the tile's expert of the rank, int64, and its pairs [COLUMNS]; ``num_pairs`` stands for none."""
    number, columns = gl.program_id(1), gl.arange(0, COLUMNS, layout=LAYOUT)
    if SORTED:
        expert = gl.load(experts_ptr + number)
        pairs = gl.load(
            pairs_ptr + number * COLUMNS + columns, mask=columns < gl.where(expert < 0, 0, COLUMNS), other=0
        )
    else:
        expert = gl.load(experts_ptr + number) - first
        pairs = gl.where(columns == 0, number, num_pairs)
    return expert.to(gl.int64), pairs


@gluon.jit
def gate_up_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_pairs,
    first,
    num_experts,
    limit,
    sigmoid_factor,
    up_offset,
    pairs_ptr,
    experts_ptr,
    HIDDEN: gl.constexpr,
    INNER: gl.constexpr,
    TOP_K: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
    FUNCTION: gl.constexpr,
    SORTED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    AHEAD: gl.constexpr,
    WARPS: gl.constexpr,
    OVERLAPPED: gl.constexpr,
):
    """See :func:`splitserve.kernels.experts.triton.packed.packed_gate_up`."""
    VECTORS: gl.constexpr = gl.SliceLayout(0, _vector_layout(BLOCK_M, WARPS))
    SUMS: gl.constexpr = _sum_layout(WARPS)
    _wait(OVERLAPPED)
    expert, pairs = _pairs_of(pairs_ptr, experts_ptr, num_pairs, first, SORTED, BLOCK_M, VECTORS)
    if (expert < 0) | (expert >= num_experts):
        return
    tokens = (gl.where(pairs < num_pairs, pairs, gl.min(pairs, 0)) // TOP_K).to(gl.int64)
    row = _gate_up_rows(BLOCK_N, INNER, INTERLEAVED, gl.SliceLayout(1, _word_layout(2 * BLOCK_N, WARPS)))
    words_ptr += expert * (2 * INNER * (_padded(HIDDEN) // 8))
    scales_ptr += expert * (2 * INNER * ((HIDDEN + 127) // 128))
    bias = 0.0
    if HAS_BIAS:
        biased = _gate_up_rows(BLOCK_N, INNER, INTERLEAVED, gl.SliceLayout(1, SUMS))
        bias = gl.load(bias_ptr + expert * (2 * INNER) + biased).to(gl.float32)[:, None]
    total = _product(x_ptr + tokens * HIDDEN, words_ptr, scales_ptr, row, 0, 2 * INNER, HIDDEN, 1, AHEAD, WARPS, SORTED)
    total += bias
    # Not sooner: the down projection is long, and its programs would be placed unevenly
    _let_next_start(OVERLAPPED)
    both = gl.permute(gl.reshape(total, [BLOCK_N // 8, 2, 8, BLOCK_M]), (0, 2, 3, 1))
    gate, up = gl.split(gl.reshape(both, [BLOCK_N, BLOCK_M, 2]))
    inner = activate(gate, up, limit, sigmoid_factor, up_offset, HAS_LIMIT, FUNCTION)
    OUT: gl.constexpr = inner.type.layout
    outputs = gl.program_id(0) * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, OUT))
    pairs = gl.convert_layout(pairs, gl.SliceLayout(0, OUT))
    at = out_ptr + gl.minimum(pairs, num_pairs - 1).to(gl.int64)[None, :] * INNER + outputs[:, None]
    gl.store(at, inner.to(out_ptr.dtype.element_ty), mask=(pairs < num_pairs)[None, :] & (outputs < INNER)[:, None])


@gluon.jit
def _gate_up_rows(BLOCK_N: gl.constexpr, INNER: gl.constexpr, INTERLEAVED: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the rows [2 * BLOCK_N] of the program's outputs: those of eight gates, then of their ups, and so on. Rows
    of outputs beyond the last are the last one's."""
    number = gl.arange(0, 2 * BLOCK_N, layout=LAYOUT)
    output = gl.minimum(gl.program_id(0) * BLOCK_N + number // 16 * 8 + number % 8, INNER - 1)
    is_up = number % 16 // 8
    return 2 * output + is_up if INTERLEAVED else output + is_up * INNER


@gluon.jit
def down_kernel(
    inner_ptr,
    words_ptr,
    scales_ptr,
    bias_ptr,
    factors_ptr,
    out_ptr,
    num_pairs,
    first,
    num_experts,
    pairs_ptr,
    experts_ptr,
    HIDDEN: gl.constexpr,
    INNER: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SORTED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    AHEAD: gl.constexpr,
    SPLIT_K: gl.constexpr,
    WARPS: gl.constexpr,
    OVERLAPPED: gl.constexpr,
):
    """See :func:`splitserve.kernels.experts.triton.packed.packed_down`."""
    VECTORS: gl.constexpr = gl.SliceLayout(0, _vector_layout(BLOCK_M, WARPS))
    SUMS: gl.constexpr = _sum_layout(WARPS)
    _let_next_start(OVERLAPPED)  # the sums are short
    _wait(OVERLAPPED)
    expert, pairs = _pairs_of(pairs_ptr, experts_ptr, num_pairs, first, SORTED, BLOCK_M, VECTORS)
    if (expert < 0) | (expert >= num_experts):
        return
    safe_pairs = gl.where(pairs < num_pairs, pairs, gl.min(pairs, 0)).to(gl.int64)
    part, number = gl.program_id(2), gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, _word_layout(BLOCK_N, WARPS)))
    row = gl.minimum(gl.program_id(0) * BLOCK_N + number, HIDDEN - 1)
    outputs = gl.program_id(0) * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, SUMS))
    words_ptr += expert * (HIDDEN * (_padded(INNER) // 8))
    scales_ptr += expert * (HIDDEN * ((INNER + 127) // 128))
    bias = 0.0
    if HAS_BIAS:
        has_bias = outputs < gl.where(part == 0, HIDDEN, 0)
        bias = gl.load(bias_ptr + expert * HIDDEN + outputs, mask=has_bias, other=0.0).to(gl.float32)[:, None]
    pairs = gl.convert_layout(pairs, gl.SliceLayout(0, SUMS))
    out_pairs = gl.convert_layout(safe_pairs, gl.SliceLayout(0, SUMS))
    factors = gl.load(factors_ptr + out_pairs)[None, :]
    total = _product(
        inner_ptr + safe_pairs * INNER, words_ptr, scales_ptr, row, part, HIDDEN, INNER, SPLIT_K, AHEAD, WARPS, SORTED
    )  # fmt: skip
    total = (total + bias) * factors
    at = out_ptr + (out_pairs * SPLIT_K + part)[None, :] * HIDDEN + outputs[:, None]
    gl.store(at, total.to(out_ptr.dtype.element_ty), mask=(pairs < num_pairs)[None, :] & (outputs < HIDDEN)[:, None])
