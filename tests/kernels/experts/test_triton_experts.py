"""Kernels of experts against the reference: compiled where there is a GPU, else under Triton's interpreter."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")  # conftest.py chose its interpreter, if need be, before this import

from expert_cases import CLAMPED, DEVICE, NARROW, assert_same, choices, rand
from splitserve.kernels.experts import reference
from splitserve.kernels.experts.router import PlainRouter
from splitserve.kernels.experts.spec import GatedActivation, GroupScore, RouterSpec, Score
from splitserve.kernels.experts.triton import grouped, router
from splitserve.kernels.experts.triton.experts import TritonExperts
from splitserve.kernels.experts.triton.router import TritonRouter
from splitserve.kernels.experts.triton.routing import route
from splitserve.kernels.experts.triton.sorting import sort_pairs
from splitserve.kernels.experts.weights import ExpertWeights, RouterWeights
from splitserve.kernels.fp8.triton_quantise import quantise_rows
from splitserve.kernels.fp8.weight import GROUP
from splitserve.kernels.reference import operations
from splitserve.kernels.reference.linear import PlainLinear
from splitserve.kernels.tuning import parameters as tuning

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.on_gpu]

TILES = {"block_m": 16, "block_n": 16, "block_k": 32, "down_block_n": 32, "down_block_k": 16}
WIDE = {"block_n": 32, "block_k": 256, "down_block_n": 64, "down_block_k": 128}


# ---- routing ----

ROUTERS = {
    "qwen": RouterSpec(37, 8, normalised=True),
    "mixtral": RouterSpec(8, 2, normalised=True),
    "gpt-oss": RouterSpec(32, 4, Score.SOFTMAX_OF_TOP),
    "v2": RouterSpec(24, 6, num_groups=4, kept_groups=2, group_score=GroupScore.MAX, scale=16.0),
    "v3": RouterSpec(32, 6, Score.SIGMOID, True, 2.5, 8, 4, correction_bias=True),
    "odd groups": RouterSpec(21, 3, Score.SIGMOID, True, 2.5, 3, 2, correction_bias=True),
    "one": RouterSpec(5, 1, Score.SIGMOID, correction_bias=True),
    "all": RouterSpec(6, 6),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routing(name: str) -> None:
    spec = ROUTERS[name]
    logits = rand(9, spec.num_experts)
    bias = rand(spec.num_experts, seed=1, std=0.3) if spec.correction_bias else None
    experts, weights = route(logits, bias, spec)
    expected, expected_weights = reference.route(logits, bias, spec)
    assert torch.equal(experts, expected) and experts.dtype == expected.dtype == torch.int32
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)


def test_routing_takes_logits_of_any_stride_and_type() -> None:
    spec = ROUTERS["v3"]
    logits = rand(5, 2 * spec.num_experts).to(NARROW)[:, : spec.num_experts]
    experts, weights = route(logits, None, spec)
    expected, expected_weights = reference.route(logits, None, spec)
    assert torch.equal(experts.sort(-1).values, expected.sort(-1).values)
    torch.testing.assert_close(weights.sort(-1).values, expected_weights.sort(-1).values, rtol=1e-5, atol=1e-6)


def test_zeros_of_both_signs_are_equal() -> None:
    logits = torch.tensor([[-0.0, 0.0, -1.0, -0.0, 0.0, -2.0]], device=DEVICE)
    experts, _ = route(logits, None, RouterSpec(6, 3, Score.SOFTMAX_OF_TOP))
    assert experts[0].tolist() == [0, 1, 3]


@pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # the interpreter's NumPy
@pytest.mark.parametrize("name", ["qwen", "v3", "gpt-oss"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), 0.0])
def test_experts_of_any_row_are_valid_and_distinct(name: str, number: float) -> None:
    """As rows that fill up a step of a CUDA graph; equal scores choose the lowest numbers."""
    spec = ROUTERS[name]
    experts, _ = route(torch.full((2, spec.num_experts), number, device=DEVICE), None, spec)
    for row in experts.tolist():
        assert len(set(row)) == spec.top_k and all(0 <= expert < spec.num_experts for expert in row)
    if spec.num_groups == 1 and number == 0.0:
        assert experts[0].tolist() == list(range(spec.top_k))


@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_is_one_kernel_for_few_rows(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits are rounded as separate operations round them; a second launch finds its tickets at zero."""
    spec = replace(ROUTERS[name], wide_logits=name.startswith("v"), logits_bias=name == "gpt-oss")
    weights = RouterWeights(
        spec,
        rand(spec.num_experts, 100, seed=1).to(torch.float32 if spec.wide_logits else dtype),
        rand(spec.num_experts, seed=2).to(dtype) if spec.logits_bias else None,
        rand(spec.num_experts, seed=3, std=0.3) if spec.correction_bias else None,
    )
    parts = {"rms_norm": operations.rms_norm, "silu_mul": operations.silu_mul}
    plain = PlainRouter(
        weights,
        pack_linear=partial(PlainLinear, **parts),
        rms_norm=operations.rms_norm,
        route=reference.route,
    )
    launched = TritonRouter(weights, pack_linear=_unused, rms_norm=_unused, route=_unused)
    x, norm = rand(7, 200).to(dtype)[:, :100], rand(100, seed=4).to(dtype)
    expected = plain(x, norm, 1e-5)
    for normed in (None, expected[0]):
        actual = launched(x, norm, 1e-5, normed)
        torch.testing.assert_close(actual[0], expected[0], rtol=1e-3, atol=1e-3)
        assert torch.equal(actual[1].sort(-1).values, expected[1].sort(-1).values)
        torch.testing.assert_close(actual[2].sort(-1).values, expected[2].sort(-1).values, rtol=2e-2, atol=1e-3)
    weights = replace(weights, has_shared=True)  # a single row's router then lets the next kernel start early
    early = TritonRouter(weights, pack_linear=_unused, rms_norm=_unused, route=_unused)(x[:1], norm, 1e-5)
    assert torch.equal(early[1].sort(-1).values, expected[1][:1].sort(-1).values)
    monkeypatch.setattr(router, "MAX_PROGRAMS", 0)
    beyond = TritonRouter(weights, pack_linear=partial(PlainLinear, **parts), rms_norm=operations.rms_norm, route=route)
    assert torch.equal(beyond(x, norm, 1e-5)[1].sort(-1).values, expected[1].sort(-1).values)


