"""The MLP that every token has beside its chosen experts."""

import torch
from torch import Tensor

from splitserve.kernels.api import Linear
from splitserve.kernels.reference.linear import PlainLinear


class SharedMlp:
    """A gated MLP of all tokens, one rank's share of it: ``down(silu(gate(x)) * up(x))``, times the sigmoid of
    ``factor(x)`` where there is one. ``x`` [T, hidden] is normalised."""

    def __init__(self, gate_up: Linear, down: Linear, factor: Linear | None = None) -> None:
        self._gate_up, self._down, self._factor = gate_up, down, factor

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product [T, hidden], this rank's share of it."""
        product = self._down(self._inner(x))
        return product if self._factor is None else product * self._factor(x).sigmoid()

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Add the product to ``residual`` [T, hidden], in place."""
        if self._factor is None:
            self._down.add_to(residual, self._inner(x))
        else:
            residual.add_(self(x))

    def _inner(self, x: Tensor) -> Tensor:
        return self._gate_up.gated_after_norm(x, x[0], 0.0, x)

    def matrices(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return gate and up [2 * S, hidden] and down [hidden, S], where these and nothing else make the product, and
        are kept as they are in ``dtype``; else None."""
        own = (self._gate_up, self._down)
        if self._factor is not None or not all(isinstance(each, PlainLinear) for each in own):
            return None
        gate_up, down = (each.weight for each in own if isinstance(each, PlainLinear))
        return (gate_up, down) if gate_up.dtype == down.dtype == dtype else None
