"""Norm, rotation, activation, KV write, linear: each against a naive oracle written out here, over odd shapes."""

import math

import psutil
import pytest
import torch
from torch import Tensor

from splitserve.kernels.api import AttentionShape
from splitserve.kernels.reference import linear
from splitserve.kernels.reference import operations as reference
from splitserve.kernels.registry import OPERATIONS, select_kernels

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (3, 7), (5, 3, 33), (1, 24, 128), (17, 1024)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype), random(*shape[1:], dtype=dtype, seed=1)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_close(reference.rms_norm(x.clone(), weight, 1e-5), expected)


def test_rms_norm_of_tiny_values_is_governed_by_epsilon() -> None:
    x = torch.full((1, 4), 1e-6)
    expected = 1e-6 / (1e-12 + 1e-5) ** 0.5
    torch.testing.assert_close(reference.rms_norm(x, torch.ones(4), 1e-5), torch.full((1, 4), expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(1, 1, 2), (3, 5, 6), (7, 24, 128)])
def test_rope_rotates_each_pair_of_halves(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    x = random(tokens, heads, head_dim, dtype=dtype)
    half = head_dim // 2
    angles = random(tokens, half, seed=1).double() * 10
    cos = torch.cat((angles.cos(), angles.cos()), 1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), 1).to(dtype)
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    rotated = pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    expected = torch.cat((rotated.real, rotated.imag), dim=-1)
    assert_close(reference.rope(x, cos, sin), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "intermediate"), [(1, 1), (3, 5), (2, 3072)])
def test_silu_mul(tokens: int, intermediate: int, dtype: torch.dtype) -> None:
    gate_up = random(tokens, 2 * intermediate, dtype=dtype)
    gate, up = gate_up[:, :intermediate].double(), gate_up[:, intermediate:].double()
    expected = gate / (1 + (-gate).exp()) * up
    assert_close(reference.silu_mul(gate_up), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_mul(dtype: torch.dtype) -> None:
    gate_up = random(3, 10, dtype=dtype)
    gate, up = gate_up[:, :5].double(), gate_up[:, 5:].double()
    expected = gate / 2 * (1 + (math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).tanh()) * up
    assert_close(reference.gelu_mul(gate_up), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_write_touches_its_slots_and_nothing_else(dtype: torch.dtype) -> None:
    num_layers, heads, block_size, head_dim = 3, 2, 4, 6
    cache = random(5, num_layers, heads, 2, block_size, head_dim, dtype=dtype)
    expected = cache.clone()
    blocks, offsets = torch.tensor([4, 0, 4, 2]), torch.tensor([3, 0, 1, 2])
    # Strided, as they come out of the fused projection.
    key = random(4, 7, head_dim, dtype=dtype, seed=1)[:, 3:5]
    value = random(4, 7, head_dim, dtype=dtype, seed=1)[:, 5:]
    shape = AttentionShape(heads, heads, head_dim, block_size, num_layers, dtype, CPU)
    reference.kv_write(cache[:, 1], key, value, shape.slots(blocks, offsets))
    for token, (block, offset) in enumerate(zip(blocks.tolist(), offsets.tolist(), strict=True)):
        for head in range(heads):
            expected[block, 1, head, 0, offset] = key[token, head]
            expected[block, 1, head, 1, offset] = value[token, head]
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [linear.PlainLinear, linear.OneDnnLinear])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 3, 5), (7, 33, 17), (33, 24, 8), (130, 128, 200), (2, 64, 1)]
)
def test_linear(kind: type, dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> None:
    if kind is linear.OneDnnLinear and (reason := linear.onednn_unavailable_reason(CPU, dtype)):
        pytest.skip(reason)
    weight, x = random(outputs, inputs, dtype=dtype), random(rows, inputs, dtype=dtype, seed=1)
    packed = kind(weight, rms_norm=reference.rms_norm, silu_mul=reference.silu_mul)
    assert (packed.in_features, packed.out_features) == (inputs, outputs)
    expected = x.double() @ weight.double().T
    actual = packed(x)
    assert actual.dtype == dtype
    scale = float(expected.abs().max())
    assert float((actual.double() - expected).abs().max()) <= TOLERANCE[dtype] * scale * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [linear.PlainLinear, linear.OneDnnLinear])
