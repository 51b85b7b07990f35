"""Causal attention over paged KV memory."""

from splitserve.models.config import ModelConfig
from splitserve.models.layers.layer import Layer, WeightSource
from splitserve.models.layers.norm import HeadNorms
from splitserve.models.layers.projection import InputProjections, OutputProjection
from splitserve.models.layers.residual import Normed, Product
from splitserve.models.layers.step import Step
from splitserve.models.layers.weight import Units


class GroupedAttention(Layer):
    """Attention whose query heads share keys and values in groups (arXiv:2305.13245), with rotary positions.

    ``head_norms``: queries and keys are RMS-normalised per head before the rotation. ``biases``: on queries, keys and
    values. Ranks share the heads.
    """

    def __init__(
        self, name: str, config: ModelConfig, layer: int, *, head_norms: bool = False, biases: bool = False
    ) -> None:
        heads = Units(f"{config.num_heads} attention heads", config.num_heads)
        kv_heads = Units(f"{config.num_kv_heads} key/value heads", config.num_kv_heads, repeated=True)
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = InputProjections(
            config.hidden_size,
            ((f"{name}.q_proj", query, heads), (f"{name}.k_proj", key, kv_heads), (f"{name}.v_proj", key, kv_heads)),
            biases=biases,
        )
        self.output = OutputProjection(f"{name}.o_proj", query, config.hidden_size, heads)
        self.head_norms = HeadNorms(name, config, heads=heads, kv_heads=kv_heads) if head_norms else None
        self._key_scales = (f"{name}.k_scale", f"{name}.k_proj.k_scale")
        self._value_scales = (f"{name}.v_scale", f"{name}.v_proj.v_scale")
        self._layer, self._head_dim, self._eps = layer, config.head_dim, config.rms_norm_eps
        self._kv_elements = 2 * key

    @property
    def kv_elements(self) -> int:
        return self._kv_elements

    def load(self, source: WeightSource) -> None:
        """Take the tensors, with the scales of keys and values folded in (:mod:`splitserve.models.kv_scales`)."""
        scales = source.kv_scales(self._key_scales, self._value_scales)
        query, key = scales.key, 1.0 / scales.key
        if self.head_norms is not None:
            self.head_norms.load(source, query, key)
            query = key = 1.0
        self.qkv.load(source, (query, key, 1.0 / scales.value))
        self.output.load(source, scales.value)

    def __call__(self, x: Normed, step: Step) -> Product:
        step.enter(self._layer)
        qkv = self.qkv(x)
        qkv = qkv.view(*qkv.shape[:2], -1, self._head_dim)  # [S, T, H + 2 * G, D]
        query = step.kernels.prepare_qkv(
            qkv,
            None if self.head_norms is None else self.head_norms.weight,
            self._eps,
            step.rotation,
            kv_layer=step.kv_layers[self._layer],
            slots=step.slots,
        )
        context, rows = step.attend(query, self._layer)
        return self.output(context, rows)
