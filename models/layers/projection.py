"""Projections from the normalised residual, and back to it."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from splitserve.models.layers.layer import Layer, Order, WeightSource
from splitserve.models.layers.residual import Normed, Product
from splitserve.models.layers.weight import AllRows, Role, Stack, Units, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from splitserve.kernels.api import Linear, ResidualLinear


class InputProjections(Layer):
    """Several projections of the same input, computed as one product, and split along their outputs."""

    linear: "Linear"
    bias: "Tensor | None"

    def __init__(
        self,
        in_features: int,
        outputs: Sequence[tuple[str, int, Units | AllRows]],
        *,
        biases: bool = False,
        fused: str | None = None,
    ) -> None:
        """``outputs``: (name, out_features, rows that ranks share) of each; with ``biases`` each has one. ``fused``:
        the name of the one tensor that holds all of them, one after the other."""
        weights, biases_of, first = [], [], 0
        total = sum(size for _, size, _ in outputs)
        for name, size, units in outputs:
            stored, rows, section = name, size, None
            if fused is not None:
                stored, rows, section = fused, total, range(first, first + size)
            matrix = Weight(f"{stored}.weight", (rows, in_features), Role.PROJECTION, rows=units, section=section)
            weights.append(matrix)
            biases_of.append(Weight(f"{stored}.bias", (rows,), Role.BIAS, rows=units, section=section))
            first += size
        self._weights = tuple(weights)
        self._biases = tuple(biases_of) if biases else ()

    def stacks(self) -> Iterator[Stack]:
        yield self._weights
        if self._biases:
            yield self._biases

    def load(self, source: WeightSource, factors: Sequence[float] = (), orders: Sequence[Order] = ()) -> None:
        """Take the tensors; each projection's outputs are multiplied by its factor (none given: 1), in its order."""
        self.linear = source.linear(self._weights, factors, orders)
        self.bias = source.vector(self._biases, factors, orders) if self._biases else None

    def in_parts(self, x: Normed) -> "Tensor":
        """Return [S, T, out_features], for the operation that follows to add up, with :attr:`bias`
        (kernels.api.Linear.parts)."""
        return self.linear.parts_after_norm(x.hidden, x.weight, x.eps, x.normed)

    def product(self, x: Normed) -> "Tensor":
        """Return [T, out_features] in the dtype of the residual."""
        product = self.linear.after_norm(x.hidden, x.weight, x.eps, x.normed)
        return product if self.bias is None else product.add_(self.bias)

    def gated(self, x: Normed) -> "Tensor":
        """Return ``silu(first) * second`` of two projections of the same size, [T, out_features]."""
        return self.linear.gated_after_norm(x.hidden, x.weight, x.eps, x.normed)


class OutputProjection(Layer):
    """A projection back to the residual, split along its inputs: its result is the sum of all ranks' products."""

    linear: "ResidualLinear"
    _bias: "Tensor | None"

    def __init__(self, name: str, in_features: int, out_features: int, units: Units, *, bias: bool = False) -> None:
        self._weight = Weight(f"{name}.weight", (out_features, in_features), Role.PROJECTION, columns=units)
        self._declared_bias = Weight(f"{name}.bias", (out_features,), Role.BIAS) if bias else None

    def stacks(self) -> Iterator[Stack]:
        yield (self._weight,)
        if self._declared_bias is not None:
            yield (self._declared_bias,)

    def load(self, source: WeightSource, factor: float = 1.0) -> None:
        """Take the tensors; the product, without the bias, is multiplied by ``factor``."""
        self.linear = source.summed(self._weight, factor)
        self._bias = None if self._declared_bias is None else source.vector((self._declared_bias,))

    def __call__(self, x: "Tensor", rows: "Tensor | None" = None) -> Product:
        return Product(self.linear, x, rows, self._bias)
