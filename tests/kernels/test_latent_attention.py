"""Latent attention by its definition: both forms of the reference, and Triton's kernels under their interpreter."""

import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from splitserve.kernels.api import AttentionShape, LatentAttention, PagedBatch
from splitserve.kernels.fp8.kv import FP8
from splitserve.kernels.latent import reference
from splitserve.kernels.latent.shape import LatentShape

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.on_gpu]

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
Lengths = Sequence[tuple[int, int]]  # (query tokens, context) of each sequence
LAYER, NUM_LAYERS = 1, 2
# (heads, block size, sizes): heads that are no power of two, odd sizes, values wider than keys
SHAPES = [
    (1, 16, LatentShape(64, 16, 8, 16)),
    (7, 4, LatentShape(40, 24, 6, 20)),
    (20, 8, LatentShape(32, 12, 10, 40)),
]
LENGTHS: list[Lengths] = [
    [(1, 1)],
    [(1, 15), (1, 16), (1, 17), (1, 33), (1, 70)],
    [(16, 16), (2, 17), (33, 65), (3, 3), (1, 31)],
]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
DTYPES = [torch.bfloat16] if ON_GPU else [torch.float32, torch.float16]  # the interpreter truncates to bfloat16


def shape_of(sizes: tuple[int, int, LatentShape], dtype: torch.dtype = torch.float32) -> AttentionShape:
    heads, block_size, latent = sizes
    return AttentionShape(heads, 1, latent.rotated_dim, block_size, NUM_LAYERS, dtype, DEVICE, scale=0.3, latent=latent)


