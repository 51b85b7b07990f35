"""Paged attention in plain PyTorch, fast enough to be the default on CPU.

Decode tokens of similar context are attended together. Their keys are gathered per layer into a small buffer that stays
in the cache (one ``index_select`` over rows of ``[block_size, head_dim]``), head by head, for one batched product.
Their values are never copied: the weighted sum over scattered rows is an embedding bag.

A prefill chunk attends with the fused CPU kernel in segments: earlier context that does not fit the buffer, piece by
piece, then the rest together with the chunk itself. The parts are merged by their log-sum-exp, as in FlashAttention. So
the buffer is bounded for any context length, and no mask of chunk x context is ever built.

Memory that no sequence has written may hold any bits, including NaN: it is never multiplied with a weight, not even
with zero.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from splitserve.kernels.api import AttentionPlan, AttentionShape, DecodePlan, MixedPlan, PagedBatch
from splitserve.kernels.reference.attend import (
    QUERY_BLOCK,
    attend_segment,
    merge,
    soft_capped,
    softmax_with,
    with_sinks,
)

GATHER_BYTES = 4 * 1024 * 1024
"""Bytes gathered at a time: this and the activations fit a level-3 cache. 2 to 8 MiB measured about the same."""
_MIN_FILL = 0.75  # least share of real tokens in a decode group's padded context


@dataclass(frozen=True, slots=True)
class _Segment:
    """Context of one sequence that is gathered at once.

    Without a mask all queries attend to all of it. With a mask the queries are the context's last tokens.
    """

    rows: Tensor  # [2 * G * num_blocks], rows of [B, D]
    last: int  # number of tokens used
    mask: Tensor | None  # [min(L, QUERY_BLOCK), last] for the last queries, 0 or -inf


@dataclass(frozen=True, slots=True)
class _Span:
    """One sequence attended separately: its query tokens first..last of the flat batch, over its segments."""

    first: int
    last: int
    segments: tuple[_Segment, ...]


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Several sequences (S) of one query token each, padded to the longest context (C tokens)."""

    query_rows: Tensor | slice  # [S]; a slice if they are adjacent
    key_rows: tuple[Tensor, ...]  # rows of [B, D] to gather at a time, each [S * G * blocks]; together all blocks
    context: int
    unseen: Tensor | None  # bool [S, 1, 1, C]; None without padding
    value_rows: Tensor  # [S * H * C], rows of [D]
    bags: Tensor  # [S * H + 1], first value row of each bag


_Decode: TypeAlias = tuple[int, int, Sequence[int]]
"""A sequence of one query token: (query row, context, block table), without what is outside of a window."""


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    groups: tuple[_DecodeGroup, ...]
    spans: tuple[_Span, ...]


