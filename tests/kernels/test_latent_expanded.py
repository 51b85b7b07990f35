"""Latent attention of long chunks through FlashInfer: when it is expanded, and that it is the same attention."""

import pytest
import torch
from tests.kernels.test_latent_attention import Lengths, assert_right

from splitserve.kernels.api import AttentionShape, PagedBatch
from splitserve.kernels.latent.shape import LatentShape

pytest.importorskip("triton")
from splitserve.kernels.latent.expanded import ExpandedPrefill, pays

DEEPSEEK = LatentShape(512, 128, 64, 128)


def shape_of(num_heads: int, device: str = "cpu") -> AttentionShape:
    return AttentionShape(
        num_heads, 1, 64, 64, 2, torch.bfloat16, torch.device(device), scale=0.07, latent=DEEPSEEK
    )  # fmt: skip


def batch_of(lengths: Lengths) -> PagedBatch:
    return PagedBatch([count for count, _ in lengths], [context for _, context in lengths], [[] for _ in lengths])


@pytest.mark.parametrize(
    ("lengths", "is_expanded"),
    [
        ([(1024, 1024)], False),  # few pairs
        ([(2048, 2048)], True),
        ([(1024, 1024)] * 3, True),
        ([(1, 9000), (2048, 2048)], True),  # a sequence that decodes counts for nothing
        ([(256, 8192)], False),  # few queries for each token
        ([(1024, 8192)], True),
        ([(8192, 32_768)], False),  # more memory than it may take
    ],
)
def test_long_chunks_are_expanded(lengths: Lengths, is_expanded: bool) -> None:
    first = sum(count == 1 for count, _ in lengths)
    assert pays(shape_of(16), batch_of(lengths), first) == is_expanded


def test_decodes_alone_are_absorbed() -> None:
    assert not pays(shape_of(16), batch_of([(1, 100_000)]), 1)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [16, 5])
def test_the_expanded_form_is_the_definition(num_heads: int) -> None:
    pytest.importorskip("flashinfer")
    from splitserve.kernels.latent.flashinfer import FlashInferLatentAttention

    shape = shape_of(num_heads, "cuda")
    if not ExpandedPrefill.supports(shape):
        pytest.skip("its kernel is for compute capability 9.0")
    attention = FlashInferLatentAttention(shape)
    cases: list[Lengths] = [
        [(2050, 2050)],
        [(1, 70), (1, 1), (1500, 1900), (3, 3), (700, 1211)],
    ]
    for lengths in cases:
        plan = attention.plan(batch_of_blocks(lengths, shape.block_size))
        assert plan.expanded is not None and plan.num_absorbed == sum(count == 1 for count, _ in lengths)
        assert_right(attention, shape, lengths)


def batch_of_blocks(lengths: Lengths, block_size: int) -> PagedBatch:
    tables = [list(range(-(-context // block_size))) for _, context in lengths]
    return PagedBatch([count for count, _ in lengths], [context for _, context in lengths], tables)
