"""Norms in float32: the reference against PyTorch's own, and Triton's kernel against the reference."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

from splitserve.kernels.norms import NormWeights
from splitserve.kernels.reference.norms import PlainNorm
from splitserve.kernels.triton.norms import TritonNorm

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.on_gpu]

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# The interpreter rounds casts to bfloat16 towards zero.
DTYPES = [torch.float32, torch.bfloat16 if DEVICE.type == "cuda" else torch.float16]
EPS = 1e-5


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def weights(size: int, *, centred: bool = False, shifted: bool = False, seed: int = 1) -> NormWeights:
    return NormWeights(1 + rand(size, seed=seed), EPS, centred, rand(size, seed=seed + 1) if shifted else None)


def assert_close(actual: Tensor | None, expected: Tensor | None) -> None:
    assert actual is not None and expected is not None
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_reference() -> None:
    """Rows with a mean of 3, which only a centred norm takes away."""
    x = 3 + rand(4, 24, seed=5)
    norm = weights(24, centred=True, shifted=True)
    assert_close(PlainNorm(norm)(x), F.layer_norm(x, (24,), norm.weight, norm.shift, EPS))
    norm = weights(24)
    assert_close(PlainNorm(norm)(x), F.rms_norm(x, (24,), norm.weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "centred"])
@pytest.mark.parametrize("shifted", [False, True], ids=["weight", "shift"])
@pytest.mark.parametrize(("rows", "size"), [(1, 7), (3, 128), (2, 1030)])
def test_triton(rows: int, size: int, shifted: bool, centred: bool, dtype: torch.dtype) -> None:
    norm = weights(size, centred=centred, shifted=shifted)
    x = (2 + rand(rows, size)).to(dtype)
    before = x.clone()
    assert_close(TritonNorm(norm)(x), PlainNorm(norm)(x))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_lie_apart_are_normalised_in_place(dtype: torch.dtype) -> None:
    norm, rows = weights(128), (2 + rand(3, 200)).to(dtype)
    expected = rows.clone()
    PlainNorm(norm)(expected[:, 40:168], out=expected[:, 40:168])
    part = rows[:, 40:168]
    assert TritonNorm(norm)(part, out=part) is part
    assert_close(rows, expected)
    assert not torch.equal(rows[:, 40:168], (2 + rand(3, 200)).to(dtype)[:, 40:168])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("followed", ["no norm", "rms", "centred"])
@pytest.mark.parametrize(("rows", "size"), [(1, 7), (3, 128), (2, 1030)])
def test_triton_adds_to_the_residual(rows: int, size: int, followed: str, dtype: torch.dtype) -> None:
    """The norm that follows has a mean, weights and a shift of its own."""
    norm = weights(size, shifted=followed == "rms")
    following = None
    if followed != "no norm":
        following = weights(size, centred=followed == "centred", shifted=followed == "centred", seed=7)
    x, residual = (2 + rand(rows, size)).to(dtype), (1 + rand(rows, size, seed=9)).to(dtype)
    expected_residual = residual.clone()
    expected = PlainNorm(norm).add_to(expected_residual, x, following)
    actual = TritonNorm(norm).add_to(residual, x, following)
    assert_close(residual, expected_residual)
    if following is None:
        assert actual is expected is None
    else:
        assert_close(actual, expected)