def test_linear_with_what_stands_around_it(kind: type, dtype: torch.dtype) -> None:
    if kind is linear.OneDnnLinear and (reason := linear.onednn_unavailable_reason(CPU, dtype)):
        pytest.skip(reason)
    weight, x, norm = random(48, 24, dtype=dtype), random(5, 24, dtype=dtype, seed=1), random(24, dtype=dtype, seed=2)
    packed = kind(weight, rms_norm=reference.rms_norm, silu_mul=reference.silu_mul)
    normed = reference.rms_norm(x, norm, 1e-5)
    assert_close(packed.after_norm(x, norm, 1e-5), normed @ weight.T)
    assert_close(packed.gated_after_norm(x, norm, 1e-5), reference.silu_mul(normed @ weight.T))
    residual = random(5, 48, dtype=dtype, seed=3)
    expected = residual.double() + x.double() @ weight.double().T
    packed.add_to(residual, x)
    assert_close(residual, expected)


def test_packing_keeps_no_hold_on_the_plain_weight() -> None:
    if reason := linear.onednn_unavailable_reason(CPU, torch.float32):
        pytest.skip(reason)
    weight = random(8, 8)
    packed = linear.OneDnnLinear(weight, rms_norm=reference.rms_norm, silu_mul=reference.silu_mul)
    before = packed(torch.eye(8))
    weight.zero_()
    assert torch.equal(packed(torch.eye(8)), before) and bool(before.any())


def test_memory_does_not_grow_with_the_numbers_of_rows_seen() -> None:
    if reason := linear.onednn_unavailable_reason(CPU, torch.float32):
        pytest.skip(reason)
    packed = linear.OneDnnLinear(random(64, 64), rms_norm=reference.rms_norm, silu_mul=reference.silu_mul)
    padded = {linear.padded_rows(rows) for rows in range(1, 385)}
    for rows in sorted(padded, reverse=True):
        packed(torch.ones(rows, 64))
    before = psutil.Process().memory_info().rss
    for rows in range(1, 385):
        assert packed(torch.ones(rows, 64)).shape == (rows, 64)
    grown = psutil.Process().memory_info().rss - before
    assert grown < 16 << 20, f"{len(padded)} numbers of rows are enough, yet {grown >> 20} MiB more for the others"


def test_padding_costs_a_sixteenth_at_most_and_leaves_few_numbers_of_rows() -> None:
    assert [linear.padded_rows(rows) for rows in (1, 17, 32, 33, 64, 65, 512, 513, 2048)] == [
        1, 17, 32, 34, 64, 68, 512, 544, 2048,
    ]  # fmt: skip
    assert all(rows <= linear.padded_rows(rows) <= rows * 17 / 16 for rows in range(1, 5000))
    assert len({linear.padded_rows(rows) for rows in range(1, 2049)}) == 128


def test_selection_names_a_backend_for_each_operation() -> None:
    kernels = select_kernels(CPU, torch.float32, {"pack_linear": "reference"})
    assert set(kernels.backends) == set(OPERATIONS)
    assert isinstance(kernels.pack_linear(random(2, 3)), linear.PlainLinear)
    assert select_kernels(CPU, torch.float64).backends["pack_linear"] == "reference"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"convolve": "reference"}, "unknown operation 'convolve'"),
        ({"silu_mul": "magic"}, "silu_mul has no backend 'magic'; there are triton, reference"),
        ({"pack_linear": "onednn"}, "can't run pack_linear: it takes float32 and bfloat16"),
    ],
)
def test_a_wrong_override_says_why(overrides: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_kernels(CPU, torch.float64, overrides)
