"""Latent attention (MLA, arXiv:2405.04434) in plain PyTorch, in both of its forms.

Absorbed, the queries of all heads attend to the latents themselves: little memory is read, but a product has ``width``
and ``rank`` elements per head. Expanded, keys and values of each head are made from the latents first. Decode tokens
suit the former, prefill chunks the latter; :func:`expands` counts the multiplications of both.

A context that does not fit the buffer is attended to in segments, which are merged by their log-sum-exp, as in
:mod:`splitserve.kernels.reference.attention`. Memory that no sequence has written may hold NaN, and is never read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from splitserve.kernels.api import AttentionPlan, AttentionShape, DecodePlan, MixedPlan, PagedBatch
from splitserve.kernels.fp8.kv import FP8, LARGEST
from splitserve.kernels.latent.shape import LatentShape
from splitserve.kernels.reference.attend import QUERY_BLOCK, attend_segment, merge
from splitserve.kernels.reference.operations import rms_norm, rope

GATHER_BYTES = 4 * 1024 * 1024
"""Bytes of latents gathered at a time."""


def expands(latent: LatentShape, num_queries: int, context: int) -> bool:
    """Return whether the expanded form takes fewer multiplications per head than the absorbed one.

    Each pair of a query and a key costs a score and a weighted value; each key is expanded once, or each query and each
    result is absorbed once.
    """
    once = latent.rank * (latent.plain_dim + latent.value_dim)
    expanded = num_queries * context * (latent.query_dim + latent.value_dim) + context * once
    absorbed = num_queries * context * (latent.width + latent.rank) + num_queries * once
    return expanded < absorbed


def prepare_latent(
    query: Tensor,
    latent: Tensor,
    norm: Tensor,
    eps: float,
    rotation: tuple[Tensor, Tensor],
    *,
    kv_layer: Tensor,
    slots: Tensor,
) -> None:
    """See :class:`splitserve.kernels.api.PrepareLatent`."""
    rank, width = norm.shape[0], latent.shape[1]
    rotated = query[..., query.shape[-1] - (width - rank) :]
    rotated.copy_(rope(rotated, *rotation))
    key = rope(latent[:, None, rank:], *rotation).squeeze(1)
    content = torch.cat((rms_norm(latent[:, :rank], norm, eps), key), 1)
    if kv_layer.dtype == FP8:
        content = content.clamp(-LARGEST, LARGEST)
    num_rows = (kv_layer.shape[0] - 1) * (kv_layer.stride(0) // width) + kv_layer.shape[1]
    flat = kv_layer.as_strided((num_rows, width), (width, 1))
    flat.index_put_((slots.flatten(),), content.to(kv_layer.dtype))


@dataclass(frozen=True, slots=True)
class _Segment:
    """Context of one sequence that is gathered at once. With a mask the queries are its last tokens."""

    blocks: Tensor  # int64 [n]
    num_tokens: int
    mask: Tensor | None  # [min(L, QUERY_BLOCK), num_tokens] for the last queries, 0 or -inf


@dataclass(frozen=True, slots=True)
class _Span:
    """Query tokens first..last of one sequence in the flat batch, and the segments of its context."""

    first: int
    last: int
    segments: tuple[_Segment, ...]


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """The sequences of a step by the form of their attention."""

    absorbed: tuple[_Span, ...]
    absorbed_rows: Tensor  # int64: query tokens of all of these
    expanded: tuple[_Span, ...]


class ReferenceLatentAttention:
    """Implements :class:`splitserve.kernels.api.LatentAttention`."""

    def __init__(self, shape: AttentionShape) -> None:
        assert shape.latent is not None
        self._shape, self._latent = shape, shape.latent
        self._scale = score_scale(shape)
        block_bytes = shape.block_size * shape.latent.width * shape.dtype.itemsize
        self._gather_blocks = max(1, GATHER_BYTES // block_bytes)

    # ---- once per step ----

    def plan(self, batch: PagedBatch) -> LatentPlan:
        """See :class:`splitserve.kernels.api.LatentAttention`."""
        absorbed: list[_Span] = []
        expanded: list[_Span] = []
        first = 0
        for query_len, context, table in zip(batch.query_lens, batch.context_lens, batch.block_tables, strict=True):
            assert 0 < query_len <= context <= len(table) * self._shape.block_size
            span = _Span(first, first + query_len, self._segments(query_len, context, table))
            (expanded if expands(self._latent, query_len, context) else absorbed).append(span)
            first += query_len
        rows = [torch.arange(span.first, span.last) for span in absorbed]
        absorbed_rows = torch.cat([torch.empty(0, dtype=torch.int64), *rows]).to(self._shape.device)
        return LatentPlan(tuple(absorbed), absorbed_rows, tuple(expanded))

    def make_decode_plan(self, batch_size: int, max_blocks: int) -> DecodePlan:
        """Raise NotImplementedError: there are no CUDA graphs here."""
        raise NotImplementedError(
            f"the reference attention has no fixed plan for {batch_size} sequences of {max_blocks} blocks; use "
            "--enforce-eager with it"
        )

    def make_mixed_plans(
        self, num_decodes: int, num_chunk_tokens: int, num_chunks: int, max_blocks: int
    ) -> Sequence[MixedPlan]:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        raise NotImplementedError("the reference attention has no CUDA graphs of mixed steps")

    def _segments(self, query_len: int, context: int, table: Sequence[int]) -> tuple[_Segment, ...]:
        """Split the context; the last segment holds all queries."""
        size = self._shape.block_size
        num_blocks = -(-context // size)
        own_blocks = num_blocks - (context - query_len) // size
        num_last = max(own_blocks, min(num_blocks, self._gather_blocks))
        segments = []
        for first in range(0, num_blocks - num_last, self._gather_blocks):
            blocks = table[first : min(first + self._gather_blocks, num_blocks - num_last)]
            segments.append(_Segment(self._tensor(blocks), len(blocks) * size, None))
        num_tokens = context - (num_blocks - num_last) * size
        mask = self._causal_mask(query_len, num_tokens) if query_len > 1 else None
        segments.append(_Segment(self._tensor(table[num_blocks - num_last : num_blocks]), num_tokens, mask))
        return tuple(segments)

    def _causal_mask(self, query_len: int, num_keys: int) -> Tensor:
        num_rows = min(query_len, QUERY_BLOCK)
        mask = torch.full((num_rows, num_keys), -math.inf, dtype=self._shape.dtype, device=self._shape.device)
        return mask.triu_(num_keys - num_rows + 1)

    def _tensor(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(blocks, device=self._shape.device)

    # ---- once per layer ----

    def run_latent(self, query: Tensor, expansion: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> Tensor:
        """See :class:`splitserve.kernels.api.LatentAttention`."""
        assert isinstance(plan, LatentPlan)
        out = query.new_empty((*query.shape[:2], self._latent.value_dim))
        if plan.absorbed:
            rows = plan.absorbed_rows
            wide = absorbed_query(query[rows], expansion, self._latent)
            parts, first = [], 0
            for span in plan.absorbed:
                last = first + span.last - span.first
                parts.append(self._attend(wide[first:last], kv_layer, span, None))
                first = last
            out[rows] = absorbed_result(torch.cat(parts)[..., : self._latent.rank], expansion, self._latent)
        for span in plan.expanded:
            result = self._attend(query[span.first : span.last], kv_layer, span, expansion)
            out[span.first : span.last] = result[..., : self._latent.value_dim]
        return out

    def _attend(self, query: Tensor, kv_layer: Tensor, span: _Span, expansion: Tensor | None) -> Tensor:
        """Attend with ``query`` [L, H, D] to latents (``expansion`` None), or to what is expanded from them; return
        [L, H, at least the elements of a value]."""
        heads_first = query.transpose(0, 1).unsqueeze(0)  # [1, H, L, D]
        if is_decode := expansion is None and query.shape[0] == 1:
            heads_first = heads_first.transpose(1, 2)  # all heads are queries of one head of keys
        merged: tuple[Tensor, Tensor] | None = None
        for segment in span.segments:
            latents = self._gather(kv_layer, segment)
            if expansion is None:
                padded, keys = heads_first, latents[None, None]
                values = keys
            else:
                padded, keys, values = self._expanded(heads_first, latents, expansion)
            part = attend_segment(padded, keys, values, segment.mask, self._scale)
            merged = part if merged is None else merge(merged, part)
        assert merged is not None
        out = merged[0].transpose(1, 2) if is_decode else merged[0]
        return out.squeeze(0).transpose(0, 1)

    def _gather(self, kv_layer: Tensor, segment: _Segment) -> Tensor:
        """Return latents [num_tokens, width] in the model's dtype."""
        if kv_layer.dtype == FP8:
            gathered = kv_layer.view(torch.uint8)[segment.blocks].view(FP8).to(self._shape.dtype)
        else:
            gathered = kv_layer[segment.blocks]
        return gathered.flatten(0, 1)[: segment.num_tokens]

    def _expanded(self, query: Tensor, latents: Tensor, expansion: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [1, H, L, E], keys and values [1, H, K, E], padded with zeros to the same size E."""
        sizes, num_heads = self._latent, expansion.shape[0]
        both = F.linear(latents[:, : sizes.rank], expansion.flatten(0, 1)).view(latents.shape[0], num_heads, -1)
        both = both.transpose(0, 1)  # [H, K, plain_dim + value_dim]
        plain, values = both[..., : sizes.plain_dim], both[..., sizes.plain_dim :]
        rotated = latents[:, sizes.rank :].expand(num_heads, -1, -1)
        keys = torch.cat((plain, rotated), -1)
        missing = sizes.query_dim - sizes.value_dim
        wider = (0, max(0, -missing))
        return F.pad(query, wider), F.pad(keys, wider)[None], F.pad(values, (0, max(0, missing)))[None]


def score_scale(shape: AttentionShape) -> float:
    """Return the factor of a query's products with keys."""
    assert shape.latent is not None
    return 1.0 / math.sqrt(shape.latent.query_dim) if shape.scale is None else shape.scale


def absorbed_query(query: Tensor, expansion: Tensor, latent: LatentShape) -> Tensor:
    """Return queries [T, H, width] whose products with cached latents are those of ``query`` [T, H, query_dim] with
    keys."""
    plain, rotated = query[..., : latent.plain_dim], query[..., latent.plain_dim :]
    absorbed = torch.bmm(plain.transpose(0, 1), expansion[:, : latent.plain_dim]).transpose(0, 1)
    return torch.cat((absorbed, rotated), -1)


def absorbed_result(mixed: Tensor, expansion: Tensor, latent: LatentShape) -> Tensor:
    """Return the weighted values [T, H, value_dim] of weighted latents ``mixed`` [T, H, rank]."""
    values = expansion[:, latent.plain_dim :].transpose(1, 2)  # [H, rank, value_dim]
    return torch.bmm(mixed.transpose(0, 1), values).transpose(0, 1)
