"""Norms that are computed in float32 together with their weights: Gemma's, OLMo 2's, LayerNorm.

Llama's RMS norm rounds a row before it multiplies it by the weight, and is part of products
(:class:`splitserve.kernels.api.NormedLinear`). These norms aren't; but a norm of what is added to the residual, the
addition, and the norm of the sum can be one operation.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class NormWeights:
    """A norm over a row of N elements: ``x / rms(x) * weight + shift``, rounded once."""

    weight: Tensor  # float32 [N]
    eps: float
    centred: bool = False  # the row's mean is subtracted first, as in LayerNorm
    shift: Tensor | None = None  # float32 [N]


class Norm(Protocol):
    """A norm of rows of N elements."""

    @property
    def weights(self) -> NormWeights: ...

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the normalised ``x`` [T, N] in its dtype: in ``out`` [T, N], if given, which may be ``x``.

        The rows of both may lie apart.
        """
        ...

    def add_to(self, residual: Tensor, x: Tensor, following: NormWeights | None = None) -> Tensor | None:
        """Add the normalised ``x`` [T, N], rounded, to ``residual`` [T, N] in place; both are contiguous, of one dtype.

        Return the residual normalised by ``following``; None without it.
        """
        ...
