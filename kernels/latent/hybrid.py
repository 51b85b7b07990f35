"""A backend for each phase of latent attention: Triton's kernel for captured decode steps of one or two rows,
FlashInfer's kernels for everything else (docs/decisions/031-latent-decode.md).

``splitserve bench engine --shape deepseek-v2-lite --attention-backend NAME`` compares the backends on a GPU.
"""

from collections.abc import Sequence

from torch import Tensor

from splitserve.kernels.api import AttentionPlan, AttentionShape, DecodePlan, LatentAttention, MixedPlan, PagedBatch
from splitserve.kernels.latent.flashinfer import FlashInferLatentAttention, has_kernels
from splitserve.kernels.latent.plans import FixedRowPlan
from splitserve.kernels.latent.triton import TritonLatentAttention

MAX_ROWS = 2
"""Of a decode step that takes Triton's kernel."""
MAX_HEADS = 32
"""With more on one device, programs of Triton's kernel read each latent several times."""


def make_attention(shape: AttentionShape) -> LatentAttention:
    """Return the best of the three attentions for ``shape``: Triton's for sizes that FlashInfer has no kernels for,
    FlashInfer's for many heads, both otherwise."""
    if not has_kernels(shape):
        return TritonLatentAttention(shape)
    return FlashInferLatentAttention(shape) if shape.num_heads > MAX_HEADS else HybridLatentAttention(shape)


class HybridLatentAttention:
    """Implements :class:`splitserve.kernels.api.LatentAttention`."""

    def __init__(self, shape: AttentionShape) -> None:
        self._triton = TritonLatentAttention(shape)
        self._flashinfer = FlashInferLatentAttention(shape)

    def plan(self, batch: PagedBatch) -> AttentionPlan:
        """See :class:`splitserve.kernels.api.LatentAttention`."""
        return self._flashinfer.plan(batch)

    def make_decode_plan(self, batch_size: int, max_blocks: int) -> DecodePlan:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        attention = self._triton if batch_size <= MAX_ROWS else self._flashinfer
        return attention.make_decode_plan(batch_size, max_blocks)

    def make_mixed_plans(
        self, num_decodes: int, num_chunk_tokens: int, num_chunks: int, max_blocks: int
    ) -> Sequence[MixedPlan]:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        return self._flashinfer.make_mixed_plans(num_decodes, num_chunk_tokens, num_chunks, max_blocks)

    def run_latent(self, query: Tensor, expansion: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> Tensor:
        """See :class:`splitserve.kernels.api.LatentAttention`."""
        attention = self._triton if isinstance(plan, FixedRowPlan) else self._flashinfer
        return attention.run_latent(query, expansion, kv_layer, plan)
