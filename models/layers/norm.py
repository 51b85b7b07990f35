"""Norms: of the residual, of what is added to it, and of queries and keys."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from splitserve.models.config import ModelConfig
from splitserve.models.layers.layer import Layer, WeightSource
from splitserve.models.layers.residual import Normed, Product, Residual, Summand
from splitserve.models.layers.weight import Role, Stack, Units, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from splitserve.kernels.norms import Norm


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


class WideNorm(Layer):
    """A norm of other families, computed in float32 with its weight: ``offset`` is added to that, ``centred`` norms
    subtract the mean first (LayerNorm), and may have a bias."""

    _weight: "Tensor"  # as products take it, who get normalised rows
    _norm: "Norm"

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        role: Role = Role.NORM,
        *,
        offset: float = 0.0,
        centred: bool = False,
        bias: bool = False,
    ) -> None:
        self._declared = Weight(f"{name}.weight", (config.hidden_size,), role)
        self._declared_bias = Weight(f"{name}.bias", (config.hidden_size,), Role.BIAS) if bias else None
        self._eps, self._offset, self._centred = config.rms_norm_eps, offset, centred

    def stacks(self) -> Iterator[Stack]:
        yield (self._declared,)
        if self._declared_bias is not None:
            yield (self._declared_bias,)

    def load(self, source: WeightSource) -> None:
        from splitserve.kernels.norms import NormWeights

        self._weight = source.vector((self._declared,))
        shift = None if self._declared_bias is None else source.vector((self._declared_bias,)).float()
        wide = self._weight.float() + self._offset
        self._norm = source.kernels.pack_norm(NormWeights(wide, self._eps, self._centred, shift))

    def __call__(self, x: Residual) -> Normed:
        hidden, normed = x.normalised(self._norm)
        return Normed(hidden, self._weight, self._eps, normed)

    def of(self, product: Product) -> Summand:
        """Return the normalised product, for the residual."""
        return Summand(product.computed(self._weight.shape[0]), product.rows, self._norm)


class JointNorms(Layer):
    """RMS norms of all query heads together, and of all key heads together; ranks share the heads."""

    _norms: "tuple[Norm, Norm]"
    _sizes: tuple[int, int]

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        *,
        heads: Units,
        kv_heads: Units,
        order: tuple[int, ...] | None = None,
    ) -> None:
        """``order``: of each head's elements in memory (:mod:`.head_order`)."""
        self._order = order
        sizes = (heads.count * config.head_dim, kv_heads.count * config.head_dim)
        self._query = Weight(f"{name}.q_norm.weight", sizes[:1], Role.HEAD_NORM, rows=heads)
        self._key = Weight(f"{name}.k_norm.weight", sizes[1:], Role.HEAD_NORM, rows=kv_heads)
        self._eps, self._sizes, self._kv_heads = config.rms_norm_eps, sizes, kv_heads

    def stacks(self) -> Iterator[Stack]:
        yield (self._query,)
        yield (self._key,)

    def load(self, source: WeightSource, query_factor: float = 1.0, key_factor: float = 1.0) -> None:
        from splitserve.kernels.norms import NormWeights

        orders = (self._order,)
        query = source.vector((self._query,), (query_factor,), orders).float()
        key = source.vector((self._key,), (key_factor,), orders).float()
        pack = source.kernels.pack_norm
        self._norms = (pack(NormWeights(query, self._eps)), pack(NormWeights(key, self._eps)))
        self._group = source.group
        size = source.shard.size
        self._copies = (1, max(1, size // self._kv_heads.count))  # ranks that hold the same key head

    @property
    def local_sizes(self) -> tuple[int, int]:
        """Elements of this rank's queries and keys of a token."""
        query, key = (norm.weights.weight.shape[0] for norm in self._norms)
        return query, key

    def normalise(self, query: "Tensor", key: "Tensor") -> None:
        """Normalise both, [T, heads * D], in place."""
        parts = zip((query, key), self._norms, self._sizes, self._copies, strict=True)
        for part, norm, size, copies in parts:
            if self._group.shard.size == 1:
                norm(part, out=part)
            else:
                wide = part.float()
                total = self._group.gather_columns(wide.square().sum(-1, keepdim=True) / copies).sum(-1, keepdim=True)
                part.copy_(wide * (total / size + self._eps).rsqrt() * norm.weights.weight)


class HeadNorms(Layer):
    """RMS norms of each query head and each key head, over its own elements; one weight for all heads of a kind."""

    weight: "Tensor"  # [H + G, D]

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        *,
        heads: Units,
        kv_heads: Units,
        offset: float = 0.0,
        order: tuple[int, ...] | None = None,
    ) -> None:
        """``order``: of the elements in memory (:mod:`.head_order`)."""
        shape = (config.head_dim,)
        self._offset, self._order = offset, order
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
        self.weight = source.repeated((query, key), self._offset)
        if self._order is not None:
            self.weight = self.weight[:, list(self._order)].contiguous()
