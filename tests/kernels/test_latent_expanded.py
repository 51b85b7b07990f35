"""Latent attention of long chunks through FlashInfer: when it is expanded, and that it is the same attention."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kernels.test_latent_attention import Lengths, assert_right, case, defined
from torch import Tensor

from splitserve.kernels.api import AttentionShape, PagedBatch
from splitserve.kernels.latent.shape import LatentShape

pytest.importorskip("triton")
from splitserve.kernels.latent import expanded
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


def test_decodes_are_not_counted() -> None:
    """The same sequence pays as a prompt, and not as one that decodes beside a short prompt."""
    lengths = [(2048, 2048), (4, 4)]
    assert pays(shape_of(16), batch_of(lengths), 0) and not pays(shape_of(16), batch_of(lengths), 1)


class PlainRaggedAttention:
    """Plain attention over ragged chunks in float64, in the place of FlashInfer's kernel."""

    def __init__(self, workspace: Tensor, layout: str, *, backend: str) -> None:
        assert (layout, backend) == ("NHD", "fa3")

    def plan(self, queries: Tensor, contexts: Tensor, *heads: int, **options: Any) -> None:
        """Take the ends of all sequences' queries and contexts; other options are as the kernel needs them."""
        self.ends, self.scale = list(zip(queries.tolist(), contexts.tolist(), strict=True)), options["sm_scale"]
        assert options["causal"]

    def run(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Write the attention of each sequence to ``out``."""
        for (row, token), (row_end, token_end) in itertools.pairwise(self.ends):
            count, context = row_end - row, token_end - token
            scores = torch.einsum("qhd,khd->hqk", query[row:row_end].double(), keys[token:token_end].double())
            seen = torch.ones(count, context, dtype=torch.bool, device=query.device).tril(context - count)
            weights = (scores * self.scale).masked_fill(~seen, float("-inf")).softmax(-1)
            out[row:row_end] = torch.einsum("hqk,khd->qhd", weights, values[token:token_end].double())


@pytest.mark.parametrize("num_decodes", [0, 2])
def test_keys_and_values_of_the_expanded_form(num_decodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the kernel itself: which latents are read, and the keys and values that are made of them."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(expanded, "pinned_buffers", lambda wrapper: itertools.repeat(None))
    shape = replace(shape_of(3), dtype=torch.float32, block_size=8)
    attention = ExpandedPrefill(SimpleNamespace(BatchPrefillWithRaggedKVCacheWrapper=PlainRaggedAttention), shape)
    lengths = [*[(1, 9), (1, 16)][:num_decodes], (20, 33), (7, 7), (5, 24)]
    query, expansion, layer, batch = case(shape, lengths)
    out = query.new_full((32, 3, DEEPSEEK.value_dim), float("nan"))
    attention.run(query[num_decodes:], expansion, layer, attention.plan(batch, num_decodes), out)
    expected = defined(shape, query, expansion, layer, batch)[num_decodes:]
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)


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
