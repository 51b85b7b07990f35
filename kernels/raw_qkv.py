"""A layer's queries, keys and values before they are prepared. No torch here: descriptions of layers import it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RawQkv:
    """Queries, keys and values as their projection leaves them, with what is to be done to them.

    The sum of the projection's parts (:meth:`splitserve.kernels.api.Linear.parts`) is rounded to the dtype of
    ``rotation``. Queries and keys are normalised; then the halves of each of their heads are rotated (the "neox"
    order).
    """

    parts: "Tensor"  # [S, T, H + 2 * G, D]
    norm: "Tensor | None"  # weights of the RMS norm of queries and keys [H + G, D]; None: there is no norm
    eps: float  # of the norm
    rotation: "tuple[Tensor, Tensor]"  # cos, sin [T, D]: the first half of sin is negated (models.layers.rotary)
    slots: "Tensor"  # int64 [T, G]: where keys and values go (AttentionShape.slots); on GPUs negative: nowhere
    bias: "Tensor | None" = None  # [(H + 2 * G) * D], part of the sum
