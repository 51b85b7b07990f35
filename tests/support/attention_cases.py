"""Paged attention: batches over scattered blocks with NaN wherever nothing was written; their answer by plain sums."""

import math
import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from splitserve.kernels.api import AttentionShape, PagedAttention, PagedBatch

Lengths = Sequence[tuple[int, int]]  # (query tokens, context) of each sequence
Case = tuple[Tensor, Tensor, PagedBatch]  # of paged_case
LAYER, NUM_LAYERS = 1, 2


def edge_lengths(block_size: int) -> list[Lengths]:
    """Contexts on, before and after the edges of blocks: decodes, chunks, and both with decodes among the chunks."""
    size = block_size
    return [
        [(1, 1)],
        [(1, context) for context in (max(1, size - 1), size, size + 1, 2 * size, 3 * size - 1)],
        [(size, size), (2, size + 1), (size + 1, 2 * size), (3, 3)],
        [(1, size), (1, 2 * size + 1), (size + 3, 2 * size + 3), (1, size + 1), (2, 2)],
    ]


def attention_shape(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> AttentionShape:
    return AttentionShape(num_heads, num_kv_heads, head_dim, block_size, NUM_LAYERS, dtype, device)


def paged_case(shape: AttentionShape, lengths: Lengths, seed: int = 0) -> Case:
    """Queries [T, H, D], one layer's view of KV memory [num_blocks, G, 2, B, D], and the batch, on ``shape.device``.

    Blocks are shuffled; a table is longer than its context needs; whatever no sequence wrote is NaN.
    """
    size = shape.block_size
    needed = [-(-context // size) for _, context in lengths]
    ids = random.Random(seed).sample(range(sum(needed) + 4), sum(needed) + 1)
    unused = ids.pop()
    generator = torch.Generator().manual_seed(seed)
    memory = torch.full((sum(needed) + 4, shape.num_layers, shape.num_kv_heads, 2, size, shape.head_dim), math.nan)
    tables = []
    for (_, context), count in zip(lengths, needed, strict=True):
        table, ids = ids[:count], ids[count:]
        content = torch.randn((count * size, shape.num_kv_heads, 2, shape.head_dim), generator=generator)
        content[context:] = math.nan
        memory[table, LAYER] = content.view(count, size, *content.shape[1:]).permute(0, 2, 3, 1, 4)
        tables.append([*table, unused])
    num_tokens = sum(query_len for query_len, _ in lengths)
    query = torch.randn((num_tokens, shape.num_heads, shape.head_dim), generator=generator)
    batch = PagedBatch([query_len for query_len, _ in lengths], [context for _, context in lengths], tables)
    return query.to(shape.dtype).to(shape.device), memory.to(shape.dtype).to(shape.device)[:, LAYER], batch


def plain_attention(
    query: Tensor, kv_layer: Tensor, batch: PagedBatch, sinks: Tensor | None = None, window: int | None = None
) -> Tensor:
    """The definition, token by token, in float64: [T, H, D]."""
    wide, memory = query.double(), kv_layer.double()
    group = query.shape[1] // kv_layer.shape[1]
    out = torch.empty_like(wide)
    row = 0
    for query_len, context, table in zip(batch.query_lens, batch.context_lens, batch.block_tables, strict=True):
        keys, values = memory[list(table)].permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :context]  # each [G, context, D]
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        for index in range(query_len):
            seen = context - query_len + index + 1
            scores = torch.einsum("hd,hcd->hc", wide[row], keys[:, :seen]) / math.sqrt(query.shape[2])
            if window is not None:
                scores[:, : max(0, seen - window)] = -math.inf
            extra = scores[:, :0] if sinks is None else sinks.double().view(-1, 1)
            weights = torch.cat((scores, extra), 1).softmax(-1)[:, :seen]
            out[row] = torch.einsum("hc,hcd->hd", weights, values[:, :seen])
            row += 1
    return out


def replayed(
    backend: PagedAttention, shape: AttentionShape, num_decodes: int, num_tokens: int, cases: Sequence[Case]
) -> Iterator[tuple[Tensor, Case]]:
    """Capture a step of so many decodes and prompt tokens, in its first form, as the runner does, and replay it for
    each of ``cases``; yield their results [T, H, D]. Memory that a case doesn't write is NaN. GPUs only."""
    plan = backend.make_mixed_plans(num_decodes, num_tokens, 4, 200)[0]
    memory = torch.empty(max(layer.shape[0] for _, layer, _ in cases), 2, *cases[0][1].shape[1:]).to(cases[0][1])
    query, layer = cases[0][0].new_zeros(num_decodes + num_tokens, *cases[0][0].shape[1:]), memory[:, LAYER]
    full = [0] * -(-num_tokens // shape.block_size)
    trial = PagedBatch([*[1] * num_decodes, num_tokens], [*[1] * num_decodes, num_tokens], [full] * (num_decodes + 1))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        memory.zero_()
        plan.update(trial)
        backend.run(query, layer, plan)
        with torch.cuda.graph(graph, stream=stream):
            out = backend.run(query, layer, plan)
    for case in cases:
        num_rows = case[0].shape[0]
        with torch.cuda.stream(stream):
            query[:num_rows].copy_(case[0])
            layer.fill_(math.nan)
            layer[: case[1].shape[0]].copy_(case[1])
            plan.update(case[2])
            graph.replay()
        stream.synchronize()
        yield out[:num_rows], case


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())
