"""Chunks of a few tokens over long contexts, which several programs share: how the work is divided, and the answers."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_cases import Lengths, attention_shape, paged_case, replayed
from splitserve.kernels.api import AttentionShape, PagedBatch
from splitserve.kernels.fp8.kv import FP8
from splitserve.kernels.reference.attention import ReferencePagedAttention

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")

from splitserve.kernels.triton.attention import plans as triton_plans
from splitserve.kernels.triton.attention.paged import TritonPagedAttention
from splitserve.kernels.triton.attention.plans import CONTEXT_TILE, QUERY_TILE, UNSPLIT_TILES, chunk_arrays

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.on_gpu]

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# The interpreter rounds casts to bfloat16 towards zero.
NARROW = torch.bfloat16 if ON_GPU else torch.float16
UNSPLIT = UNSPLIT_TILES * CONTEXT_TILE  # tokens


def plain_batch(lengths: Lengths) -> PagedBatch:
    return PagedBatch([query for query, _ in lengths], [context for _, context in lengths], [[]] * len(lengths))


def expected_tiles(lengths: Lengths, first: int) -> dict[int, tuple[int, int, int]]:
    """By first row: its position, rows, sequence."""
    tiles, row = {}, first
    for sequence, (query_len, context) in enumerate(lengths[first:]):
        for offset in range(0, query_len, QUERY_TILE):
            num_rows = min(QUERY_TILE, query_len - offset)
            tiles[row + offset] = (context - query_len + offset, num_rows, sequence)
        row += query_len
    return tiles


def check_division(lengths: Lengths, first: int, num_programs: int) -> tuple[int, int]:
    """Items cover each tile's context once, in parts that all its rows see, within the promised bounds. Returns the
    numbers of tiles and of items."""
    items, joins = chunk_arrays(plain_batch(lengths), first, num_programs)
    joined = {row: (num_rows, slot, parts) for row, num_rows, slot, parts in joins[1:].reshape(4, -1).T.tolist()}
    assert len(joined) == joins[0]
    parts_of: dict[int, list[tuple[int, ...]]] = {}
    for row, *item in items.T.tolist():
        parts_of.setdefault(row, []).append(tuple(item))
    tiles, used = expected_tiles(lengths, first), []
    assert parts_of.keys() == tiles.keys()
    for row, (position, num_rows, sequence) in tiles.items():
        parts = sorted(parts_of[row], key=lambda part: part[3])
        assert all(part[:3] == (position, num_rows, sequence) for part in parts)
        assert parts[0][3] == 0 and parts[-1][4] == position + num_rows
        assert all(before[4] == after[3] for before, after in pairwise(parts))
        assert all(part[3] <= position and part[3] % CONTEXT_TILE == 0 and part[3] < part[4] for part in parts)
        if len(parts) == 1:
            assert parts[0][5] == -1 and row not in joined
        else:
            slots = [part[5] for part in parts]
            assert joined[row] == (num_rows, slots[0], len(parts)) and slots == [
                *range(slots[0], slots[0] + len(parts))
            ]
            used += slots
    num_items = items.shape[1]
    assert len(set(used)) == len(used) and all(0 <= slot < 2 * num_programs for slot in used)
    assert num_items < len(tiles) + num_programs and len(joined) <= min(len(tiles), num_programs - 1)
    sizes = (items[5] - items[4]).tolist()
    assert sizes == sorted(sizes, reverse=True)
    return len(tiles), num_items


def test_the_work_is_divided_within_bounds() -> None:
    chooser = random.Random(0)
    for _ in range(200):
        lengths = [(1, 9)] * (first := chooser.randrange(3))
        for _ in range(chooser.randint(1, 6)):
            query_len = chooser.choice([1, 2, 63, 64, 65, chooser.randint(1, 600)])
            lengths.append((query_len, query_len + chooser.choice([0, 1, chooser.randint(0, 1000), 40_000])))
        check_division(lengths, first, chooser.choice([1, 2, 3, 16, 64]))


def test_only_long_contexts_are_split_and_the_longest_most() -> None:
    assert check_division([(64, UNSPLIT)], 0, 16) == (1, 1)
    assert check_division([(64, UNSPLIT + 64)], 0, 16) == (1, 2)
    assert check_division([(64, 32_768)], 0, 16) == (1, 16)
    assert check_division([(64, 32_768)], 0, 1) == (1, 1)
    num_tiles, num_items = check_division([(64, 64), (64, 200), (64, 32_768)], 0, 16)
    assert num_tiles == 3 and 15 <= num_items - 2 <= 16  # all but two are of the long one
    for length in (512, 1024, 8192):  # keep a GPU busy as they are
        assert check_division([(length, length)], 0, 16) == (length // 64, length // 64)
    assert check_division([(448, 1024)], 0, 16) == (7, 14)


def test_arrays_of_a_fixed_size_end_with_zeros() -> None:
    batch = plain_batch([(1, 5), (10, 2000), (3, 3)])
    items, joins = chunk_arrays(batch, 1, 16)
    wide_items, wide_joins = chunk_arrays(batch, 1, 16, 20, 5)
    assert wide_items.shape == (7, 20) and wide_joins.shape == (21,) and wide_joins[0] == joins[0] == 1
    assert np.array_equal(wide_items[:, : items.shape[1]], items) and not wide_items[:, items.shape[1] :].any()
    assert np.array_equal(wide_joins[1:].reshape(4, 5)[:, :1], joins[1:].reshape(4, 1))
    assert not wide_joins[1:].reshape(4, 5)[:, 1:].any()


def assert_right(actual: Tensor, shape: AttentionShape, case: tuple[Tensor, Tensor, PagedBatch]) -> None:
    query, layer, batch = case
    oracle = ReferencePagedAttention(shape)
    expected = oracle.run(query, layer, oracle.plan(batch))
    tolerance = TOLERANCE[shape.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill memory that no part of a step writes with NaN, so that a read of it shows.

    There are few programs, because they take long to interpret.
    """
    if not ON_GPU:
        monkeypatch.setattr(triton_plans, "PROGRAMS_PER_DEVICE", 16)
    make = triton_plans.chunk_workspace

    def workspace(shape: AttentionShape) -> triton_plans.ChunkWorkspace:
        made = make(shape)
        made.partial.fill_(math.nan)
        made.partial_lse.fill_(math.nan)
        return made

    monkeypatch.setattr("splitserve.kernels.triton.attention.paged.chunk_workspace", workspace)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, NARROW], ids=str)
