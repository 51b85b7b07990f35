"""Case of a kernel bench: one operation at one shape, and the model and device that determine the shapes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from splitserve.kernels.api import Kernels
from splitserve.kernels.tuning.tunables import num_copies
from splitserve.models.config import ModelConfig

Call = Callable[[], Tensor]
MakeCalls = Callable[[Kernels], list[Call]]


@dataclass(frozen=True, slots=True)
class Case:
    """One operation at one shape."""

    operation: str
    name: str
    rows: int
    num_bytes: int  # that a call must move at least
    flops: int  # that a call must compute at least
    # With a backend's kernels: calls on fresh, equal inputs; each returns what the operation returns or writes.
    make_calls: MakeCalls
    can_be_captured: bool = True


@dataclass(frozen=True, slots=True)
class Target:
    """Model and device whose shapes are measured."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    block_size: int
    context: int  # tokens of each sequence that is decoded

    def normal(self, *sizes: int, scale: float = 1.0) -> Tensor:
        """Return random numbers of standard deviation ``scale``, on the device."""
        return torch.empty(sizes, dtype=self.dtype, device=self.device).normal_(0.0, scale)

    def copies(self, num_bytes: int, make: Callable[[], Tensor]) -> list[Tensor]:
        return [make() for _ in range(num_copies(num_bytes, self.device))]
