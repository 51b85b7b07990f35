"""Projections from the normalised residual, and back to it."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from splitserve.models.layers.layer import Layer, WeightSource
from splitserve.models.layers.residual import Normed, Product
from splitserve.models.layers.weight import Role, Stack, Units, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from splitserve.kernels.api import Linear, ResidualLinear


class InputProjections(Layer):
    """Several projections of the same input, computed as one product, and split along their outputs."""

    _linear: "Linear"
    _bias: "Tensor | None"

    def __init__(self, in_features: int, outputs: Sequence[tuple[str, int, Units]], *, biases: bool = False) -> None:
        """``outputs``: (name, out_features, units that ranks share) of each; with ``biases`` each has one."""
        self._weights = tuple(
            Weight(f"{name}.weight", (size, in_features), Role.PROJECTION, rows=units) for name, size, units in outputs
        )
        self._biases = tuple(
            Weight(f"{name}.bias", (size,), Role.BIAS, rows=units) for name, size, units in outputs if biases
        )

    def stacks(self) -> Iterator[Stack]:
        yield self._weights
        if self._biases:
            yield self._biases

    def load(self, source: WeightSource, factors: Sequence[float] = ()) -> None:
        """Take the tensors; each projection's outputs are multiplied by its factor (none given: 1)."""
        self._linear = source.linear(self._weights, factors)
        self._bias = source.vector(self._biases, factors) if self._biases else None

    def __call__(self, x: Normed) -> "Tensor":
        """Return [S, T, out_features], to be added up by the operation that follows (kernels.api.Linear.parts)."""
        parts = self._linear.parts_after_norm(x.hidden, x.weight, x.eps, x.normed)
        if self._bias is not None:
            parts[0] += self._bias
        return parts

    def gated(self, x: Normed) -> "Tensor":
        """Return ``silu(first) * second`` of two projections of the same size, [T, out_features]."""
        return self._linear.gated_after_norm(x.hidden, x.weight, x.eps, x.normed)


class OutputProjection(Layer):
    """A projection back to the residual, split along its inputs: its result is the sum of all ranks' products."""

    linear: "ResidualLinear"

    def __init__(self, name: str, in_features: int, out_features: int, units: Units) -> None:
        self._weight = Weight(f"{name}.weight", (out_features, in_features), Role.PROJECTION, columns=units)

    def stacks(self) -> Iterator[Stack]:
        yield (self._weight,)

    def load(self, source: WeightSource, factor: float = 1.0) -> None:
        """Take the tensor; the result is multiplied by ``factor``."""
        self.linear = source.summed(self._weight, factor)

    def __call__(self, x: "Tensor", rows: "Tensor | None" = None) -> Product:
        return Product(self.linear, x, rows)
