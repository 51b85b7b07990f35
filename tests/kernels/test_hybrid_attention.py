"""Attention whose CUDA graphs of long prompts have FlashInfer's kernel, and of short ones Triton's."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from attention_cases import Lengths, attention_shape, paged_case, plain_attention, replayed
from splitserve.kernels.api import AttentionShape, PagedBatch

pytest.importorskip("triton")
from splitserve.kernels.flashinfer.hybrid import HybridMixedPlan, HybridPagedAttention, HybridPlan
from splitserve.kernels.triton.plans import TritonMixedPlan

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
    """Of a device that has both kernels."""
    pytest.importorskip("flashinfer")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FlashAttention 3 is for compute capability 9.0")
    return SHAPE


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 300])
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
def test_plans_of_several_sizes_share_memory(shape: AttentionShape) -> None:
    """Each step has its own numbers, whatever the plan that was filled before."""
    backend = HybridPagedAttention(shape)
    cases = [paged_case(shape, lengths, seed) for seed, lengths in enumerate(STEPS)]
    steps = [replayed(backend, shape, 0, num_tokens, cases * 2) for num_tokens in (512, 1024, 576)]
    for results in zip(*steps, strict=True):
        query, layer, batch = results[0][1]
        for actual, _ in results:
            torch.testing.assert_close(actual.double(), plain_attention(query, layer, batch), rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
def test_short_prompts_and_few_heads_keep_tritons_kernel(shape: AttentionShape) -> None:
    few = replace(shape, num_heads=8, num_kv_heads=2)
    for backend, sizes in ((HybridPagedAttention(shape), (4, 256)), (HybridPagedAttention(few), (0, 1024))):
        (plan,) = backend.make_mixed_plans(*sizes, 4, 200)
        assert isinstance(plan, TritonMixedPlan)


@pytest.mark.parametrize(
    ("lengths", "is_first"),
    [
        ([(1024, 1024)], False),
        ([(1024, 2048)], True),
        ([(400, 30_000)], True),
        ([(200, 30_000)], False),
        ([(100, 30_000), (900, 900)], False),
        ([(600, 30_000), (400, 400)], True),
        ([(100, 8000)] * 4, True),
    ],
)
def test_prompts_alone_take_the_form_that_suits_their_contexts(
    lengths: Lengths, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device of 132 multiprocessors. Beside decodes there is one form."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    batch = unplaced(lengths)
    plan = HybridMixedPlan(SHAPE, 0, None, None)  # type: ignore[arg-type]
    assert plan.suits(batch) == is_first
    assert replace(plan, num_decodes=4, decode=object()).suits(batch)


@pytest.mark.parametrize(
    ("lengths", "name"),
    [
        ([(1, 9000), (1, 30_000)], "triton"),
        ([(300, 300)], "flashinfer"),
        ([(1, 90_000), (300, 8000)], "flashinfer"),
        ([(1, 5), (200, 30_000)], "triton"),
        ([(100, 30_000), (900, 900)], "triton"),
    ],
)
def test_launched_steps_take_tritons_kernel_where_the_other_leaves_the_device_idle(
    lengths: Lengths, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    backend = HybridPagedAttention.__new__(HybridPagedAttention)
    plans = SimpleNamespace(is_hopper=True, plan=lambda _: "triton", plan_chunks=lambda *_: "flashinfer")
    backend._shape, backend._triton, backend._flashinfer = SHAPE, plans, plans  # type: ignore[assignment]
    plan = backend.plan(unplaced(lengths))
    assert (plan.chunks if isinstance(plan, HybridPlan) else plan) == name
