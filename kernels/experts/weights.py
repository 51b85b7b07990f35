"""A layer's router and its experts on one rank, as operations, and their weights."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from splitserve.kernels.experts.spec import GatedActivation, RouterSpec
from splitserve.kernels.fp8.weight import GROUP

if TYPE_CHECKING:
    from splitserve.kernels.experts.shared_expert import SharedExpert


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """The weights of a layer's router, whole on every rank."""

    spec: RouterSpec
    weight: Tensor  # [E, hidden], in float32 if the spec has wide logits, else in the model's dtype
    bias: Tensor | None = None  # [E], of the logits
    correction: Tensor | None = None  # float32 [E], of the scores, for the choice alone
    has_shared: bool = False  # a shared expert without a gate follows, whose weights don't depend on the choice


class Router(Protocol):
    """A layer's router: an operation of :class:`splitserve.kernels.api.Kernels`."""

    def __call__(
        self, x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the RMS-normalised ``x`` [T, hidden] (:class:`splitserve.kernels.api.RmsNorm`), and its experts and
        their weights as :class:`splitserve.kernels.api.Route` chooses them. ``normed``: the normalised ``x``, if it is
        computed already."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts ``first`` to ``first + N - 1`` of a layer, all of each or the rank's share of its inner dimension I.

    ``gate_up`` and ``down`` are in the model's dtype, or float8_e4m3fn with a scale for each row's groups of elements:
    each by itself, since a rank's share of I may not be whole groups.
    In MXFP4 (:mod:`splitserve.kernels.experts.mxfp4`) they are uint8 with half as many columns; the Triton kernels make
    copies in another order, of which rows can't be taken.
    """

    gate_up: Tensor  # [N, 2 * I, hidden]
    down: Tensor  # [N, hidden, I]
    activation: GatedActivation
    first: int = 0
    gate_up_bias: Tensor | None = None  # [N, 2 * I]
    down_bias: Tensor | None = None  # [N, hidden]; where ranks share I, one of them has it and the others have zeros
    gate_up_scales: Tensor | None = None  # float32 [N, 2 * I, S], for each 128 elements; kernels that sort no pairs
    # take one for all of a row, too. Of MXFP4 uint8, for each 32
    down_scales: Tensor | None = None  # [N, hidden, S], likewise

    @property
    def num_experts(self) -> int:
        """Experts that this rank has."""
        return self.gate_up.shape[0]

    @property
    def inner_size(self) -> int:
        """I, of this rank."""
        return self.gate_up.shape[1] // 2

    @property
    def is_mxfp4(self) -> bool:
        """Return whether the matrices are in MXFP4."""
        return self.down.dtype == torch.uint8

    @staticmethod
    def group(weight: Tensor, scales: Tensor | None) -> int:
        """Return the elements of a row that share a scale, of a weight that isn't in MXFP4."""
        columns = weight.shape[2]
        return columns if scales is None or scales.shape[2] == 1 else GROUP


class Experts(Protocol):
    """The MLPs of a layer's experts on one rank: an operation of :class:`splitserve.kernels.api.Kernels`, of
    :class:`ExpertWeights`."""

    def __call__(self, x: Tensor, experts: Tensor, factors: Tensor, shared: "SharedExpert | None" = None) -> Tensor:
        """Return the sum of each row's experts' products, times their factors -> float32 [T, hidden].

        ``x`` [T, hidden]; ``experts`` int32 [T, k], distinct in each row; ``factors`` float32 [T, k]. Experts of other
        ranks add nothing. ``shared``: its product is added to each row's sum. The order of each sum depends on the
        row's experts alone.
        """
        ...

    def add_to(
        self, residual: Tensor, x: Tensor, experts: Tensor, factors: Tensor, shared: "SharedExpert | None" = None
    ) -> None:
        """Add these sums, rounded to the dtype of ``residual`` [T, hidden], to it, in place: what ``shared`` adds may
        be rounded by itself."""
        ...
