"""Latent attention of long chunks, expanded: keys and values of each head are made from the latents first, then
FlashInfer's FlashAttention 3 runs on them.

A pair of a query and a key then has 320 multiplications per head (DeepSeek's sizes), absorbed 1,088. For each token of
the context keys and values are computed, written and read once, so there have to be many queries.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from splitserve.kernels.api import AttentionShape, PagedBatch
from splitserve.kernels.flashinfer.ragged import pinned_buffers
from splitserve.kernels.latent.reference import score_scale
from splitserve.kernels.triton.sampling import to_device

MIN_PAIRS = 1_500_000
"""Pairs of a query and a key in a step: with fewer, the launches take longer than is saved."""
BUSY_TOKENS = 1024
"""Prompt tokens that, without decodes beside them, take the device as long as the launches take the host."""
LAUNCHES_IN_PAIRS = 64_000_000
"""Pairs, times a rank's heads, for which the absorbed form takes some 3 ms longer in DeepSeek-V2-Lite's 27 layers at
500 TFLOP/s, expansion included. An estimate: so long the device waits for launches, where it has little else to do."""
MIN_QUERIES_PER_TOKEN = 400
"""Of the context, in the mean: with fewer, expanding it takes longer than is saved."""
MAX_BYTES = 256 * 1024 * 1024
"""Of a layer's keys and values at once."""
_SIZES = (192, 128)  # elements of a query and of a value that the kernel is made for
_WORKSPACE_BYTES = 16 * 1024 * 1024


def pays_without_graph(shape: AttentionShape, batch: PagedBatch, first: int) -> bool:
    """Return whether :func:`pays` although the step, absorbed, could be replayed as a CUDA graph: with few query tokens
    as much time has to be saved as the device would wait for launches."""
    num_tokens = sum(batch.query_lens[first:])
    min_pairs = MIN_PAIRS if num_tokens >= BUSY_TOKENS else LAUNCHES_IN_PAIRS // shape.num_heads
    return pays(shape, batch, first, min_pairs)


def pays(shape: AttentionShape, batch: PagedBatch, first: int, min_pairs: int = MIN_PAIRS) -> bool:
    """Return whether expanded attention is the better form for the sequences of ``batch`` from ``first`` on."""
    latent = shape.latent
    assert latent is not None
    queries, contexts = batch.query_lens[first:], batch.context_lens[first:]
    num_pairs = sum(count * (end - (count - 1) / 2) for count, end in zip(queries, contexts, strict=True))
    num_tokens = sum(contexts)
    num_elements = num_tokens * shape.num_heads * (latent.query_dim + latent.plain_dim + latent.value_dim)
    return (
        num_pairs >= max(min_pairs, MIN_QUERIES_PER_TOKEN * num_tokens)
        and num_elements * shape.dtype.itemsize <= MAX_BYTES
    )


@dataclass(frozen=True, slots=True)
class ExpandedPlan:
    """Plan of a step's chunks. ``blocks``, ``offsets`` int64 [N]: where the tokens of their contexts are."""

    blocks: Tensor
    offsets: Tensor


class ExpandedPrefill:
    """Attention of the chunks of a step. Compute capability 9.0 only."""

    def __init__(self, flashinfer: Any, shape: AttentionShape) -> None:
        self._shape = shape
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        self._wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")
        self._pinned = pinned_buffers(self._wrapper)
        self._plan_lengths([1], [1])  # compiles or loads the kernel now, not when the first long prompt waits for it

    @staticmethod
    def supports(shape: AttentionShape) -> bool:
        """Return whether there is a kernel for ``shape`` on its device."""
        assert shape.latent is not None
        is_hopper = torch.cuda.get_device_capability(shape.device) == (9, 0)
        return is_hopper and (shape.latent.query_dim, shape.latent.value_dim) == _SIZES

    def plan(self, batch: PagedBatch, first: int) -> ExpandedPlan:
        """Plan the attention of the sequences from ``first`` on."""
        contexts, block_size = batch.context_lens[first:], self._shape.block_size
        self._plan_lengths(batch.query_lens[first:], contexts)
        tokens = [np.arange(context) for context in contexts]
        blocks = [
            np.array(table)[each // block_size] for table, each in zip(batch.block_tables[first:], tokens, strict=True)
        ]
        places = torch.from_numpy(np.stack((np.concatenate(blocks), np.concatenate(tokens) % block_size)))
        return ExpandedPlan(*to_device(places, self._shape.device))

    def _plan_lengths(self, queries: Sequence[int], contexts: Sequence[int]) -> None:
        shape = self._shape
        ends = [torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32) for lens in (queries, contexts)]
        self._wrapper._pin_memory_int_workspace_buffer = next(self._pinned)
        self._wrapper.plan(
            *(end.pin_memory() for end in ends),
            shape.num_heads,
            shape.num_heads,
            _SIZES[0],
            head_dim_vo=_SIZES[1],
            causal=True,
            sm_scale=score_scale(shape),
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )

    def run(self, query: Tensor, expansion: Tensor, kv_layer: Tensor, plan: ExpandedPlan, out: Tensor) -> None:
        """Attend with the query tokens of the planned chunks. ``query`` [T, H, query_dim]; ``expansion`` and
        ``kv_layer`` as of :class:`splitserve.kernels.api.LatentAttention`; ``out`` [T, H, value_dim]."""
        latent = self._shape.latent
        assert latent is not None
        cached = kv_layer[plan.blocks, plan.offsets]  # [N, width]
        num_tokens, num_heads = cached.shape[0], expansion.shape[0]
        both = F.linear(cached[:, : latent.rank], expansion.flatten(0, 1)).view(num_tokens, num_heads, -1)
        keys = both.new_empty((num_tokens, num_heads, latent.query_dim))
        keys[..., : latent.plain_dim] = both[..., : latent.plain_dim]
        keys[..., latent.plain_dim :] = cached[:, None, latent.rank :]
        self._wrapper.run(query, keys, both[..., latent.plain_dim :], out=out)
