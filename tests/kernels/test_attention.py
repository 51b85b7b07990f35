"""Paged attention against an oracle in float64 that reads the KV memory token by token."""

import math
import random

import pytest
import torch
from torch import Tensor

from splitserve.kernels.api import AttentionShape, PagedBatch
from splitserve.kernels.paged import flat_tables
from splitserve.kernels.reference import attend, attention

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def make_shape(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype = torch.float32
) -> AttentionShape:
    return AttentionShape(heads, kv_heads, head_dim, block_size, num_layers=3, dtype=dtype, device=CPU)


def oracle(query: Tensor, kv_layer: Tensor, batch: PagedBatch, block_size: int) -> Tensor:
    """One query token and head at a time, over keys and values looked up one by one."""
    out = torch.empty(query.shape, dtype=torch.float64)
    group_size = query.shape[1] // kv_layer.shape[1]
    row = 0
    for query_len, context, table in zip(batch.query_lens, batch.context_lens, batch.block_tables, strict=True):
        blocks = torch.tensor([table[token // block_size] for token in range(context)])
        offsets = torch.arange(context) % block_size
        tokens = kv_layer[blocks, :, :, offsets].double()  # [context, G, 2, D]
        for position in range(context - query_len, context):
            for head in range(query.shape[1]):
                keys, values = tokens[: position + 1, head // group_size].unbind(1)
                scores = keys @ query[row, head].double() / math.sqrt(query.shape[2])
                out[row, head] = scores.softmax(0) @ values
            row += 1
    return out


def make_case(shape: AttentionShape, lengths: list[tuple[int, int]], seed: int) -> tuple[Tensor, Tensor, PagedBatch]:
    """``lengths`` are (query, context). Blocks are scattered, and what no sequence owns is NaN."""
    chooser, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    needed = [-(-context // shape.block_size) for _, context in lengths]
    num_blocks = sum(needed) + 3
    ids = list(range(num_blocks))
    chooser.shuffle(ids)
    cache = torch.full(
        (num_blocks, shape.num_layers, shape.num_kv_heads, 2, shape.block_size, shape.head_dim), math.nan
    ).to(shape.dtype)
    layer = cache[:, 1]
    tables = []
    for (_, context), count in zip(lengths, needed, strict=True):
        table, ids = ids[:count], ids[count:]
        tables.append(table)
        for token in range(context):
            content = torch.randn(shape.num_kv_heads, 2, shape.head_dim, generator=generator)
            layer[table[token // shape.block_size], :, :, token % shape.block_size] = content.to(shape.dtype)
    num_tokens = sum(query for query, _ in lengths)
    query = torch.randn(num_tokens, shape.num_heads, shape.head_dim, generator=generator).to(shape.dtype)
    batch = PagedBatch([query for query, _ in lengths], [context for _, context in lengths], tables)
    return query, layer, batch


def check(shape: AttentionShape, lengths: list[tuple[int, int]], seed: int = 0) -> None:
    query, layer, batch = make_case(shape, lengths, seed)
    backend = attention.ReferencePagedAttention(shape)
    actual = backend.run(query, layer, backend.plan(batch))
    assert actual.shape == query.shape and actual.dtype == query.dtype
    tolerance = 3e-6 if shape.dtype == torch.float32 else 3e-2
    expected = oracle(query, layer, batch, shape.block_size)
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(1, 1, 8, 1), (4, 4, 16, 4), (6, 2, 24, 5), (8, 1, 32, 16), (16, 8, 128, 16)],
)
def test_mixed_steps_of_decodes_and_chunks(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    shape = make_shape(heads, kv_heads, head_dim, block_size, dtype)
    check(shape, [(1, 1), (1, 17), (1, 16), (1, 3), (5, 5), (7, 30), (2, 2), (1, 40)], seed=heads)


@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 1)],
        [(1, 64)],
        [(33, 33)],
        [(16, 48)],
        [(1, 100), (1, 100), (1, 100)],
        [(1, 100), (1, 99), (1, 80), (1, 2)],
        [(200, 300)],
        [(64, 64), (65, 129), (127, 128), (128, 500)],
    ],
)
def test_single_kinds(lengths: list[tuple[int, int]]) -> None:
    check(make_shape(4, 2, 16, 16), lengths)


def test_contexts_longer_than_the_buffer_are_attended_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = make_shape(4, 2, 16, 4)
    three_blocks = 3 * 2 * 2 * 4 * 16 * 4
    monkeypatch.setattr(attention, "GATHER_BYTES", three_blocks)
    check(shape, [(1, 12), (1, 13), (1, 50), (9, 50), (3, 15), (4, 4), (20, 20), (1, 1), (1, 2)])


def test_the_buffer_stays_bounded_for_long_contexts() -> None:
    shape = make_shape(2, 2, 64, 16)
    backend = attention.ReferencePagedAttention(shape)
    batch = PagedBatch([1, 64, 1], [50_000, 50_000, 40_000], [range(4000)] * 3)
    backend.plan(batch)
    assert backend.buffer_bytes <= 2 * attention.GATHER_BYTES


def test_a_layer_view_of_other_strides_is_refused() -> None:
    shape = make_shape(2, 2, 8, 4)
    query, layer, batch = make_case(shape, [(1, 3)], 0)
    backend = attention.ReferencePagedAttention(shape)
    with pytest.raises(AssertionError):
        backend.run(query, layer.contiguous(), backend.plan(batch))


def test_the_portable_form_of_attention_agrees_with_the_fused_one() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 6, 9, 16, generator=generator)
    keys, values = (torch.randn(1, 2, 12, 16, generator=generator) for _ in range(2))
    for mask in (None, torch.full((9, 12), -math.inf).triu_(4)):
        fused = attend.attend(query, keys, values, mask, 0.25)
        portable = attend.attend_portable(query, keys, values, mask, 0.25)
        for left, right in zip(fused, portable, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def test_a_table_that_does_not_cover_its_context_is_refused() -> None:
    tables = flat_tables(PagedBatch([1, 1], [65, 3], [[3, 4, 5], (7,)]), 64)
    assert (tables.indptr.tolist(), tables.indices.tolist()) == ([0, 2, 3], [3, 4, 7])
    with pytest.raises(ValueError, match="shorter than its context"):
        flat_tables(PagedBatch([1], [65], [[3]]), 64)