def _unused(*_: object) -> None:
    """The parts of a router, where one kernel does it all."""


# ---- sorting ----


@pytest.mark.parametrize("block_m", [16, 32])
@pytest.mark.parametrize(
    ("num_tokens", "first", "count"), [(1, 0, 8), (7, 0, 8), (50, 2, 3), (600, 0, 8), (5, 7, 1), (3, 5, 2)]
)
def test_sorting(num_tokens: int, first: int, count: int, block_m: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    experts = torch.rand(num_tokens, 8, generator=generator).topk(3, -1).indices.int()
    experts[experts == 6] = 7  # an expert that nothing chooses
    ordered = sort_pairs(experts.to(DEVICE), first, count, block_m)
    tiles = ordered.pairs.view(-1, block_m).tolist()
    owners = ordered.tile_experts.tolist()
    found: dict[int, list[int]] = {}
    for owner, tile in zip(owners, tiles, strict=True):
        pairs = [pair for pair in tile if pair < experts.numel()] if owner >= 0 else []
        assert owner < 0 or (pairs and all(0 <= pair <= experts.numel() for pair in tile)), "no tile is empty"
        found.setdefault(owner, []).extend(pairs)
    found.pop(-1, None)
    flat = experts.flatten().tolist()
    expected = {expert - first: [] for expert in flat if first <= expert < first + count}
    for pair, expert in enumerate(flat):
        if expert - first in expected:
            expected[expert - first].append(pair)
    assert found == expected
    assert owners == sorted(owners, key=lambda owner: (owner < 0, owner)), "tiles of an expert are neighbours"


# ---- products ----


def weights_of(
    num_experts: int, hidden: int, inner: int, activation: GatedActivation, *, biases: bool = False, first: int = 0
) -> ExpertWeights:
    return ExpertWeights(
        rand(num_experts, 2 * inner, hidden, seed=1, std=hidden**-0.5),
        rand(num_experts, hidden, inner, seed=2, std=inner**-0.5),
        activation,
        first,
        rand(num_experts, 2 * inner, seed=3) if biases else None,
        rand(num_experts, hidden, seed=4) if biases else None,
    )


def as_dtype(weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    return replace(
        weights, **{name: tensor.to(dtype) for name in names if (tensor := getattr(weights, name)) is not None}
    )


@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@pytest.mark.parametrize("block_m", [1, 16, 32])
@pytest.mark.parametrize("activation", [GatedActivation(), CLAMPED])
def test_experts(dtype: torch.dtype, block_m: int, activation: GatedActivation) -> None:
    """Sizes are no multiples of tiles."""
    weights = as_dtype(weights_of(6, 52, 44, activation, biases=activation is CLAMPED), dtype)
    x, (experts, factors) = rand(19, 52).to(dtype), choices(19, 6, 2)
    with tuning.forced("experts", {**TILES, "block_m": block_m}):
        actual = TritonExperts(weights)(x, experts, factors)
    assert_same(actual, reference.LoopedExperts(weights)(x, experts, factors), 1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@pytest.mark.parametrize("block_m", [1, 16])
def test_sums_are_rounded_before_they_are_added_to_the_residual(dtype: torch.dtype, block_m: int) -> None:
    weights = as_dtype(weights_of(6, 52, 44, CLAMPED, biases=True), dtype)
    x, (experts, factors) = rand(5, 52).to(dtype), choices(5, 6, 2)
    residual = rand(5, 52).to(dtype)
    with tuning.forced("experts", {**TILES, "block_m": block_m}):
        run = TritonExperts(weights)
        expected = residual + run(x, experts, factors).to(dtype)
        run.add_to(residual, x, experts, factors)
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("function", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("block_m", [1, 16])
def test_activations(function: str, block_m: int) -> None:
    weights = weights_of(4, 32, 16, GatedActivation(function))
    x, (experts, factors) = rand(6, 32), choices(6, 4, 2)
    with tuning.forced("experts", {**TILES, "block_m": block_m}):
        assert_same(
            TritonExperts(weights)(x, experts, factors), reference.LoopedExperts(weights)(x, experts, factors), 1e-5
        )


@pytest.mark.parametrize("block_m", [1, 16])
def test_one_expert_with_all_tokens(block_m: int) -> None:
    """All others are empty."""
    weights = weights_of(5, 32, 16, GatedActivation())
    x, experts = rand(40, 32), torch.full((40, 1), 3, dtype=torch.int32, device=DEVICE)
    factors = torch.ones(40, 1, device=DEVICE)
    with tuning.forced("experts", {**TILES, "block_m": block_m}):
        assert_same(
            TritonExperts(weights)(x, experts, factors), reference.LoopedExperts(weights)(x, experts, factors), 1e-5
        )


def test_more_tiles_than_share_a_block_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "_CACHED_BYTES", 0)
    weights = weights_of(3, 64, 48, GatedActivation())
    x, (experts, factors) = rand(100, 64), choices(100, 3, 2)
    with tuning.forced("experts", TILES):
        assert len(sort_pairs(experts, 0, 3, 16).tile_experts) == 15
        actual = TritonExperts(weights)(x, experts, factors)
    assert_same(actual, reference.LoopedExperts(weights)(x, experts, factors), 1e-5)


@pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # of other ranks' pairs, which nobody uses
@pytest.mark.parametrize("block_m", [1, 16])
def test_ranks_have_a_part_of_the_experts(block_m: int) -> None:
    """The sum of the parts is the whole; a token none of whose experts is here adds nothing."""
    whole = weights_of(6, 32, 16, CLAMPED, biases=True)
    x, (experts, factors) = rand(20, 32), choices(20, 6, 2)
    total = torch.zeros(20, 32, device=DEVICE)
    for first in (0, 3):
        names = ("gate_up", "down", "gate_up_bias", "down_bias")
        own = replace(whole, first=first, **{name: getattr(whole, name)[first : first + 3] for name in names})
        with tuning.forced("experts", {**TILES, "block_m": block_m}):
            part = TritonExperts(own)(x, experts, factors)
        is_here = ((experts >= first) & (experts < first + 3)).any(-1)
        assert not is_here.all() and not part[~is_here].any()
        total += part
    assert_same(total, reference.LoopedExperts(whole)(x, experts, factors), 1e-5)


@pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")
@pytest.mark.parametrize("block_m", [1, 16])
def test_a_row_is_the_same_in_any_company(block_m: int) -> None:
    """Rows that are not finite, as those that fill up a step may be, change no other row.

    Under the interpreter products are numpy's, whose last bits depend on a row's place on some CPUs.
    """
    weights = weights_of(6, 32, 16, GatedActivation())
    x, (experts, factors) = rand(20, 32), choices(20, 6, 2)
    with tuning.forced("experts", {**TILES, "block_m": block_m}):
        run = TritonExperts(weights)
        alone = run(x[:7], experts[:7], factors[:7])
        x[7:] = float("nan")
        beside_others = run(x, experts, factors)[:7]
        order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
        again = run(x[order], experts[order], factors[order])
    for found in (beside_others, again[order.argsort()][:7]):
        assert (
            torch.equal(found, alone) if DEVICE.type == "cuda" else torch.allclose(found, alone, rtol=1e-5, atol=1e-6)
        )


def quantised(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    groups = weight.unflatten(-1, (-1, group))
    scales = groups.abs().amax(-1) / 448.0
    return (groups / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).view(weight.shape), scales


def dequantised(weight: Tensor, scales: Tensor) -> Tensor:
    return weight.float() * scales.repeat_interleave(weight.shape[-1] // scales.shape[-1], -1)


@pytest.mark.parametrize("block_m", [1, 16])
def test_fp8_in_blocks(block_m: int) -> None:
    """Tiles quantise their inputs, too: the reference does so by hand."""
    plain = weights_of(4, 256, 128, GatedActivation())
    (gate_up, gate_up_scales), (down, down_scales) = quantised(plain.gate_up, GROUP), quantised(plain.down, GROUP)
    stored = replace(plain, gate_up=gate_up, gate_up_scales=gate_up_scales, down=down, down_scales=down_scales)
    wide = replace(plain, gate_up=dequantised(gate_up, gate_up_scales), down=dequantised(down, down_scales))
    x, (experts, factors) = rand(5, 256), choices(5, 4, 2)
    with tuning.forced("experts", {**TILES, **WIDE, "block_m": block_m}):
        actual = TritonExperts(stored)(x, experts, factors)
    if block_m == 1:
        assert_same(actual, reference.LoopedExperts(wide)(x, experts, factors), 1e-5)
        return
    expected = torch.zeros_like(actual)
    x_rounded = dequantised(*quantise_rows(x, GROUP))
    for token, choice in [(token, choice) for token in range(5) for choice in range(2)]:
        expert = int(experts[token, choice])
        inner = reference.activate(x_rounded[token] @ wide.gate_up[expert].t(), wide.activation)
        inner = dequantised(*quantise_rows(inner.unsqueeze(0), GROUP))[0]
        expected[token] += factors[token, choice] * (inner @ wide.down[expert].t())
    # A sum that is rounded another way may fall on the other side of a step of FP8
    assert_same(actual, expected, 2e-2)
    assert float((actual - expected).abs().mean()) < 1e-3


@pytest.mark.parametrize("matrix", ["gate_up", "down"])
def test_tiles_refuse_one_scale_for_each_row(matrix: str) -> None:
    """They would read beyond the scales."""
    plain = weights_of(4, 256, 256, GatedActivation())
    stored, scales = quantised(getattr(plain, matrix), 256)
    weights = replace(plain, **{matrix: stored, f"{matrix}_scales": scales})
    x, (experts, factors) = rand(5, 256), choices(5, 4, 2)
    with tuning.forced("experts", {**TILES, **WIDE, "block_m": 16}), pytest.raises(AssertionError, match="each group"):
        TritonExperts(weights)(x, experts, factors)


@pytest.mark.parametrize("block_m", [1, 16])
def test_fp8_beside_a_share_that_is_not_whole_groups(block_m: int) -> None:
    plain = weights_of(4, 256, 96, GatedActivation())
    gate_up, scales = quantised(plain.gate_up, GROUP)
    wide = replace(plain, gate_up=dequantised(gate_up, scales))
    x, (experts, factors) = dequantised(*quantise_rows(rand(5, 256), GROUP)), choices(5, 4, 2)
    with tuning.forced("experts", {**TILES, **WIDE, "block_m": block_m}):
        actual = TritonExperts(replace(plain, gate_up=gate_up, gate_up_scales=scales))(x, experts, factors)
    assert_same(actual, reference.LoopedExperts(wide)(x, experts, factors), 1e-5)


def test_few_tokens_are_not_sorted() -> None:
    from splitserve.kernels.experts.launch import expert_launch

    def sizes(counts: tuple[int, ...], dtype: torch.dtype) -> list[int]:
        of_model = {"num_experts": 8, "top_k": 2, "dtype": dtype, "down_dtype": dtype, "device": torch.device("cpu")}
        return [expert_launch("", num_tokens=count, **of_model).block_m for count in counts]

    assert sizes((1, 2, 3, 47, 48, 100, 200), torch.bfloat16) == [1, 1, 16, 16, 32, 64, 128]
    assert sizes((1, 4, 5, 100, 200, 5000), torch.float8_e4m3fn) == [1, 1, 16, 32, 64, 64]
    assert sizes((1, 8, 9, 200, 5000), torch.uint8) == [1, 1, 16, 32, 64]


def test_tiles_fit_into_a_device() -> None:
    from splitserve.kernels.experts.launch import ExpertLaunch, SharedMemory, fitted

    def of(launch: ExpertLaunch, dtype: torch.dtype, num_bytes: int, has_operands: bool = True) -> ExpertLaunch:
        return fitted(launch, dtype, dtype, SharedMemory(num_bytes, has_operands))

    large = ExpertLaunch(128, 128, 64, 256, 64, num_warps=8, num_stages=4)
    assert of(large, torch.bfloat16, 4 * 49152) == large
    assert of(large, torch.bfloat16, 4 * 49152 - 1) == replace(large, num_stages=3)
    assert of(large, torch.bfloat16, 99 << 10, has_operands=False).num_stages == 3, "an L40S has so much"
    assert of(large, torch.bfloat16, 3 * 49152, has_operands=False) == large, (
        "one of them is in registers before Hopper"
    )
    assert of(large, torch.bfloat16, 3 * 49152 - 1, has_operands=False) == replace(large, num_stages=3)
    few_threads = of(replace(large, num_warps=4), torch.bfloat16, 1 << 20)
    assert (few_threads.block_n, few_threads.down_block_n) == (64, 128), "128 sums for each thread"
    scaled = of(large, torch.float8_e4m3fn, 1 << 20)
    assert (scaled.block_n, scaled.down_block_n) == (64, 128), "with scales, each thread has two of each sum"
    low = ExpertLaunch(16, 64, 256, 128, 128, num_stages=5)
    assert of(low, torch.bfloat16, 227 << 10).num_stages == 4, "one of them is in registers"
    deep = ExpertLaunch(64, 128, 256, 128, 128, num_stages=2)
    assert of(deep, torch.bfloat16, 227 << 10) == replace(deep, block_k=128), "two stages are the least"
    mixed = ExpertLaunch(64, 64, 128, 128, 128, num_stages=4)
    assert fitted(mixed, torch.float8_e4m3fn, torch.bfloat16, SharedMemory(99 << 10)) == replace(mixed, num_stages=2)
