"""The weights of a layer's experts on one rank."""

from dataclasses import dataclass

from torch import Tensor

from splitserve.kernels.experts.spec import GatedActivation
from splitserve.kernels.fp8.weight import GROUP


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts ``first`` to ``first + N - 1`` of a layer, all of each or the rank's share of its inner dimension I.

    ``gate_up`` and ``down`` are in the model's dtype, or float8_e4m3fn with a scale for each row's groups of elements.
    """

    gate_up: Tensor  # [N, 2 * I, hidden]
    down: Tensor  # [N, hidden, I]
    activation: GatedActivation
    first: int = 0
    gate_up_bias: Tensor | None = None  # [N, 2 * I]
    down_bias: Tensor | None = None  # [N, hidden]; where ranks share I, one of them has it and the others have zeros
    gate_up_scales: Tensor | None = None  # float32 [N, 2 * I, S]; one for all of a row, or for each 128 elements
    down_scales: Tensor | None = None  # float32 [N, hidden, S]

    @property
    def num_experts(self) -> int:
        """Experts that this rank has."""
        return self.gate_up.shape[0]

    @property
    def inner_size(self) -> int:
        """I, of this rank."""
        return self.down.shape[2]

    @staticmethod
    def group(weight: Tensor, scales: Tensor | None) -> int:
        """Return the elements of a row that share a scale."""
        columns = weight.shape[2]
        return columns if scales is None or scales.shape[2] == 1 else GROUP
