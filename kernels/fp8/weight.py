"""Weights stored in FP8 (float8_e4m3fn), with a scale for each group of a row's elements."""

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 128
"""Elements of a row that share a scale in block-scaled checkpoints."""


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A rank's part of a weight, and its scales."""

    weight: Tensor  # float8_e4m3fn [N, K]
    scales: Tensor  # float32 [N, S]
    group: int  # columns per scale; at least K for a scale of whole rows
    skipped: int = 0  # columns of the first group before the weight: a rank's part may begin within a group

    @property
    def has_whole_rows(self) -> bool:
        return self.scales.shape[1] == 1

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in another dtype, [N, K]."""
        columns = torch.arange(self.weight.shape[1], device=self.weight.device) + self.skipped
        return (self.weight.float() * self.scales[:, columns // self.group]).to(dtype)