def case(shape: AttentionShape, lengths: Lengths, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, PagedBatch]:
    """Return queries [T, H, query_dim], an expansion, one layer of memory [num_blocks, B, width], and the batch.

    Blocks are shuffled; a table is longer than its context needs; memory that no sequence wrote is NaN.
    """
    latent, size = shape.latent, shape.block_size
    assert latent is not None
    needed = [-(-context // size) for _, context in lengths]
    ids = random.Random(seed).sample(range(sum(needed) + 4), sum(needed) + 1)
    unused = ids.pop()
    generator = torch.Generator().manual_seed(seed)
    memory = torch.full((sum(needed) + 4, shape.num_layers, size, latent.width), math.nan)
    tables = []
    for (_, context), count in zip(lengths, needed, strict=True):
        table, ids = ids[:count], ids[count:]
        content = torch.randn((count * size, latent.width), generator=generator)
        content[context:] = math.nan
        memory[table, LAYER] = content.view(count, size, latent.width)
        tables.append([*table, unused])
    num_tokens = sum(query_len for query_len, _ in lengths)
    query = torch.randn((num_tokens, shape.num_heads, latent.query_dim), generator=generator)
    expansion = torch.randn(
        (shape.num_heads, latent.plain_dim + latent.value_dim, latent.rank), generator=generator
    ) / math.sqrt(latent.rank)
    batch = PagedBatch([query_len for query_len, _ in lengths], [context for _, context in lengths], tables)
    query, expansion, memory = (each.to(shape.dtype).to(DEVICE) for each in (query, expansion, memory))
    return query, expansion, memory[:, LAYER], batch


def defined(shape: AttentionShape, query: Tensor, expansion: Tensor, kv_layer: Tensor, batch: PagedBatch) -> Tensor:
    """Return the result by the definition, token by token, in float64."""
    latent = shape.latent
    assert latent is not None and shape.scale is not None
    wide, memory, expand = query.double(), kv_layer.double(), expansion.double()
    rows = []
    for query_len, context, table in zip(batch.query_lens, batch.context_lens, batch.block_tables, strict=True):
        cached = memory[list(table)].flatten(0, 1)[:context]
        both = torch.einsum("cr,hdr->hcd", cached[:, : latent.rank], expand)
        keys, values = both[..., : latent.plain_dim], both[..., latent.plain_dim :]
        keys = torch.cat((keys, cached[:, latent.rank :].expand(keys.shape[0], -1, -1)), -1)
        for seen in range(context - query_len + 1, context + 1):
            scores = torch.einsum("hd,hcd->hc", wide[len(rows)], keys[:, :seen]) * shape.scale
            rows.append(torch.einsum("hc,hcd->hd", scores.softmax(-1), values[:, :seen]))
    return torch.stack(rows)


def assert_right(attention: LatentAttention, shape: AttentionShape, lengths: Lengths) -> None:
    query, expansion, layer, batch = case(shape, lengths)
    actual = attention.run_latent(query, expansion, layer, attention.plan(batch))
    assert actual.dtype == shape.dtype
    tolerance = TOLERANCE[shape.dtype]
    expected = defined(shape, query, expansion, layer, batch)
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("gather_bytes", [1, reference.GATHER_BYTES], ids=["segments", "whole"])
@pytest.mark.parametrize("form", ["absorbed", "expanded", "chosen"])
def test_both_forms_of_the_reference_are_the_definition(
    sizes: tuple[int, int, LatentShape], gather_bytes: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "GATHER_BYTES", gather_bytes)
    if form != "chosen":
        monkeypatch.setattr(reference, "expands", lambda *_: form == "expanded")
    shape = shape_of(sizes)
    for lengths in LENGTHS:
        assert_right(reference.ReferenceLatentAttention(shape), shape, lengths)


def test_decode_is_absorbed_and_long_chunks_are_expanded() -> None:
    deepseek = LatentShape(512, 128, 64, 128)
    assert not reference.expands(deepseek, 1, 1000) and not reference.expands(deepseek, 4, 64)
    assert reference.expands(deepseek, 512, 512) and reference.expands(deepseek, 512, 100_000)


@pytest.mark.parametrize(("dtype", "num_parts"), [(DTYPES[0], 3), (DTYPES[-1], 1)], ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_triton(
    sizes: tuple[int, int, LatentShape], dtype: torch.dtype, num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from splitserve.kernels.latent import plans
    from splitserve.kernels.latent.triton import TritonLatentAttention

    monkeypatch.setattr(plans, "MAX_PARTS", num_parts)
    shape = shape_of(sizes, dtype)
    few, some = ([(1, 70)], [(1, 1), (1, 33)], [(2, 50)]), ([(1, 1), (1, 16), (1, 17), (1, 70)],)
    for lengths in (*few, *some, [(5, 5), (2, 17), (4, 36), (1, 31)]):
        assert_right(TritonLatentAttention(shape), shape, lengths)


def test_a_fixed_plan_follows_its_batches() -> None:
    """The last rows repeat the last sequence, as in a padded step."""
    pytest.importorskip("triton")
    from splitserve.kernels.latent.triton import TritonLatentAttention

    shape = shape_of(SHAPES[1], DTYPES[0])
    attention = TritonLatentAttention(shape)
    plan = attention.make_decode_plan(3, 20)
    for contexts in ([70, 1, 33], [4, 5, 5], [16, 70, 70]):
        query, expansion, layer, batch = case(shape, [(1, context) for context in contexts], seed=contexts[0])
        plan.update(batch)
        actual = attention.run_latent(query, expansion, layer, plan)
        expected = defined(shape, query, expansion, layer, batch)
        tolerance = TOLERANCE[shape.dtype]
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_triton_prepares_as_the_reference(sizes: tuple[int, int, LatentShape], dtype: torch.dtype) -> None:
    """Rows of padding, with a slot below 0, write nothing."""
    pytest.importorskip("triton")
    from splitserve.kernels.latent.triton import prepare_latent

    shape, latent = shape_of(sizes, dtype), sizes[2]
    generator = torch.Generator().manual_seed(1)

    def rand(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype).to(DEVICE)

    blocks, offsets = torch.tensor([2, 1, 1, -1], device=DEVICE), torch.tensor([3, 0, 3, 1], device=DEVICE)
    slots = shape.slots(blocks, offsets)
    norm, projected = rand(latent.rank), rand(4, 5 + latent.width)
    angles = rand(4, latent.rotated_dim // 2).float()
    cos = torch.cat((angles.cos(), angles.cos()), 1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), 1).to(dtype)
    queries = [rand(4, shape.num_heads, latent.query_dim)] * 2
    memories = [rand(3, NUM_LAYERS, shape.block_size, latent.width)] * 2
    queries, memories = [each.clone() for each in queries], [each.clone() for each in memories]
    before = memories[0].clone()
    prepare_latent(queries[0], projected[:, 5:], norm, 1e-6, (cos, sin), kv_layer=memories[0][:, LAYER], slots=slots)
    rows = slice(0, 3)
    rest = queries[1].clone()
    part = queries[1][rows].clone()
    reference.prepare_latent(
        part, projected[rows, 5:], norm, 1e-6, (cos[rows], sin[rows]), kv_layer=memories[1][:, LAYER], slots=slots[rows]
    )
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(queries[0][rows], part, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(memories[0], memories[1], rtol=tolerance, atol=tolerance)
    assert torch.equal(memories[0][:, 0], before[:, 0]), "another layer was written"
    assert torch.equal(queries[0][..., : latent.plain_dim], rest[..., : latent.plain_dim])
    changed = (memories[0] != before).any(-1)[:, LAYER].nonzero().tolist()
    assert changed == sorted(
        [block, offset] for block, offset in zip(blocks.tolist(), offsets.tolist(), strict=True) if block >= 0
    )


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_latents_in_fp8(backend: str) -> None:
    """The same as attention over the numbers that FP8 holds."""
    shape = shape_of(SHAPES[1], DTYPES[0])
    attention: LatentAttention = reference.ReferenceLatentAttention(shape)
    if backend == "triton":
        pytest.importorskip("triton")
        from splitserve.kernels.latent.triton import TritonLatentAttention

        attention = TritonLatentAttention(shape)
    query, expansion, layer, batch = case(shape, [(1, 17), (3, 20)])
    stored = layer.to(FP8)
    actual = attention.run_latent(query, expansion, stored, attention.plan(batch))
    expected = defined(shape, query, expansion, stored.float(), batch)
    tolerance = TOLERANCE[shape.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
