"""Latent attention over paged memory (MLA, arXiv:2405.04434)."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from splitserve.models.config import ModelConfig
from splitserve.models.layers.head_order import rotary_order
from splitserve.models.layers.layer import Layer, WeightSource
from splitserve.models.layers.projection import InputProjections, OutputProjection
from splitserve.models.layers.residual import Normed, Product
from splitserve.models.layers.step import Step
from splitserve.models.layers.weight import AllRows, Role, Stack, Units, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from splitserve.kernels.api import Linear

NORM_EPS = 1e-6
"""Of the norms within the layer, whatever ``rms_norm_eps`` is: transformers and the families' own code have it so."""


class LatentAttention(Layer):
    """Attention whose keys and values are expanded from a latent, which is what the cache holds.

    Ranks share the heads; the latent is whole on every rank, and so are the projections that make it and the vector
    that queries are expanded from. Rotated elements are put in halves at load (:mod:`.head_order`).
    """

    _query_norm: "Tensor"
    _query_expansion: "Linear"
    _norm: "Tensor"  # [rank]
    _expansion: "Tensor"  # [H, plain_dim + value_dim, rank]: see kernels.api.LatentAttention

    def __init__(self, name: str, config: ModelConfig, layer: int) -> None:
        assert config.latent is not None, "the family's features read no sizes of latent attention"
        self._sizes = sizes = config.latent
        heads = Units(f"{config.num_heads} attention heads", config.num_heads)
        query = config.num_heads * sizes.query_dim
        latent = (f"{name}.kv_a_proj_with_mqa", sizes.width, AllRows())
        order = rotary_order(sizes.rotated_dim, sizes.rotated_dim, interleaved=config.rotates_neighbours)
        self._query_order = _behind(sizes.plain_dim, order)
        self._latent_order = _behind(sizes.rank, order)
        self._query_weights: Stack = ()
        if sizes.query_rank is None:
            self.inputs = InputProjections(config.hidden_size, ((f"{name}.q_proj", query, heads), latent))
        else:
            down = (f"{name}.q_a_proj", sizes.query_rank, AllRows())
            self.inputs = InputProjections(config.hidden_size, (down, latent))
            self._query_weights = (
                Weight(f"{name}.q_a_layernorm.weight", (sizes.query_rank,), Role.NORM),
                Weight(f"{name}.q_b_proj.weight", (query, sizes.query_rank), Role.PROJECTION, rows=heads),
            )
        self._declared_norm = Weight(f"{name}.kv_a_layernorm.weight", (sizes.rank,), Role.NORM)
        expanded = config.num_heads * (sizes.plain_dim + sizes.value_dim)
        self._declared_expansion = Weight(
            f"{name}.kv_b_proj.weight", (expanded, sizes.rank), Role.PROJECTION, rows=heads
        )
        self.output = OutputProjection(f"{name}.o_proj", config.num_heads * sizes.value_dim, config.hidden_size, heads)
        self._layer, self._spec = layer, config.layer(layer)

    @property
    def kv_elements(self) -> int:
        return self._sizes.width

    def stacks(self) -> Iterator[Stack]:
        yield from self.inputs.stacks()
        for weight in (*self._query_weights, self._declared_norm, self._declared_expansion):
            yield (weight,)
        yield from self.output.stacks()

    def load(self, source: WeightSource) -> None:
        sizes = self._sizes
        if self._query_weights:
            norm, expansion = self._query_weights
            self.inputs.load(source, orders=(None, self._latent_order))
            self._query_norm = source.vector((norm,))
            self._query_expansion = source.linear((expansion,), orders=(self._query_order,))
        else:
            self.inputs.load(source, orders=(self._query_order, self._latent_order))
        self._norm = source.vector((self._declared_norm,))
        matrix = source.matrix(self._declared_expansion)
        self._expansion = matrix.view(-1, sizes.plain_dim + sizes.value_dim, sizes.rank)
        self.output.load(source)

    def __call__(self, x: Normed, step: Step) -> Product:
        step.enter(self._layer)
        sizes = self._sizes
        both = self.inputs.product(x)
        query, latent = both[:, : -sizes.width], both[:, -sizes.width :]
        if self._query_weights:
            query = self._query_expansion.after_norm(query.contiguous(), self._query_norm, NORM_EPS)
        query = query.view(query.shape[0], -1, sizes.query_dim)
        step.kernels.prepare_latent(
            query,
            latent,
            self._norm,
            NORM_EPS,
            step.rotation(self._spec.rope),
            kv_layer=step.kv_layers[self._layer],
            slots=step.slots_of(self._layer),
        )
        context, rows = step.attend_latent(query, self._expansion, self._layer)
        return self.output(context, rows)


def _behind(count: int, order: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return ``order`` for the elements behind the first ``count``, which stay where they are."""
    return None if order is None else (*range(count), *(count + element for element in order))
