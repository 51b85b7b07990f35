"""Latent attention of steps with prompts in CUDA graphs: plans of a fixed size that a batch doesn't fill."""

import pytest
import torch
from tests.kernels.test_latent_attention import LAYER, NUM_LAYERS, SHAPES, TOLERANCE, Lengths, case, defined, shape_of
from tests.kernels.test_latent_expanded import batch_of
from tests.kernels.test_latent_expanded import shape_of as deepseek_shape

from splitserve.kernels.api import AttentionShape, LatentAttention, PagedBatch
from splitserve.kernels.latent.shape import LatentShape

pytest.importorskip("triton")
from splitserve.kernels.latent import flashinfer, hybrid
from splitserve.kernels.latent.plans import FixedRowPlan, PlanSize, RowWorkspace
from splitserve.kernels.latent.triton import TritonLatentAttention

# two decodes, then chunks: less than a plan holds, all of its 20 tokens in one chunk, and its most chunks
BATCHES: list[Lengths] = [
    [(1, 9), (1, 40), (5, 5), (12, 33)],
    [(1, 17), (1, 1), (20, 31)],
    [(1, 3), (1, 64), (2, 70), (1, 8), (3, 3)],
]


class Filled:
    """A plan of two decodes beside 20 tokens in at most three chunks, and what its graph reads and writes."""

    def __init__(self, attention: LatentAttention, shape: AttentionShape) -> None:
        assert shape.latent is not None
        self.attention, self.shape = attention, shape
        self.plan = attention.make_mixed_plans(2, 20, 3, 20)[0]
        query, self.expansion, layer, _ = case(shape, [(22, 100)])
        self.query = torch.zeros_like(query)
        memory = torch.zeros((60, NUM_LAYERS, *layer.shape[1:]), dtype=layer.dtype, device=layer.device)
        self.kv_layer = memory[:, LAYER]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.out = self.query

    def check(self, lengths: Lengths, seed: int) -> None:
        """Fill everything for a batch, run, and compare with the definition."""
        query, expansion, layer, batch = case(self.shape, lengths, seed)
        used = query.shape[0]
        self.query[:used], self.kv_layer[: layer.shape[0]] = query, layer
        self.expansion.copy_(expansion)
        self.plan.update(batch)
        if self.shape.device.type == "cpu":
            self.run()
        else:
            if self.graph is None:
                self.run()
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    self.run()
            self.graph.replay()
        expected, tolerance = defined(self.shape, query, expansion, self.kv_layer, batch), TOLERANCE[self.shape.dtype]
        torch.testing.assert_close(self.out[:used].double(), expected, rtol=tolerance, atol=tolerance)
        assert self.out.isfinite().all()

    def run(self) -> None:
        self.out = self.attention.run_latent(self.query, self.expansion, self.kv_layer, self.plan)


def check_plans(attention: LatentAttention, shape: AttentionShape) -> None:
    """Two plans, filled by turns: they share memory, and each finds its own numbers. On a GPU they are filled more
    often than there are pinned buffers."""
    plans = [Filled(attention, shape) for _ in range(2)]
    for seed, lengths in enumerate(BATCHES * 2 if shape.device.type == "cuda" else BATCHES):
        plans[seed % 2].check(lengths, seed)
        plans[(seed + 1) % 2].check(lengths, seed)


@pytest.mark.on_gpu
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_plans_of_triton_are_filled_again_and_again(sizes: tuple[int, int, LatentShape]) -> None:
    shape = shape_of(sizes, torch.bfloat16 if torch.cuda.is_available() else torch.float32)
    check_plans(TritonLatentAttention(shape), shape)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [4, 16, 64])
def test_plans_of_flashinfer_are_filled_again_and_again(num_heads: int) -> None:
    """Grids of one and of two programs to a cluster."""
    pytest.importorskip("flashinfer")
    shape = deepseek_shape(num_heads, "cuda")
    check_plans(hybrid.make_attention(shape), shape)


def test_unused_rows_of_triton_attend_to_one_token() -> None:
    """Not to the last row's context, which may be long."""
    plan = TritonLatentAttention(shape_of(SHAPES[1])).make_mixed_plans(2, 20, 3, 20)[0]
    plan.update(PagedBatch([1, 1, 3], [5, 6, 70], [range(2), range(2, 4), range(4, 22)]))
    assert plan.fixed.contexts.tolist() == [5, 6, 68, 69, 70, *[1] * 17]
    with pytest.raises(AssertionError):
        plan.update(PagedBatch([1, 3], [5, 70], [range(2), range(4, 22)]))  # one sequence decodes, not two


def test_a_batch_is_filled_up_with_sequences_without_context() -> None:
    batch = PagedBatch([1, 1, 7], [5, 6, 9], [[0], [1], [2]])
    filled = flashinfer.filled_up(batch, PlanSize(2, 22, 6))
    assert filled.query_lens == [1, 1, 7, 0, 0, 13] and filled.context_lens == [5, 6, 9, 0, 0, 0]
    assert [list(table) for table in filled.block_tables] == [[0], [1], [2], [], [], []]
    assert flashinfer.filled_up(batch, PlanSize(2, 9, 4)).query_lens == [1, 1, 7, 0]
    assert flashinfer.filled_up(batch, PlanSize(2, 9, 3)) is batch
    for size in (PlanSize(2, 8, 4), PlanSize(2, 10, 3)):
        with pytest.raises(AssertionError, match="larger than its plan"):
            flashinfer.filled_up(batch, size)
    with pytest.raises(AssertionError, match="too few sequences that decode"):
        flashinfer.filled_up(batch, PlanSize(3, 22, 6))


@pytest.mark.parametrize(
    ("num_heads", "lengths", "suits"),
    [
        (16, [(1000, 1000)], True),  # absorbed as well if it is launched
        (16, [(1000, 2500)], True),  # expanded it would be quicker, but the device would wait for launches
        (16, [(1000, 3000)], True),
        (32, [(1000, 3000)], False),  # twice the heads, so twice the work
        (16, [(2048, 2048)], False),  # so many tokens that the device doesn't wait
        (16, [(1, 16_000), (512, 16_000)], False),
        (16, [(1, 16_000), (256, 16_000)], True),  # expanding takes longer than it saves
    ],
)
def test_long_chunks_of_long_contexts_are_launched_kernel_by_kernel(
    num_heads: int, lengths: Lengths, suits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(lengths)
    for has_kernel in (True, False):
        monkeypatch.setattr(flashinfer.ExpandedPrefill, "supports", lambda _, has_kernel=has_kernel: has_kernel)
        plan = flashinfer.FixedLatentPlan(None, iter(()), deepseek_shape(num_heads), PlanSize(2, 2050, 7))
        assert plan.suits(batch) == (suits or not has_kernel)


def test_long_contexts_are_not_read_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """65 sequences that decode leave 63 rows of the next size, which repeat the last one."""
    monkeypatch.setattr(flashinfer.ExpandedPrefill, "supports", lambda _: True)
    size, shape = PlanSize(128, 208, 133), deepseek_shape(16)
    plans = flashinfer.FixedLatentPlan(None, iter(()), shape, size), FixedRowPlan(shape, size, 4, RowWorkspace(shape))
    for num_decodes, context, suits in ((65, 4000, True), (65, 16_000, False), (128, 16_000, True)):
        batch = batch_of([(1, context)] * num_decodes + [(80, 80)])
        assert [plan.suits(batch) for plan in plans] == [suits] * 2