@pytest.mark.parametrize(
    ("sizes", "lengths"),
    [
        ((2, 1, 64, 64), [(64, 1500)]),
        ((3, 1, 24, 5), [(1, 30), (2, UNSPLIT + 63), (60, 1500), (3, 3), (33, UNSPLIT + 65), (1, 700)]),
        ((2, 2, 80, 16), [(1, UNSPLIT), (5, UNSPLIT + 1), (66, 1153)]),
    ],
    ids=["long", "odd", "edges"],
)
def test_long_contexts(sizes: tuple[int, int, int, int], lengths: Lengths, dtype: torch.dtype) -> None:
    shape = attention_shape(*sizes, dtype, DEVICE)
    case = paged_case(shape, lengths)
    backend = TritonPagedAttention(shape)
    plan = backend.plan(case[2])
    assert plan.chunks is not None and plan.chunks.max_joins
    assert_right(backend.run(case[0], case[1], plan), shape, case)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("num_decodes", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_mixed_plan_of_fixed_size_is_filled_again(num_decodes: int) -> None:
    """With parts, without, and with others: what the last step left doesn't count, nor who ran when."""
    shape = attention_shape(2, 1, 32, 16, torch.float32, DEVICE)
    backend = TritonPagedAttention(shape)
    plan = backend.make_mixed_plans(num_decodes, 130, 3, 100)[0]
    chunks = plan.fixed.chunks
    assert chunks is not None
    kept = (chunks.items.data_ptr(), chunks.joins.data_ptr(), chunks.items.shape)
    steps: list[Lengths] = [
        [(64, 1300)],
        [(20, 40), (30, 30)],
        [(65, 900), (2, UNSPLIT + 66), (3, 3)],
        [(130, 1000)],
        [(1, 1), (7, 1001)],
    ]
    for seed, lengths in enumerate(steps):
        case = paged_case(shape, [*[(1, 20 + seed)] * num_decodes, *lengths], seed)
        plan.update(case[2])
        actual = backend.run(case[0], case[1], plan)
        assert_right(actual, shape, case)
        if num_decodes == 0 and lengths[0][0] > 1:  # else the decode kernel serves the first one
            assert torch.equal(actual, backend.run(case[0], case[1], backend.plan(case[2])))
    assert (chunks.items.data_ptr(), chunks.joins.data_ptr(), chunks.items.shape) == kept


def test_plans_without_long_contexts_and_wide_models_join_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = attention_shape(2, 1, 16, 16, torch.float32, DEVICE)
    short = TritonPagedAttention(shape).make_mixed_plans(0, 64, 2, UNSPLIT // 16)[0].fixed.chunks
    assert short is not None and short.max_joins == 0 and short.items.shape == (7, 3)
    monkeypatch.setattr(triton_plans, "PROGRAMS_PER_DEVICE", 3)
    backend = TritonPagedAttention(shape)
    case = paged_case(shape, [(9, 700)])
    plan = backend.plan(case[2])
    assert plan.chunks is not None and plan.chunks.max_joins == 0 and not plan.chunks.workspace.partial.numel()
    assert_right(backend.run(case[0], case[1], plan), shape, case)


def test_the_workspace_is_bounded() -> None:
    for heads in (1, 8, 32, 64, 300):
        shape = attention_shape(heads, 1, 128, 16, torch.bfloat16, DEVICE)
        workspace = triton_plans.chunk_workspace(shape)
        assert workspace.partial.nbytes + workspace.partial_lse.nbytes <= 36 << 20


@pytest.mark.usefixtures("poisoned")
def test_parts_of_a_context_in_fp8() -> None:
    """The result is that of the same kernels on numbers that were converted before."""
    shape = attention_shape(2, 1, 32, 16, torch.bfloat16 if ON_GPU else torch.float32, DEVICE)
    query, layer, batch = paged_case(shape, [(30, 1000)])
    narrow = torch.zeros((layer.shape[0], 2, *layer.shape[1:]), device=DEVICE).to(FP8)
    narrow[:, 1] = layer.to(FP8)
    backend = TritonPagedAttention(shape)
    plan = backend.plan(batch)
    assert plan.chunks is not None and plan.chunks.max_joins
    actual, expected = (backend.run(query, memory[:, 1], plan) for memory in (narrow, narrow.to(shape.dtype)))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("num_decodes", [0, 4])
def test_a_captured_step_follows_its_plan(num_decodes: int) -> None:
    shape = attention_shape(32, 8, 128, 64, torch.bfloat16, DEVICE)
    backend = TritonPagedAttention(shape)
    steps: list[Lengths] = [
        [(64, 8000)],
        [(64, 64)],
        [(100, 4000), (20, 700), (8, 8)],
        [(30, 5000), (98, 98)],
        [(128, 6001)],
    ]
    cases = [
        paged_case(shape, [*[(1, 100 + 700 * seed)] * num_decodes, *lengths], seed)
        for seed, lengths in enumerate(steps)
    ]
    for actual, case in replayed(backend, shape, num_decodes, 128, [*cases, *cases[::-1]]):
        assert_right(actual, shape, case)


def test_fixed_arrays_are_filled_in_place() -> None:
    """Each ends in zeros; of the last one, nothing is touched beyond what came."""
    sizes = (33, 5, 64, 40)
    fixed = triton_plans.FixedArrays(sizes, DEVICE)
    places = [array.data_ptr() for array in fixed.arrays]
    assert [place % 128 for place in places] == [places[0] % 128] * len(sizes)
    for lengths in ((33, 5, 64, 40), (20, 0, 63, 7), (1, 5, 2, 39)):
        last = fixed.arrays[-1].tolist()
        arrays = [np.arange(1, length + 1, dtype=np.int32) for length in lengths]
        fixed.fill(arrays)
        *others, filled = [array.tolist() for array in fixed.arrays]
        for array, numbers, size in zip(arrays, others, sizes, strict=False):
            assert numbers == array.tolist() + [0] * (size - len(array))
        assert filled == arrays[-1].tolist() + last[lengths[-1] :]
    assert [array.data_ptr() for array in fixed.arrays] == places
