"""The residual stream. A family writes ``x += attention(norm(x))``; this turns it into fused operations.

Both sums and norms are lazy. A sum waits for the norm that follows, so that the product's kernel, or an all-reduce, may
normalise the rows that it has just added to (:class:`splitserve.kernels.api.ResidualLinear`). A norm waits for the
product that follows, which normalises its input by itself unless that was done (``NormedLinear``).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from splitserve.kernels.api import ResidualLinear


@dataclass(frozen=True, slots=True)
class Product:
    """A product that is still to be computed and added to the residual."""

    linear: "ResidualLinear"
    x: "Tensor"  # [T, in_features], or [R, in_features] with rows
    rows: "Tensor | None" = None  # int64 [R]: rows of the residual that are kept from here on; None: all


@dataclass(frozen=True, slots=True)
class Normed:
    """The residual, RMS-normalised by the product that takes it. Use it before the residual is added to again."""

    hidden: "Tensor"  # [T, hidden], not normalised
    weight: "Tensor"  # [hidden]
    eps: float
    normed: "Tensor | None"  # [T, hidden], where it is normalised already

    def rows(self, start: int, stop: int) -> "Normed":
        """Return the rows from ``start`` up to ``stop``."""
        normed = None if self.normed is None else self.normed[start:stop]
        return Normed(self.hidden[start:stop], self.weight, self.eps, normed)


class Residual:
    """The hidden states of a step's tokens. ``hidden`` [T, hidden] is added to in place."""

    def __init__(self, hidden: "Tensor") -> None:
        self._hidden = hidden
        self._pending: Product | None = None

    def __iadd__(self, product: Product) -> "Residual":
        if self._pending is not None:
            self._pending.linear.add_to(self._hidden, self._pending.x)
        if product.rows is not None:
            self._hidden = self._hidden[product.rows]
        self._pending = product
        return self

    def normed(self, weight: "Tensor", eps: float) -> Normed:
        """Carry out the sum that is pending, and return the residual to be normalised by ``weight``."""
        normed, pending = None, self._pending
        if pending is not None:
            self._pending = None
            normed = pending.linear.add_to(self._hidden, pending.x, weight, eps)
        return Normed(self._hidden, weight, eps, normed)
