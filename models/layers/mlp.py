"""Feed-forward layers."""

from splitserve.models.config import ModelConfig
from splitserve.models.layers.layer import Layer
from splitserve.models.layers.projection import InputProjections, OutputProjection
from splitserve.models.layers.residual import Normed, Product
from splitserve.models.layers.weight import Units


class GatedMlp(Layer):
    """``down(silu(gate(x)) * up(x))`` (SwiGLU, arXiv:2002.05202). Ranks share the intermediate dimension."""

    def __init__(self, name: str, config: ModelConfig) -> None:
        size = config.intermediate_size
        inner = Units(f"an intermediate size of {size}", size)
        self.gate_up = InputProjections(
            config.hidden_size, ((f"{name}.gate_proj", size, inner), (f"{name}.up_proj", size, inner))
        )
        self.down = OutputProjection(f"{name}.down_proj", size, config.hidden_size, inner)

    def __call__(self, x: Normed) -> Product:
        return self.down(self.gate_up.gated(x))
