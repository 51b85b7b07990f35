"""Attention of a model's layers, which may attend to all tokens or to a window, over the groups of its cache."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from splitserve.kernels.api import (
    AnyAttention,
    AttentionPlan,
    AttentionShape,
    DecodePlan,
    LatentAttention,
    MixedPlan,
    PagedAttention,
    PagedBatch,
)


class LayerAttention(NamedTuple):
    """A layer's kind of attention. ``group``: the group of the cache that has its keys and values."""

    group: int = 0
    is_sliding: bool = False


@dataclass(frozen=True, slots=True)
class LayerPlans:
    """A plan for each kind of attention that a model's layers have."""

    plans: Mapping[LayerAttention, AttentionPlan]


@dataclass(frozen=True, slots=True)
class FixedLayerPlans:
    """Plans of fixed size (:class:`splitserve.kernels.api.DecodePlan`)."""

    plans: Mapping[LayerAttention, DecodePlan]

    def update(self, batches: Sequence[PagedBatch]) -> None:
        """Fill the plans for a batch, given for each group with the tables of that group."""
        for kind, plan in self.plans.items():
            plan.update(batches[kind.group])


@dataclass(frozen=True, slots=True)
class MixedLayerPlans(FixedLayerPlans):
    """Plans of fixed size for longer chunks, too (:class:`splitserve.kernels.api.MixedPlan`)."""

    plans: Mapping[LayerAttention, MixedPlan]

    def suits(self, batches: Sequence[PagedBatch]) -> bool:
        """Return whether all plans suit a batch, given for each group with the tables of that group."""
        return all(plan.suits(batches[kind.group]) for kind, plan in self.plans.items())


def slots_of_groups(shapes: Sequence[AttentionShape], block_ids: Tensor, positions: Tensor) -> Tensor:
    """Return where tokens go in N groups of the cache: int64 [N, T, G]. ``block_ids``: int64 [N, T]; -1 gives a
    negative slot. ``positions``: int64 [T]."""
    offsets = positions % shapes[0].block_size
    return torch.stack([shape.slots(blocks, offsets) for shape, blocks in zip(shapes, block_ids, strict=True)])


class LayeredAttention:
    """The attention of all layers: a backend for each kind that they have.

    A group's table may begin behind the sequence's first tokens. Its batch then counts positions from there, which
    changes no score: attention depends on distances alone.
    """

    def __init__(
        self,
        shapes: Sequence[AttentionShape],
        layers: Sequence[LayerAttention],
        make_attention: Callable[[AttentionShape], AnyAttention],
    ) -> None:
        """``shapes``: of each group of the cache, with the window of its sliding layers; ``layers``: of each layer."""
        self._layers = list(layers)
        self._backends = {
            kind: make_attention(shapes[kind.group] if kind.is_sliding else replace(shapes[kind.group], window=None))
            for kind in dict.fromkeys(layers)
        }

    def group(self, layer: int) -> int:
        """Return the group of the cache that has a layer's keys and values."""
        return self._layers[layer].group

    def plan(self, batches: Sequence[PagedBatch]) -> LayerPlans:
        """Plan a step. ``batches``: the batch with the tables of each group."""
        return LayerPlans({kind: backend.plan(batches[kind.group]) for kind, backend in self._backends.items()})

    def make_decode_plan(self, batch_size: int, max_blocks: int) -> FixedLayerPlans:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        return FixedLayerPlans(
            {kind: backend.make_decode_plan(batch_size, max_blocks) for kind, backend in self._backends.items()}
        )

    def make_mixed_plans(
        self, num_decodes: int, num_chunk_tokens: int, num_chunks: int, max_blocks: int
    ) -> list[MixedLayerPlans]:
        """See :class:`splitserve.kernels.api.PagedAttention`. A kind with fewer forms repeats its last one."""
        sizes = (num_decodes, num_chunk_tokens, num_chunks, max_blocks)
        plans = {kind: backend.make_mixed_plans(*sizes) for kind, backend in self._backends.items()}
        num_forms = max(len(forms) for forms in plans.values())
        return [
            MixedLayerPlans({kind: forms[min(form, len(forms) - 1)] for kind, forms in plans.items()})
            for form in range(num_forms)
        ]

    def run(
        self,
        query: Tensor,
        kv_layer: Tensor,
        plan: LayerPlans | FixedLayerPlans,
        layer: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend over the keys and values of ``layer``, as :meth:`splitserve.kernels.api.PagedAttention.run` does."""
        kind = self._layers[layer]
        return cast("PagedAttention", self._backends[kind]).run(query, kv_layer, plan.plans[kind], sinks)

    def run_latent(
        self, query: Tensor, expansion: Tensor, kv_layer: Tensor, plan: LayerPlans | FixedLayerPlans, layer: int
    ) -> Tensor:
        """Attend over the latents of ``layer``, as :class:`splitserve.kernels.api.LatentAttention` does."""
        kind = self._layers[layer]
        backend = cast("LatentAttention", self._backends[kind])
        return backend.run_latent(query, expansion, kv_layer, plan.plans[kind])
