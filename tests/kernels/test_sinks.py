"""Attention sinks: a score of each head that takes its share of the softmax, in every backend that knows them."""

from collections.abc import Callable

import pytest
import torch

from attention_cases import Lengths, edge_lengths, paged_case, plain_attention
from splitserve.kernels.api import AttentionShape, PagedAttention
from splitserve.kernels.flashinfer.attention import unsupported_reason
from splitserve.kernels.reference.attention import ReferencePagedAttention
from splitserve.kernels.registry import Target, backends
from splitserve.kernels.triton.attention.paged import TritonPagedAttention

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.on_gpu]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK_SIZE = 5
LONG: list[Lengths] = [[(1, 700), (70, 90), (3, 600)]]  # contexts in parts that are joined


def shape_of(window: int | None) -> AttentionShape:
    return AttentionShape(6, 2, 24, BLOCK_SIZE, 2, torch.float32, DEVICE, window=window, has_sinks=True)


@pytest.mark.parametrize("backend", [ReferencePagedAttention, TritonPagedAttention])
@pytest.mark.parametrize("window", [None, 64])
def test_sinks_take_their_share(backend: Callable[[AttentionShape], PagedAttention], window: int | None) -> None:
    shape = shape_of(window)
    attention = backend(shape)
    sinks = torch.tensor([-3.0, -1.0, 0.0, 0.5, 2.0, 9.0], device=DEVICE)
    for lengths in [*edge_lengths(BLOCK_SIZE)[1:], *LONG]:
        query, kv_layer, batch = paged_case(shape, lengths)
        out = attention.run(query, kv_layer, attention.plan(batch), sinks)
        expected = plain_attention(query.cpu(), kv_layer.cpu(), batch, sinks.cpu(), window)
        torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-4, atol=1e-5)
        without = plain_attention(query.cpu(), kv_layer.cpu(), batch, None, window)
        assert not torch.allclose(out.double().cpu(), without, rtol=1e-2, atol=1e-2)


def test_backends_without_sinks_say_so() -> None:
    shape = AttentionShape(8, 2, 64, 16, 2, torch.bfloat16, DEVICE, has_sinks=True)
    reasons = backends("make_attention", Target(torch.device("cuda"), torch.bfloat16, 64, has_sinks=True))
    assert reasons["hybrid"] == reasons["flashinfer"] == "it takes no attention sinks"
    assert "no sinks; use the triton backend" in str(unsupported_reason(shape))
