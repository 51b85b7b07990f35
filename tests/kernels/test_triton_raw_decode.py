"""Decode attention of raw queries, keys and values, in one kernel, against the reference's separate operations."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")  # conftest.py chose its interpreter, if need be, before this import
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

from splitserve.kernels.api import AttentionShape, PagedBatch
from splitserve.kernels.fp8.kv import FP8
from splitserve.kernels.raw_qkv import RawQkv
from splitserve.kernels.reference import operations as reference
from splitserve.kernels.reference.attention import ReferencePagedAttention
from splitserve.kernels.triton.attention.paged import TritonPagedAttention
from splitserve.kernels.triton.attention.qkv import prepare_qkv
from splitserve.kernels.tuning import parameters as tuning

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.on_gpu]

# The interpreter rounds casts to bfloat16 towards zero and mixes up its matrix products.
NARROW = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
DTYPES = [torch.float32, NARROW]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
BLOCK_SIZE = 5
CONTEXTS = [1, 2, 5, 6, 70, 65, 64]  # of one token, at a block's edges, at those of tiles


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def case(shape: AttentionShape, *, num_parts: int, with_norm: bool) -> tuple[RawQkv, Tensor, PagedBatch]:
    """A batch of :data:`CONTEXTS`, whose newest keys and values memory doesn't have yet, and the memory of two
    layers, of which the second counts. What isn't written is NaN. Without norms there are biases."""
    heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    num_rows, num_all = len(CONTEXTS), heads + 2 * kv_heads
    tables, used = [], 1
    for context in CONTEXTS:
        count = -(-context // BLOCK_SIZE)
        tables.append(list(range(used, used + count))[::-1])
        used += count
    cache = torch.full((used + 1, 2, kv_heads, 2, BLOCK_SIZE, head_dim), math.nan)
    for index, (context, table) in enumerate(zip(CONTEXTS, tables, strict=True)):
        for position in range(context - 1):
            content = torch.randn(
                (kv_heads, 2, head_dim), generator=torch.Generator().manual_seed(99 * index + position)
            )
            cache[table[position // BLOCK_SIZE], 1, :, :, position % BLOCK_SIZE] = content
    blocks = [table[(context - 1) // BLOCK_SIZE] for context, table in zip(CONTEXTS, tables, strict=True)]
    offsets = [(context - 1) % BLOCK_SIZE for context in CONTEXTS]
    angles = rand(num_rows, head_dim // 2, seed=3)
    rotation = torch.cat((angles.cos(), angles.cos()), 1), torch.cat((-angles.sin(), angles.sin()), 1)
    parts_dtype = torch.float32 if num_parts > 1 else shape.dtype
    raw = RawQkv(
        rand(num_parts, num_rows, num_all, head_dim, dtype=parts_dtype, seed=1),
        rand(heads + kv_heads, head_dim, dtype=shape.dtype, seed=2) if with_norm else None,
        1e-6,
        (rotation[0].to(shape.dtype), rotation[1].to(shape.dtype)),
        shape.slots(torch.tensor(blocks, device=DEVICE), torch.tensor(offsets, device=DEVICE)),
        None if with_norm else rand(num_all * head_dim, dtype=shape.dtype, seed=4),
    )
    return raw, cache.to(shape.dtype).to(DEVICE), PagedBatch([1] * num_rows, CONTEXTS, tables)


def expected_of(shape: AttentionShape, raw: RawQkv, layer: Tensor, batch: PagedBatch, sinks: Tensor | None) -> Tensor:
    """The reference's result; it writes into ``layer``."""
    oracle = ReferencePagedAttention(shape)
    query = reference.prepare_qkv(raw, layer).contiguous()
    return oracle.run(query, layer, oracle.plan(batch), sinks)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def assert_same(shape: AttentionShape, *, num_parts: int, with_norm: bool, sinks: Tensor | None = None) -> None:
    raw, cache, batch = case(shape, num_parts=num_parts, with_norm=with_norm)
    expected_cache = cache.clone()
    expected = expected_of(shape, raw, expected_cache[:, 1], batch, sinks)
    backend = TritonPagedAttention(shape)
    out = backend.prepare_and_run(raw, cache[:, 1], backend.plan(batch), sinks)
    assert out is not None
    assert_close(out, expected)
    assert_close(cache, expected_cache)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_norm", [False, True], ids=["bias", "norm"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 16), (6, 2, 24), (4, 1, 32)])
def test_the_result_and_the_memory_are_those_of_separate_operations(
    heads: int, kv_heads: int, head_dim: int, with_norm: bool, dtype: torch.dtype
) -> None:
    shape = AttentionShape(heads, kv_heads, head_dim, BLOCK_SIZE, 2, dtype, DEVICE)
    for num_parts in (1, 3):
        assert_same(shape, num_parts=num_parts, with_norm=with_norm)


@pytest.mark.parametrize(("window", "soft_cap"), [(None, 1.5), (1, None), (16, None), (64, 1.5), (200, None)])
def test_windows_soft_caps_and_sinks(window: int | None, soft_cap: float | None) -> None:
    shape = AttentionShape(6, 2, 24, BLOCK_SIZE, 2, torch.float32, DEVICE, scale=0.7, soft_cap=soft_cap, window=window)
    sinks = torch.tensor([-3.0, -1.0, 0.0, 0.5, 2.0, 9.0], device=DEVICE)
    assert_same(shape, num_parts=2, with_norm=True)
    assert_same(replace(shape, has_sinks=True), num_parts=2, with_norm=True, sinks=sinks)


@pytest.mark.parametrize("num_parts", [1, 4])
def test_contexts_in_parts(num_parts: int) -> None:
    """Of tiles of 16 tokens, so that contexts have several; the newest token is alone in one."""
    shape = AttentionShape(4, 2, 16, BLOCK_SIZE, 2, torch.float32, DEVICE)
    with tuning.forced("attention_decode", {"num_parts": num_parts, "tile": 16}):
        assert_same(shape, num_parts=2, with_norm=True)


def test_memory_in_fp8_gives_the_newest_token_as_it_gives_others() -> None:
    """Its key and value are rounded before they count, so that a later step, or another worker, sees the same."""
    shape = AttentionShape(4, 2, 16, BLOCK_SIZE, 2, torch.float32, DEVICE)
    raw, cache, batch = case(shape, num_parts=2, with_norm=True)
    narrow, expected_narrow = cache.to(FP8), cache.to(FP8)
    backend = TritonPagedAttention(shape)
    plan = backend.plan(batch)
    out = backend.prepare_and_run(raw, narrow[:, 1], plan)
    assert out is not None
    assert_close(out, backend.run(prepare_qkv(raw, expected_narrow[:, 1]), expected_narrow[:, 1], plan))
    assert_close(narrow.float(), expected_narrow.float())


def test_rows_that_pad_a_graph_write_nothing() -> None:
    """They repeat the last sequence, have its result, and have other numbers themselves."""
    shape = AttentionShape(4, 2, 16, BLOCK_SIZE, 2, torch.float32, DEVICE)
    raw, cache, batch = case(shape, num_parts=1, with_norm=True)
    expected_cache, num_rows = cache.clone(), len(CONTEXTS)
    expected = expected_of(shape, raw, expected_cache[:, 1], batch, None)
    padded = replace(
        raw,
        parts=torch.cat((raw.parts, torch.full_like(raw.parts[:, :3], math.nan)), 1),
        rotation=(torch.cat((raw.rotation[0],) * 2)[: num_rows + 3], torch.cat((raw.rotation[1],) * 2)[: num_rows + 3]),
        slots=torch.cat((raw.slots, torch.full_like(raw.slots[:3], -1))),
    )
    backend = TritonPagedAttention(shape)
    plan = backend.make_decode_plan(num_rows + 3, 20)
    tables = [*batch.block_tables, *[batch.block_tables[-1]] * 3]
    plan.update(PagedBatch([1] * (num_rows + 3), [*CONTEXTS, *CONTEXTS[-1:] * 3], tables))
    out = backend.prepare_and_run(padded, cache[:, 1], plan)
    assert out is not None
    assert_close(out, torch.cat((expected, expected[-1:].expand(3, -1, -1))))
    assert_close(cache, expected_cache)


def test_steps_with_longer_chunks_have_no_such_kernel() -> None:
    shape = AttentionShape(4, 2, 16, BLOCK_SIZE, 2, torch.float32, DEVICE)
    raw, cache, _ = case(shape, num_parts=1, with_norm=True)
    before = cache.clone()
    backend = TritonPagedAttention(shape)
    plan = backend.plan(PagedBatch([1, len(CONTEXTS) - 1], [9, 9], [[0, 1], [2, 3]]))
    assert backend.prepare_and_run(raw, cache[:, 1], plan) is None
    assert_close(cache, before)
