"""Kernels of experts in MXFP4 against the reference: compiled where there is a GPU, else under Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")  # conftest.py chose its interpreter, if need be, before this import

from expert_cases import CLAMPED, DEVICE, NARROW, assert_same, choices, rand
from splitserve.kernels.experts import mxfp4, reference
from splitserve.kernels.experts.launch import ExpertLaunch
from splitserve.kernels.experts.spec import GatedActivation
from splitserve.kernels.experts.triton.experts import TritonExperts
from splitserve.kernels.experts.triton.packed import packed_gate_up
from splitserve.kernels.experts.triton.sorting import sort_pairs
from splitserve.kernels.experts.weights import ExpertWeights
from splitserve.kernels.tuning import parameters as tuning
from splitserve.models.weights.fused_experts import dequantised_blocks

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.on_gpu]

MANY_BLOCKS = pytest.mark.skipif(DEVICE.type == "cpu", reason="too slow in the interpreter; Gluon's kernels loop here")
TILES = {"block_n": 64, "block_k": 256, "down_block_n": 64, "down_block_k": 128, "down_num_warps": 2}


def random_weights(hidden: int, inner: int, dtype: torch.dtype) -> ExpertWeights:
    """Five experts; each group has its own scale."""
    generator = torch.Generator().manual_seed(0)

    def random_bytes(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator).to(DEVICE)

    return ExpertWeights(
        random_bytes(0, 256, 5, 2 * inner, hidden // 2),
        random_bytes(0, 256, 5, hidden, inner // 2),
        CLAMPED,
        gate_up_bias=rand(5, 2 * inner, seed=3).to(dtype),
        down_bias=rand(5, hidden, seed=4).to(dtype),
        gate_up_scales=random_bytes(120, 125, 5, 2 * inner, hidden // 32),
        down_scales=random_bytes(120, 125, 5, hidden, inner // 32),
    )


@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@pytest.mark.parametrize(
    ("sizes", "block_m", "split_k"),
    [
        ((96, 160), 1, 1),
        ((256, 224), 1, 2),
        ((192, 320), 16, 1),
        ((256, 224), 16, 3),
        ((96, 160), 8, 1),
        pytest.param((1088, 672), 1, 3, marks=MANY_BLOCKS),
        pytest.param((1088, 672), 8, 1, marks=MANY_BLOCKS),
    ],
)
def test_mxfp4(dtype: torch.dtype, sizes: tuple[int, int], block_m: int, split_k: int) -> None:
    """Last blocks have all sizes, last tiles are whole or not; one expert has no token."""
    hidden, stored = sizes[0], random_weights(*sizes, dtype)
    assert stored.gate_up_scales is not None and stored.down_scales is not None
    wide = replace(
        stored,
        gate_up=dequantised_blocks(stored.gate_up, stored.gate_up_scales, dtype),
        down=dequantised_blocks(stored.down, stored.down_scales, dtype),
        gate_up_scales=None,
        down_scales=None,
    )
    num_tokens = 3 if block_m == 1 else 17
    x, (experts, factors) = rand(num_tokens, hidden).to(dtype), choices(num_tokens, 4, 2)
    blocks = TILES
    if hidden > 1000:
        blocks = TILES | {"block_n": 8, "num_warps": 1, "num_stages": 2, "down_block_n": 32, "down_num_stages": 4}
    with tuning.forced("experts", {**blocks, "block_m": block_m, "down_split_k": split_k}):
        actual = TritonExperts(stored)(x, experts, factors)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert_same(actual, reference.LoopedExperts(wide)(x, experts, factors), tolerance)


@pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")
@pytest.mark.parametrize("block_m", [1, 8])
def test_ranks_have_a_part_of_the_experts(block_m: int) -> None:
    whole, num_tokens = random_weights(96, 160, NARROW), 7
    x, (experts, factors) = rand(num_tokens, 96).to(NARROW), choices(num_tokens, 5, 2)
    total = torch.zeros(num_tokens, 96, device=DEVICE)
    with tuning.forced("experts", {**TILES, "block_m": block_m}):
        for own in (slice(0, 3), slice(3, 5)):
            names = ("gate_up", "down", "gate_up_bias", "down_bias", "gate_up_scales", "down_scales")
            part = replace(whole, first=own.start, **{name: getattr(whole, name)[own] for name in names})
            total += TritonExperts(part)(x, experts, factors).float()
        assert_same(total, TritonExperts(whole)(x, experts, factors).float(), 1e-2)


@pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@pytest.mark.parametrize("block_m", [1, 16])
def test_every_number_in_mxfp4(dtype: torch.dtype, block_m: int) -> None:
    """One column of x at a time shows each element of the weight, in all quarters of its group."""
    blocks = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(1, 16, 16)
    most = 140 if dtype == torch.float16 else 185
    scales = torch.tensor([1, 115, 126, 127, 128, 129, 135, most], dtype=torch.uint8, device=DEVICE).repeat(2)
    scales = scales.view(1, 16, 1)
    weights = ExpertWeights(
        mxfp4.by_quarters(blocks).view(torch.uint8),
        torch.zeros((1, 32, 4), dtype=torch.uint8, device=DEVICE),  # 8 columns; not looked at
        GatedActivation(),
        gate_up_scales=mxfp4.shifted_scales(scales),
    )
    x, experts = torch.eye(32, device=DEVICE).to(dtype), torch.zeros((32, 1), dtype=torch.int32, device=DEVICE)
    expected = mxfp4.dequantised(blocks[0], scales[0], dtype).float().t()  # [column, row]
    expected = reference.activate(expected, GatedActivation()).to(dtype)
    launch = ExpertLaunch(block_m, 32, 128)
    ordered = None if block_m == 1 else sort_pairs(experts, 0, 1, block_m)
    actual = packed_gate_up(x, experts, ordered, weights, launch)
    torch.testing.assert_close(actual, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-30)


def test_scales_that_no_weight_has_are_refused() -> None:
    scales = torch.tensor([[[100, 193]]], dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match=r"2\*\*66; at most 2\*\*65"):
        mxfp4.shifted_scales(scales)
