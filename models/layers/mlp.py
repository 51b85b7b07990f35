"""Feed-forward layers."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from splitserve.models.config import ModelConfig
from splitserve.models.layers.layer import Layer, WeightSource
from splitserve.models.layers.projection import InputProjections, OutputProjection
from splitserve.models.layers.residual import Normed, Product
from splitserve.models.layers.weight import Units

if TYPE_CHECKING:
    from torch import Tensor

    from splitserve.kernels.api import Kernels


class GatedMlp(Layer):
    """``down(activation(gate(x)) * up(x))`` (GLU variants, arXiv:2002.05202). Ranks share the intermediate dimension.

    ``fused``: gate and up are one tensor of that name.
    """

    def __init__(self, name: str, config: ModelConfig, *, fused: str | None = None) -> None:
        assert config.mlp_gate
        size = config.intermediate_size
        inner = Units(f"an intermediate size of {size}", size)
        self.gate_up = InputProjections(
            config.hidden_size,
            ((f"{name}.gate_proj", size, inner), (f"{name}.up_proj", size, inner)),
            biases=config.mlp_bias,
            fused=None if fused is None else f"{name}.{fused}",
        )
        self.down = OutputProjection(f"{name}.down_proj", size, config.hidden_size, inner, bias=config.mlp_bias)
        self._activation_name = config.activation
        self._is_plain = config.activation == "silu" and not config.mlp_bias

    def load(self, source: WeightSource) -> None:
        """Take the tensors, and the activation."""
        super().load(source)
        self._gate = _gated(self._activation_name, source.kernels)

    def __call__(self, x: Normed) -> Product:
        if self._is_plain:
            return self.down(self.gate_up.gated(x))
        return self.down(self._gate(self.gate_up.product(x)))


def _gated(activation: str, kernels: "Kernels") -> "Callable[[Tensor], Tensor]":
    """Return a function that makes ``activation(gate) * up`` of [T, gate and up]."""
    from splitserve.models.layers.activations import ACTIVATIONS

    if activation == "silu":
        return kernels.silu_mul
    if activation == "gelu_pytorch_tanh":
        return kernels.gelu_mul
    activate = ACTIVATIONS[activation]

    def gated(gate_up: "Tensor") -> "Tensor":
        gate, up = gate_up.chunk(2, dim=-1)
        return activate(gate) * up

    return gated


class Mlp(Layer):
    """``down(activation(up(x)))``. Ranks share the intermediate dimension."""

    def __init__(self, name: str, config: ModelConfig, *, up: str = "up_proj", down: str = "down_proj") -> None:
        assert not config.mlp_gate
        size = config.intermediate_size
        inner = Units(f"an intermediate size of {size}", size)
        self.up = InputProjections(config.hidden_size, ((f"{name}.{up}", size, inner),), biases=config.mlp_bias)
        self.down = OutputProjection(f"{name}.{down}", size, config.hidden_size, inner, bias=config.mlp_bias)
        self._activation_name = config.activation

    def load(self, source: WeightSource) -> None:
        """Take the tensors, and the activation."""
        from splitserve.models.layers.activations import ACTIVATIONS

        super().load(source)
        self._activation = ACTIVATIONS[self._activation_name]

    def __call__(self, x: Normed) -> Product:
        return self.down(self._activation(self.up.product(x)))
