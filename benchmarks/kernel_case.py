"""One operation at one shape, and the model and device whose shapes are taken."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from splitserve.kernels.api import Kernels
from splitserve.kernels.tunables import num_copies
from splitserve.models.config import ModelConfig

Call = Callable[[], Tensor]
MakeCalls = Callable[[Kernels], list[Call]]


@dataclass(frozen=True, slots=True)
class Case:
    """One operation at one shape. ``make_calls`` with a backend's kernels: calls on fresh, equal inputs; their answers
    are what the operation returns or writes. ``num_bytes``, ``flops``: what a call must move and compute at least."""

    operation: str
    name: str
    rows: int
    num_bytes: int
    flops: int
    make_calls: MakeCalls
    can_be_captured: bool = True


@dataclass(frozen=True, slots=True)
class Target:
    """``context``: tokens of each sequence that is decoded."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    block_size: int
    context: int

    def normal(self, *sizes: int, scale: float = 1.0) -> Tensor:
        """Random numbers of standard deviation ``scale``, on the device."""
        return torch.empty(sizes, dtype=self.dtype, device=self.device).normal_(0.0, scale)

    def copies(self, num_bytes: int, make: Callable[[], Tensor]) -> list[Tensor]:
        return [make() for _ in range(num_copies(num_bytes, self.device))]
