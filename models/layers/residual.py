"""The residual stream. A family writes ``x += attention(norm(x))``; this turns it into fused operations.

Both sums and norms are lazy. A sum waits for the norm that follows, so that the kernel that adds, or an all-reduce, may
normalise the rows that it has just added to (:class:`splitserve.kernels.api.ResidualLinear`,
:class:`splitserve.kernels.norms.Norm`). A norm waits for the product that follows, which normalises its input by itself
unless that was done (``NormedLinear``).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from splitserve.kernels.api import ResidualLinear
    from splitserve.kernels.norms import Norm


@dataclass(frozen=True, slots=True)
class Product:
    """A product that is still to be computed and added to the residual."""

    linear: "ResidualLinear"
    x: "Tensor"  # [T, in_features], or [R, in_features] with rows
    rows: "Tensor | None" = None  # int64 [R]: rows of the residual that are kept from here on; None: all
    bias: "Tensor | None" = None  # [hidden]

    def computed(self, hidden_size: int) -> "Tensor":
        """Return the product [T, hidden_size], summed over all ranks."""
        out = self.x.new_zeros((self.x.shape[0], hidden_size))
        self.linear.add_to(out, self.x, bias=self.bias)
        return out


@dataclass(frozen=True, slots=True)
class Summand:
    """A computed value that is still to be added to the residual."""

    value: "Tensor"  # [T, hidden], or [R, hidden] with rows
    rows: "Tensor | None" = None  # as in Product
    norm: "Norm | None" = None  # what it is normalised by before


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

    def kept(self, rows: "Tensor | None") -> "Normed":
        """Return the given rows; None: all."""
        if rows is None:
            return self
        normed = None if self.normed is None else self.normed[rows]
        return Normed(self.hidden[rows], self.weight, self.eps, normed)


class Residual:
    """The hidden states of a step's tokens. ``hidden`` [T, hidden] is added to in place."""

    def __init__(self, hidden: "Tensor") -> None:
        self._hidden = hidden
        self._pending: Product | Summand | None = None

    def __iadd__(self, product: Product | Summand) -> "Residual":
        self._settle()
        if product.rows is not None:
            self._hidden = self._hidden[product.rows]
        self._pending = product
        return self

    def scale(self, factor: float) -> None:
        """Multiply all of it by ``factor``, rounded to its dtype."""
        self._settle()
        self._hidden.mul_(self._hidden.new_full((), factor))  # filled on the device: CUDA graphs capture no copy

    def normed(self, weight: "Tensor", eps: float) -> Normed:
        """Carry out the sum that is pending, and return the residual to be normalised by ``weight``."""
        normed = self._settle(weight, eps)
        return Normed(self._hidden, weight, eps, normed)

    def normalised(self, norm: "Norm") -> "tuple[Tensor, Tensor]":
        """Carry out the sum that is pending; return the residual, and what it is when normalised by ``norm``."""
        pending = self._pending
        if isinstance(pending, Summand) and pending.norm is not None:
            self._pending = None
            normed = pending.norm.add_to(self._hidden, pending.value, norm.weights)
            assert normed is not None
            return self._hidden, normed
        hidden = self.settled()
        return hidden, norm(hidden)

    def settled(self) -> "Tensor":
        """Carry out the sum that is pending, and return the residual itself."""
        self._settle()
        return self._hidden

    def unnormed(self) -> Normed:
        """Carry out the sum that is pending, and return the residual for products that take it as it is."""
        hidden = self.settled()
        return Normed(hidden, hidden[0], 0.0, hidden)

    def _settle(self, weight: "Tensor | None" = None, eps: float = 0.0) -> "Tensor | None":
        pending = self._pending
        if pending is None:
            return None
        self._pending = None
        if isinstance(pending, Summand):
            if pending.norm is None:
                self._hidden.add_(pending.value)
            else:
                pending.norm.add_to(self._hidden, pending.value)
            return None
        return pending.linear.add_to(self._hidden, pending.x, weight, eps, bias=pending.bias)
