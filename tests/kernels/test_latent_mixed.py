"""Latent attention of steps with prompts in CUDA graphs: plans of a fixed size that a batch doesn't fill."""

import pytest
import torch
from tests.kernels.test_latent_attention import NUM_LAYERS, SHAPES, TOLERANCE, Lengths, case, defined, shape_of
from tests.kernels.test_latent_expanded import batch_of
from tests.kernels.test_latent_expanded import shape_of as deepseek_shape

from splitserve.kernels.api import AttentionShape, LatentAttention, PagedBatch
from splitserve.kernels.latent.shape import LatentShape

pytest.importorskip("triton")
from splitserve.kernels.latent import flashinfer, hybrid
from splitserve.kernels.latent.triton import TritonLatentAttention

# two decodes, then chunks: less than a plan holds, all of its 20 tokens in one chunk, and its most chunks
BATCHES: list[Lengths] = [
    [(1, 9), (1, 40), (5, 5), (12, 33)],
    [(1, 17), (1, 1), (20, 31)],
    [(1, 3), (1, 64), (2, 70), (1, 8), (3, 3)],
]


def check_plan(attention: LatentAttention, shape: AttentionShape, *, captures: bool) -> None:
    """Fill one plan for each of the batches; all rows have results that are numbers."""
    plan = attention.make_mixed_plan(2, 20, 3, 20)
    query, expansion, layer, _ = case(shape, [(22, 100)])
    rows = torch.empty_like(query)
    kv_layer = torch.empty((60, NUM_LAYERS, *layer.shape[1:]), dtype=layer.dtype, device=layer.device)[:, 0]
    graph = None
    for seed, lengths in enumerate(BATCHES):
        query, expansion_of_case, layer, batch = case(shape, lengths, seed)
        used = query.shape[0]
        rows.zero_()
        rows[:used], kv_layer[: layer.shape[0]] = query, layer
        expansion.copy_(expansion_of_case)
        plan.update(batch)
        if not captures:
            out = attention.run_latent(rows, expansion, kv_layer, plan)
        elif graph is None:
            attention.run_latent(rows, expansion, kv_layer, plan)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = attention.run_latent(rows, expansion, kv_layer, plan)
        if graph is not None:
            graph.replay()
        expected, tolerance = defined(shape, query, expansion, kv_layer, batch), TOLERANCE[shape.dtype]
        torch.testing.assert_close(out[:used].double(), expected, rtol=tolerance, atol=tolerance)
        assert out.isfinite().all()


@pytest.mark.on_gpu
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_triton_fills_one_plan_again_and_again(sizes: tuple[int, int, LatentShape]) -> None:
    on_gpu = torch.cuda.is_available()
    shape = shape_of(sizes, torch.bfloat16 if on_gpu else torch.float32)
    check_plan(TritonLatentAttention(shape), shape, captures=on_gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [4, 16, 64])
def test_flashinfer_fills_one_plan_again_and_again(num_heads: int) -> None:
    """Grids of one and of two programs to a cluster."""
    pytest.importorskip("flashinfer")
    shape = deepseek_shape(num_heads, "cuda")
    check_plan(hybrid.make_attention(shape), shape, captures=True)


def test_a_batch_is_filled_up_with_rows_without_context() -> None:
    batch = PagedBatch([1, 1, 7], [5, 6, 9], [[0], [1], [2]])
    filled = flashinfer.filled_up(batch, 22, 6)
    assert filled.query_lens == [1, 1, 7, 0, 0, 13] and filled.context_lens == [5, 6, 9, 0, 0, 0]
    assert [list(table) for table in filled.block_tables] == [[0], [1], [2], [], [], []]
    assert flashinfer.filled_up(batch, 9, 4).query_lens == [1, 1, 7, 0]
    assert flashinfer.filled_up(batch, 9, 3) is batch
    for size in ((8, 4), (10, 3)):
        with pytest.raises(AssertionError, match="larger than its plan"):
            flashinfer.filled_up(batch, *size)


@pytest.mark.parametrize(
    ("lengths", "suits"),
    [
        ([(2048, 2048)], True),  # expanded it would be quicker, but not by what a graph saves
        ([(1, 16_000), (512, 16_000)], False),
        ([(1, 16_000), (256, 16_000)], True),  # expanding takes longer than it saves
    ],
)
def test_long_chunks_of_long_contexts_are_launched_kernel_by_kernel(
    lengths: Lengths, suits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(lengths)
    for has_kernel in (True, False):
        monkeypatch.setattr(flashinfer.ExpandedPrefill, "supports", lambda _, has_kernel=has_kernel: has_kernel)
        plan = flashinfer.FixedLatentPlan(None, iter(()), deepseek_shape(16), 2049, 6)
        assert plan.suits(batch) == (suits or not has_kernel)
