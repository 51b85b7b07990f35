"""The shared expert: the MLP that every token has beside its chosen experts."""

import torch
from torch import Tensor

from splitserve.kernels.api import Linear
from splitserve.kernels.reference.linear import PlainLinear


class SharedExpert:
    """A gated MLP of all tokens, one rank's share of it: ``down(silu(gate(x)) * up(x))``, times the sigmoid of
    ``own_gate(x)`` where there is one. ``x`` [T, hidden] is normalised."""

    def __init__(self, gate_up: Linear, down: Linear, own_gate: Linear | None = None) -> None:
        self._gate_up, self._down, self._own_gate = gate_up, down, own_gate

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product [T, hidden], this rank's share of it."""
        product = self._down(self._inner(x))
        return product if self._own_gate is None else product * self._own_gate(x).sigmoid()

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Add the product to ``residual`` [T, hidden], in place."""
        if self._own_gate is None:
            self._down.add_to(residual, self._inner(x))
        else:
            residual.add_(self(x))

    def _inner(self, x: Tensor) -> Tensor:
        return self._gate_up.gated_after_norm(x, x[0], 0.0, normed=x)  # the norm isn't read: x is normalised

    def matrices(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return gate and up [2 * S, hidden] and down [hidden, S], where the expert is these alone and keeps them
        unchanged in ``dtype``; else None."""
        gate_up, down = self._gate_up, self._down
        if self._own_gate is None and isinstance(gate_up, PlainLinear) and isinstance(down, PlainLinear):
            return (gate_up.weight, down.weight) if gate_up.weight.dtype == down.weight.dtype == dtype else None
        return None
