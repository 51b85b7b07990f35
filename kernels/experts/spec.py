"""Routers and activations of mixtures of experts, as plain values. No torch here: configs are read with them."""

from dataclasses import dataclass
from enum import Enum, StrEnum

MXFP4_GROUP = 32
"""Elements of a row that share a scale in MXFP4 (:mod:`splitserve.kernels.experts.mxfp4`)."""


class Score(StrEnum):
    """The function that turns a router's logits into scores of experts."""

    SOFTMAX = "softmax"  # over all experts
    SIGMOID = "sigmoid"
    SOFTMAX_OF_TOP = "softmax_of_top"  # experts are chosen by their logits; the softmax is over the chosen ones


class GroupScore(Enum):
    """The score of a group of experts."""

    MAX = "max"  # that of its best expert
    TOP2_SUM = "top2_sum"  # the sum of its best two


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """The choice of ``top_k`` of ``num_experts`` experts for each token, and their weights.

    Scores come from logits; a correction bias, where there is one, is added for the choice, not to the weights. With
    several groups of neighbouring experts only the best ``kept_groups`` take part in the choice.
    """

    num_experts: int
    top_k: int
    score: Score = Score.SOFTMAX
    normalised: bool = False  # weights are divided by their sum
    scale: float = 1.0  # factor of the weights
    num_groups: int = 1
    kept_groups: int = 1
    group_score: GroupScore = GroupScore.TOP2_SUM
    correction_bias: bool = False  # of the scores, for the choice alone
    logits_bias: bool = False  # of the logits
    wide_logits: bool = False  # logits are computed in float32, else in the model's dtype

    @property
    def group_size(self) -> int:
        """Experts of a group."""
        return self.num_experts // self.num_groups


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """``function(gate) * (up + up_offset)``, gate at most ``limit``, up within plus and minus ``limit``.

    ``sigmoid_factor``: of the gate in silu's sigmoid: ``gate * sigmoid(factor * gate)``.
    """

    function: str = "silu"  # a name of splitserve.kernels.experts.reference.FUNCTIONS
    interleaved: bool = False  # rows of gate and up alternate, else all of gate come first
    limit: float | None = None
    sigmoid_factor: float = 1.0
    up_offset: float = 0.0