class ReferencePagedAttention:
    """Implements :class:`splitserve.kernels.api.PagedAttention`."""

    def __init__(self, shape: AttentionShape) -> None:
        if shape.num_heads % shape.num_kv_heads:
            raise ValueError(f"{shape.num_heads} query heads can't share {shape.num_kv_heads} key/value heads")
        self._shape = shape
        self._scale = shape.score_scale
        row_elements = shape.block_size * shape.head_dim
        self._block_bytes = 2 * shape.num_kv_heads * row_elements * shape.dtype.itemsize
        self._gather_blocks = max(1, GATHER_BYTES // self._block_bytes)
        self._buffer = torch.empty((0, row_elements), dtype=shape.dtype, device=shape.device)
        # Row of (K or V, head) relative to the block's first row of this layer: [2, 1, G, 1].
        heads = torch.arange(shape.num_kv_heads).view(1, 1, -1, 1) * 2
        self._head_rows = heads + torch.arange(2).view(2, 1, 1, 1)

    # ---- once per step ----

    def plan(self, batch: PagedBatch) -> ReferencePlan:
        decodes: list[_Decode] = []
        spans: list[_Span] = []
        first = 0
        for query_len, context, table in zip(batch.query_lens, batch.context_lens, batch.block_tables, strict=True):
            assert 0 < query_len <= context <= len(table) * self._shape.block_size
            skipped = self._skipped_blocks(context - query_len)
            table, context = table[skipped:], context - skipped * self._shape.block_size  # noqa: PLW2901
            if query_len == 1:
                decodes.append((first, context, table))
            else:
                spans.append(_Span(first, first + query_len, self._segments(query_len, context, table)))
            first += query_len
        plan = ReferencePlan(tuple(self._groups(decodes)), tuple(spans))
        self._reserve(plan)
        return plan

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
        raise NotImplementedError("CUDA graphs of mixed steps need the triton or the hybrid attention backend")

    def _skipped_blocks(self, first_query: int) -> int:
        """Return the number of leading blocks that are outside of the window of the query token ``first_query``, and
        so of all that follow it."""
        if self._shape.window is None:
            return 0
        return max(0, first_query + 1 - self._shape.window) // self._shape.block_size

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._shape.block_size)

    def _segments(self, query_len: int, context: int, table: Sequence[int]) -> tuple[_Segment, ...]:
        """Split the context into segments of the buffer's size; the last segment holds the remainder and all
        queries."""
        size = self._shape.block_size
        num_blocks = self._num_blocks(context)
        own_blocks = num_blocks - (context - query_len) // size
        num_last = max(own_blocks, min(num_blocks, self._gather_blocks))
        if self._shape.window is not None:
            num_last = num_blocks  # only the last segment has a mask
        segments = []
        for first in range(0, num_blocks - num_last, self._gather_blocks):
            blocks = table[first : min(first + self._gather_blocks, num_blocks - num_last)]
            segments.append(_Segment(self._rows([blocks]).flatten(), len(blocks) * size, None))
        last = context - (num_blocks - num_last) * size
        rows = self._rows([table[num_blocks - num_last : num_blocks]]).flatten()
        segments.append(_Segment(rows, last, self._causal_mask(query_len, last) if query_len > 1 else None))
        return tuple(segments)

    def _causal_mask(self, query_len: int, num_keys: int) -> Tensor:
        num_rows = min(query_len, QUERY_BLOCK)
        mask = torch.full((num_rows, num_keys), -math.inf, dtype=self._shape.dtype, device=self._shape.device)
        mask.triu_(num_keys - num_rows + 1)
        if self._shape.window is not None:
            left = torch.ones_like(mask, dtype=torch.bool).tril_(num_keys - num_rows - self._shape.window)
            mask.masked_fill_(left, -math.inf)
        return mask

    def _groups(self, decodes: list[_Decode]) -> list[_DecodeGroup]:
        """Group decodes, longest first; a group ends where the next context would be mostly padding."""
        decodes.sort(key=lambda decode: -decode[1])
        groups: list[_DecodeGroup] = []
        members: list[_Decode] = []
        for decode in decodes:
            if members:
                longest = self._num_blocks(members[0][1])
                if self._num_blocks(decode[1]) < _MIN_FILL * longest:
                    groups.append(self._group(members))
                    members = []
            members.append(decode)
        if members:
            groups.append(self._group(members))
        return groups

    def _group(self, members: list[_Decode]) -> _DecodeGroup:
        shape = self._shape
        members = sorted(members, key=lambda member: member[0])
        first_row, last_row = members[0][0], members[-1][0]
        query_rows: Tensor | slice = slice(first_row, last_row + 1)
        if last_row - first_row >= len(members):
            query_rows = torch.tensor([row for row, _, _ in members], device=shape.device)
        contexts = torch.tensor([context for _, context, _ in members])
        longest = int(contexts.max())
        num_blocks = self._num_blocks(longest)
        # A short table is padded with its own first block; the tokens read there are masked.
        tables = [(*table[:num_blocks], *[table[0]] * (num_blocks - len(table))) for _, _, table in members]
        tokens = torch.arange(longest)
        unseen = tokens >= contexts.view(-1, 1)  # [S, C]
        if shape.window is not None:
            unseen |= tokens < contexts.view(-1, 1) - shape.window
        step = max(1, 2 * self._gather_blocks // len(members))  # keys alone take half of a block
        return _DecodeGroup(
            query_rows=query_rows,
            key_rows=tuple(
                self._rows([table[first : first + step] for table in tables])[0] for first in range(0, num_blocks, step)
            ),
            context=longest,
            unseen=unseen.view(len(members), 1, 1, longest).to(shape.device) if bool(unseen.any()) else None,
            value_rows=self._value_rows(torch.tensor(tables), tokens.where(~unseen, 0)).to(shape.device),
            bags=torch.arange(len(members) * shape.num_heads + 1, device=shape.device) * longest,
        )

    def _value_rows(self, tables: Tensor, tokens: Tensor) -> Tensor:
        """Return rows of ``[D]`` of the values of ``tokens`` [S, C], per query head: [S * H * C], relative to a layer's
        first row."""
        shape = self._shape
        blocks = tables.gather(1, tokens // shape.block_size)  # [S, C]
        rows = blocks * (shape.rows_per_block * shape.block_size) + tokens % shape.block_size + shape.block_size
        kv_heads = torch.arange(shape.num_heads) // (shape.num_heads // shape.num_kv_heads)
        return (rows.unsqueeze(1) + kv_heads.view(-1, 1) * (2 * shape.block_size)).flatten()

    def _rows(self, tables: Sequence[Sequence[int]]) -> Tensor:
        """Return rows of ``[B, D]`` of keys and values, [2, S * G * num_blocks], relative to a layer's first row."""
        blocks = torch.tensor(tables).view(1, len(tables), 1, -1)
        rows = blocks * self._shape.rows_per_block + self._head_rows
        return rows.flatten(1).to(self._shape.device)

    def _reserve(self, plan: ReferencePlan) -> None:
        sizes = [rows.numel() for group in plan.groups for rows in group.key_rows]
        sizes += [segment.rows.numel() for span in plan.spans for segment in span.segments]
        if sizes and max(sizes) > self._buffer.shape[0]:
            self._buffer = self._buffer.new_empty((max(sizes), self._buffer.shape[1]))

    @property
    def buffer_bytes(self) -> int:
        """Current size of the gather buffer."""
        return self._buffer.nbytes

    # ---- once per layer ----

    def run(self, query: Tensor, kv_layer: Tensor, plan: AttentionPlan, sinks: Tensor | None = None) -> Tensor:
        assert isinstance(plan, ReferencePlan) and self._shape.has_sinks == (sinks is not None)
        out = torch.empty_like(query)
        kv_rows = self._kv_rows(kv_layer)
        for group in plan.groups:
            out[group.query_rows] = self._attend_group(query[group.query_rows], kv_rows, group, sinks)
        for span in plan.spans:
            out[span.first : span.last] = self._attend_span(query[span.first : span.last], kv_rows, span, sinks)
        return out

    def _kv_rows(self, kv_layer: Tensor) -> Tensor:
        """Return ``kv_layer`` as rows of ``[B, D]``, from this layer's first row on, over the blocks of all layers."""
        shape = self._shape
        row = shape.block_size * shape.head_dim
        expected = (shape.rows_per_block * row, 2 * row, row, shape.head_dim, 1)
        assert kv_layer.stride() == expected, (kv_layer.stride(), expected)
        num_rows = (kv_layer.shape[0] - 1) * shape.rows_per_block + 2 * shape.num_kv_heads
        return kv_layer.as_strided((num_rows, row), (row, 1))

    def _gather(self, kv_rows: Tensor, rows: Tensor) -> Tensor:
        gathered = self._buffer[: rows.numel()]
        return torch.index_select(kv_rows, 0, rows, out=gathered)

    def _attend_group(self, query: Tensor, kv_rows: Tensor, group: _DecodeGroup, sinks: Tensor | None) -> Tensor:
        """Attend with ``query`` [S, H, D] -> [S, H, D]. Query heads that share keys are the rows of one product."""
        shape = self._shape
        num_seqs = query.shape[0]
        shared = (query * self._scale).view(num_seqs * shape.num_kv_heads, -1, shape.head_dim)
        parts = []
        for rows in group.key_rows:
            keys = self._gather(kv_rows, rows).view(num_seqs * shape.num_kv_heads, -1, shape.head_dim)
            parts.append(torch.bmm(shared, keys.transpose(1, 2)))
        scores = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        scores = scores[..., : group.context].view(num_seqs, shape.num_kv_heads, -1, group.context)
        if shape.soft_cap is not None:
            scores = soft_capped(scores, shape.soft_cap)
        if group.unseen is not None:
            scores = scores.masked_fill(group.unseen, -math.inf)
        weights = softmax_with(sinks, scores).to(query.dtype).flatten()
        token_rows = kv_rows.view(-1, shape.head_dim)
        out = torch.embedding_bag(
            token_rows,
            group.value_rows,
            group.bags,
            mode=0,  # sum
            per_sample_weights=weights,
            include_last_offset=True,
        )[0]
        return out.view(query.shape)

    def _attend_span(self, query: Tensor, kv_rows: Tensor, span: _Span, sinks: Tensor | None) -> Tensor:
        """Attend with ``query`` [L, H, D] -> [L, H, D]."""
        shape = self._shape
        heads_first = query.transpose(0, 1).unsqueeze(0)  # [1, H, L, D]
        merged: tuple[Tensor, Tensor] | None = None
        for segment in span.segments:
            gathered = self._gather(kv_rows, segment.rows)
            keys, values = gathered.view(2, 1, shape.num_kv_heads, -1, shape.head_dim)[..., : segment.last, :].unbind(0)
            part = attend_segment(heads_first, keys, values, segment.mask, self._scale, soft_cap=shape.soft_cap)
            merged = part if merged is None else merge(merged, part)
        assert merged is not None
        if sinks is not None:
            merged = with_sinks(sinks, *merged), merged[1]
        return merged[0].squeeze(0).transpose(0, 1)
