"""Attention whose CUDA graphs of long prompts have FlashInfer's kernel, and of short ones Triton's."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from attention_cases import Lengths, attention_shape, paged_case, plain_attention, replayed
from splitserve.kernels.api import AttentionShape, PagedBatch
from splitserve.kernels.windows import LayerAttention, LayeredAttention

pytest.importorskip("triton")
from splitserve.kernels.flashinfer.choice import ChunkChoice
from splitserve.kernels.flashinfer.chunks import ChunkLimits, FixedChunkPlan
from splitserve.kernels.flashinfer.hybrid import HybridMixedPlan, HybridPagedAttention, HybridPlan

H200 = ChunkChoice(num_heads=32, num_processors=132, query_tile=128, window=None)
SHAPE = attention_shape(32, 8, 128, 64, torch.bfloat16, torch.device("cuda"))
# Chunks, each after as much of its prompt as there is more context.
STEPS: list[Lengths] = [
    [(512, 3000)],
    [(64, 64)],
    [(100, 4000), (20, 700), (1, 900), (8, 8)],
    [(30, 6001), (482, 482)],
    [(129, 129), (127, 300), (128, 1000), (128, 128)],
]


def unplaced(lengths: Lengths) -> PagedBatch:
    return PagedBatch([count for count, _ in lengths], [context for _, context in lengths], [()] * len(lengths))


@pytest.fixture
def shape() -> AttentionShape:
    """The attention of Llama-3.1-8B, on a device that has both kernels."""
    pytest.importorskip("flashinfer")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FlashAttention 3 is for compute capability 9.0")
    return SHAPE


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1100])
@pytest.mark.parametrize("num_decodes", [0, 4])
def test_a_captured_step_of_long_prompts_follows_its_plan(
    shape: AttentionShape, num_decodes: int, window: int | None
) -> None:
    shape = replace(shape, window=window)
    backend = HybridPagedAttention(shape)
    assert isinstance(backend.make_mixed_plans(num_decodes, 512, 4, 200)[0], HybridMixedPlan)
    decodes = [[(1, 100 + 700 * step)] * num_decodes for step in range(len(STEPS))]
    cases = [
        paged_case(shape, [*few, *chunks], seed) for seed, (few, chunks) in enumerate(zip(decodes, STEPS, strict=True))
    ]
    for actual, (query, layer, batch) in replayed(backend, shape, num_decodes, 512, [*cases, *cases[::-1]]):
        expected = plain_attention(query, layer, batch, window=window)
        torch.testing.assert_close(actual.double(), expected, rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
def test_plans_that_are_filled_by_turns_keep_apart(shape: AttentionShape) -> None:
    """They share pinned buffers and the memory for their tiles."""
    backend = HybridPagedAttention(shape)
    cases = [paged_case(shape, lengths, seed) for seed, lengths in enumerate(STEPS)]
    steps = [replayed(backend, shape, 0, num_tokens, cases * 2) for num_tokens in (512, 1024, 576)]
    for results in zip(*steps, strict=True):
        query, layer, batch = results[0][1]
        for actual, _ in results:
            torch.testing.assert_close(actual.double(), plain_attention(query, layer, batch), rtol=3e-2, atol=3e-2)


def test_a_plan_of_fixed_size_ends_with_empty_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    plans: list[list[list[int]]] = []

    def make_wrapper(**tensors: Tensor) -> SimpleNamespace:
        assert len(tensors["paged_kv_indices_buf"]) == 40
        return SimpleNamespace(plan=lambda *arrays, **_: plans.append([array.tolist() for array in arrays[:4]]))

    shape, limits = replace(SHAPE, device=torch.device("cpu")), ChunkLimits(num_chunks=4, num_tokens=512, max_blocks=10)
    plan = FixedChunkPlan(shape, limits, make_wrapper, itertools.cycle([torch.empty(0)]))
    assert plan.wrapper._max_total_num_rows == 512
    plan.update(PagedBatch([300, 64, 9, 139], [600, 64, 9, 139], [range(10), [20], [21], [22, 23, 24]]))
    plan.update(PagedBatch([100, 20], [130, 64], [[7, 8, 9], [3]]))
    assert plans[0] == [[0, 300, 364, 373, 512], [0, 10, 11, 12, 15], [*range(10), *range(20, 25)], [24, 64, 9, 11]]
    assert plans[1] == [[0, 100, 120, 120, 120], [0, 3, 4, 4, 4], [7, 8, 9, 3], [2, 64, 0, 0]]


@pytest.mark.parametrize(
    ("lengths", "is_quicker", "suits_graph"),
    [
        ([(1024, 1024)], True, False),
        ([(300, 300)], True, False),
        ([(1024, 2048)], True, True),
        ([(320, 8000)], True, True),
        ([(256, 30_000)], False, False),
        ([(100, 30_000), (900, 900)], False, False),
        ([(600, 30_000), (400, 400)], True, True),
        ([(100, 8000)] * 4, True, True),
        ([(64, 30_000)] * 3, False, False),
    ],
)
def test_flashinfer_takes_chunks_that_keep_the_device_busy(
    lengths: Lengths, is_quicker: bool, suits_graph: bool
) -> None:
    chunks = unplaced(lengths)
    assert (H200.flashinfer_is_quicker(chunks), H200.suits_graph(chunks)) == (is_quicker, suits_graph)
    backend = HybridPagedAttention.__new__(HybridPagedAttention)
    plans = SimpleNamespace(plan=lambda _: "triton", plan_chunks=lambda *_: "flashinfer")
    backend._choice, backend._triton, backend._flashinfer = H200, plans, plans  # type: ignore[assignment]
    batch = unplaced([(1, 90_000), *lengths])
    plan = backend.plan(batch)
    assert (plan.chunks if isinstance(plan, HybridPlan) else plan) == ("flashinfer" if is_quicker else "triton")
    assert HybridMixedPlan(4, None, None, H200).suits(batch) == suits_graph, "decodes don't count"  # type: ignore[arg-type]


def test_windows_bound_what_chunks_attend_to() -> None:
    short, long = replace(H200, window=512), replace(H200, window=4096)
    assert H200.may_suit_graph(512) and long.may_suit_graph(512) and not short.may_suit_graph(512)
    assert not long.may_suit_graph(256)
    uneven = unplaced([(100, 30_000), (900, 4000)])
    assert long.suits_graph(uneven) and not H200.suits_graph(uneven)
    assert not long.suits_graph(unplaced([(512, 600)]))


def test_a_step_may_have_no_longer_chunks() -> None:
    """A prompt's last token alone looks like a decode."""
    plan = HybridMixedPlan(4, None, None, H200)  # type: ignore[arg-type]
    assert not plan.suits(unplaced([(1, 9000), (1, 8000)]))


def test_wider_tiles_of_narrow_heads() -> None:
    """A tile of 192 tokens gives a multiprocessor more work than one of 128."""
    assert H200.may_suit_graph(320) and not replace(H200, query_tile=192).may_suit_graph(320)


def test_a_kind_of_layers_with_fewer_forms_repeats_its_last_one() -> None:
    full = SimpleNamespace(make_mixed_plans=lambda *_: ["long", "short"])
    sliding = SimpleNamespace(make_mixed_plans=lambda *_: ["only"])
    kinds = [LayerAttention(), LayerAttention(is_sliding=True)]
    shapes = [replace(SHAPE, window=512)]
    attention = LayeredAttention(shapes, kinds, lambda shape: sliding if shape.window else full)  # type: ignore[arg-type, return-value]
    forms = attention.make_mixed_plans(0, 512, 4, 9)
    assert [list(form.plans.values()) for form in forms] == [["long", "only"], ["short", "only"]]
