"""Causal attention over paged KV memory."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from splitserve.kernels.raw_qkv import RawQkv
from splitserve.models.config import ModelConfig
from splitserve.models.layers.head_order import rotary_order
from splitserve.models.layers.layer import Layer, WeightSource
from splitserve.models.layers.norm import HeadNorms, JointNorms
from splitserve.models.layers.projection import InputProjections, OutputProjection
from splitserve.models.layers.residual import Normed, Product
from splitserve.models.layers.step import Step
from splitserve.models.layers.weight import Role, Stack, Units, Weight

if TYPE_CHECKING:
    from torch import Tensor


class Sinks(Layer):
    """The scores of attention that no token has, one of each query head."""

    scores: "Tensor"  # float32 [H]

    def __init__(self, name: str, count: int, heads: Units) -> None:
        self._weight = Weight(name, (count,), Role.SINK, rows=heads)

    def stacks(self) -> Iterator[Stack]:
        yield (self._weight,)

    def load(self, source: WeightSource) -> None:
        self.scores = source.vector((self._weight,))


class GroupedAttention(Layer):
    """Attention whose query heads share keys and values in groups (arXiv:2305.13245), with rotary positions.

    ``head_norms``: queries and keys are RMS-normalised per head before the rotation, with ``norm_offset`` added to the
    weight; ``joint_norms``: all heads of a kind together. ``biases``: on queries, keys and values; None: as the config
    says. ``fused``: these three are one tensor of that name. ``sinks``: each query head has a score that no token has,
    and that takes its share of the softmax (arXiv:2309.17453). Ranks share the heads.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        layer: int,
        *,
        head_norms: bool = False,
        joint_norms: bool = False,
        norm_offset: float = 0.0,
        biases: bool | None = None,
        fused: str | None = None,
        sinks: bool = False,
        output: str = "o_proj",
    ) -> None:
        heads = Units(f"{config.num_heads} attention heads", config.num_heads)
        kv_heads = Units(f"{config.num_kv_heads} key/value heads", config.num_kv_heads, repeated=True)
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = InputProjections(
            config.hidden_size,
            ((f"{name}.q_proj", query, heads), (f"{name}.k_proj", key, kv_heads), (f"{name}.v_proj", key, kv_heads)),
            biases=config.qkv_bias if biases is None else biases,
            fused=None if fused is None else f"{name}.{fused}",
        )
        self.output = OutputProjection(f"{name}.{output}", query, config.hidden_size, heads, bias=config.output_bias)
        order = rotary_order(
            config.head_dim, config.rotary_dim or config.head_dim, interleaved=config.rotates_neighbours
        )
        self._orders = (order, order, None)
        units = {"heads": heads, "kv_heads": kv_heads}
        self.head_norms = HeadNorms(name, config, **units, offset=norm_offset, order=order) if head_norms else None
        self.joint_norms = JointNorms(name, config, **units, order=order) if joint_norms else None
        self.sinks = Sinks(f"{name}.sinks", config.num_heads, heads) if sinks else None
        self._key_scales = (f"{name}.k_scale", f"{name}.k_proj.k_scale")
        self._value_scales = (f"{name}.v_scale", f"{name}.v_proj.v_scale")
        self._layer, self._head_dim, self._eps = layer, config.head_dim, config.rms_norm_eps
        self._spec = config.layer(layer)
        self._kv_elements = 2 * key

    @property
    def kv_elements(self) -> int:
        return self._kv_elements

    def load(self, source: WeightSource) -> None:
        """Take the tensors, with the scales of keys and values folded in
        (:mod:`splitserve.models.weights.kv_scales`)."""
        scales = source.kv_scales(self._key_scales, self._value_scales)
        query, key = scales.key, 1.0 / scales.key
        if (norms := self.head_norms or self.joint_norms) is not None:
            norms.load(source, query, key)
            query = key = 1.0
        self.qkv.load(source, (query, key, 1.0 / scales.value), self._orders)
        self.output.load(source, scales.value)
        if self.sinks is not None:
            self.sinks.load(source)

    def __call__(self, x: Normed, step: Step) -> Product:
        step.enter(self._layer)
        if self.joint_norms is None:
            qkv, bias = self.qkv.in_parts(x), self.qkv.bias
        else:
            qkv, bias = self._jointly_normed(self.joint_norms, x), None
        qkv = qkv.view(*qkv.shape[:2], -1, self._head_dim)  # [S, T, H + 2 * G, D]
        norm = None if self.head_norms is None else self.head_norms.weight
        raw = RawQkv(qkv, norm, self._eps, step.rotation(self._spec.rope), step.slots_of(self._layer), bias)
        query = step.kernels.prepare_qkv(raw, step.kv_layers[self._layer])
        context, rows = step.attend(query, self._layer, None if self.sinks is None else self.sinks.scores)
        return self.output(context, rows)

    def _jointly_normed(self, norms: JointNorms, x: Normed) -> "Tensor":
        qkv = self.qkv.product(x)
        query, key = norms.local_sizes
        norms.normalise(qkv[:, :query], qkv[:, query : query + key])
        return qkv.unsqueeze(0)
