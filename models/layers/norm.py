"""RMS norms: of the residual, and of the heads of queries and keys."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from splitserve.models.config import ModelConfig
from splitserve.models.layers.layer import Layer, WeightSource
from splitserve.models.layers.residual import Normed, Residual
from splitserve.models.layers.weight import Role, Stack, Units, Weight

if TYPE_CHECKING:
    from torch import Tensor


class RmsNorm(Layer):
    """``x / rms(x) * weight`` over the hidden dimension, whole on every rank."""

    _weight: "Tensor"

    def __init__(self, name: str, config: ModelConfig, role: Role = Role.NORM) -> None:
        self._declared = Weight(f"{name}.weight", (config.hidden_size,), role)
        self._eps = config.rms_norm_eps

    def stacks(self) -> Iterator[Stack]:
        yield (self._declared,)

    def load(self, source: WeightSource) -> None:
        self._weight = source.vector((self._declared,))

    def __call__(self, x: Residual) -> Normed:
        return x.normed(self._weight, self._eps)


class HeadNorms(Layer):
    """RMS norms of each query head and each key head, over its own elements; one weight for all heads of a kind."""

    weight: "Tensor"  # [H + G, D]

    def __init__(self, name: str, config: ModelConfig, *, heads: Units, kv_heads: Units) -> None:
        shape = (config.head_dim,)
        self._query = Weight(f"{name}.q_norm.weight", shape, Role.HEAD_NORM)
        self._key = Weight(f"{name}.k_norm.weight", shape, Role.HEAD_NORM)
        self._heads, self._kv_heads = heads, kv_heads

    def stacks(self) -> Iterator[Stack]:
        yield (self._query,)
        yield (self._key,)

    def load(self, source: WeightSource, query_factor: float = 1.0, key_factor: float = 1.0) -> None:
        size = source.shard.size
        query = (self._query, self._heads.per_rank(size), query_factor)
        key = (self._key, self._kv_heads.per_rank(size), key_factor)
        self.weight = source.repeated((query, key))
