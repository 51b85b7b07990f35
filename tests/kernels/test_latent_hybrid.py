"""Latent attention by default on a GPU: which backend a captured decode step takes, and that both are right."""

import pytest
import torch
from tests.kernels.test_latent_attention import TOLERANCE, case, defined
from tests.kernels.test_latent_expanded import shape_of

pytest.importorskip("triton")
from splitserve.kernels.latent import hybrid
from splitserve.kernels.latent.plans import FixedRowPlan


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, hybrid.MAX_ROWS, hybrid.MAX_ROWS + 1])
def test_few_rows_take_triton_and_all_are_right(num_rows: int) -> None:
    pytest.importorskip("flashinfer")
    shape = shape_of(16, "cuda")
    attention = hybrid.make_attention(shape)
    assert isinstance(attention, hybrid.HybridLatentAttention)
    plan = attention.make_decode_plan(num_rows, 20)
    assert isinstance(plan, FixedRowPlan) == (num_rows <= hybrid.MAX_ROWS)
    for longest in (1, 64, 700):
        lengths = [(1, max(1, longest - row)) for row in range(num_rows)]
        query, expansion, layer, batch = case(shape, lengths, seed=longest)
        for is_fixed in (True, False):
            if is_fixed:
                plan.update(batch)
            actual = attention.run_latent(query, expansion, layer, plan if is_fixed else attention.plan(batch))
            expected = defined(shape, query, expansion, layer, batch)
            tolerance = TOLERANCE[shape.dtype]
            torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
def test_many_heads_take_flashinfer() -> None:
    pytest.importorskip("flashinfer")
    attention = hybrid.make_attention(shape_of(hybrid.MAX_HEADS + 1, "cuda"))
    assert not isinstance(attention, hybrid.HybridLatentAttention)
