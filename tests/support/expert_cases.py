"""Shared parts of the tests of experts: inputs, a comparison. Import it once Triton's interpreter is chosen."""

import torch
from torch import Tensor

from splitserve.kernels.experts import reference
from splitserve.kernels.experts.spec import GatedActivation, RouterSpec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter rounds casts to bfloat16 towards zero and mixes up its matrix products.
NARROW = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
CLAMPED = GatedActivation(interleaved=True, limit=0.7, sigmoid_factor=1.702, up_offset=1.0)


def rand(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std).to(DEVICE)


def choices(num_tokens: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    return reference.route(rand(num_tokens, num_experts, seed=5), None, RouterSpec(num_experts, top_k, normalised=True))


def assert_same(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
