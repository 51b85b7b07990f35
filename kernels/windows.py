"""Attention of models in which layers attend to all tokens or to a window: both kinds over the same blocks."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from splitserve.kernels.api import AttentionPlan, AttentionShape, DecodePlan, PagedAttention, PagedBatch


@dataclass(frozen=True, slots=True)
class _Plans:
    full: AttentionPlan
    sliding: AttentionPlan


@dataclass(frozen=True, slots=True)
class _DecodePlans:
    full: DecodePlan
    sliding: DecodePlan

    def update(self, batch: PagedBatch) -> None:
        self.full.update(batch)
        self.sliding.update(batch)


class LayeredAttention:
    """Implements :class:`splitserve.kernels.api.SlidingAttention` with one backend for each kind of layer."""

    def __init__(self, shape: AttentionShape, make_attention: Callable[[AttentionShape], PagedAttention]) -> None:
        """``shape``: with the window of sliding layers."""
        self._full = make_attention(replace(shape, window=None))
        self._sliding = make_attention(shape)

    def plan(self, batch: PagedBatch) -> AttentionPlan:
        return _Plans(self._full.plan(batch), self._sliding.plan(batch))

    def make_decode_plan(self, batch_size: int, max_blocks: int) -> DecodePlan:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        return _DecodePlans(
            self._full.make_decode_plan(batch_size, max_blocks), self._sliding.make_decode_plan(batch_size, max_blocks)
        )

    def make_mixed_plan(self, num_decodes: int, num_chunk_tokens: int, num_chunks: int, max_blocks: int) -> DecodePlan:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        sizes = (num_decodes, num_chunk_tokens, num_chunks, max_blocks)
        return _DecodePlans(self._full.make_mixed_plan(*sizes), self._sliding.make_mixed_plan(*sizes))

    def run(self, query: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> Tensor:
        assert isinstance(plan, _Plans | _DecodePlans)
        return self._full.run(query, kv_layer, plan.full)

    def run_sliding(self, query: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> Tensor:
        """See :class:`splitserve.kernels.api.SlidingAttention`."""
        assert isinstance(plan, _Plans | _DecodePlans)
        return self._sliding.run(query, kv_layer, plan.sliding)


def make_layered(shape: AttentionShape, make_attention: Callable[[AttentionShape], PagedAttention]) -> PagedAttention:
    """Return the attention of a model: of one kind of layer, or of both if ``shape`` has a window."""
    return make_attention(shape) if shape.window is None else LayeredAttention(shape, make_attention)
