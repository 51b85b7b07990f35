"""Cases of operations on paged KV: attention, and copies of blocks."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from splitserve.benchmarks.kernels.case import Call, Case, Target
from splitserve.kernels.api import AttentionShape, Kernels, PagedBatch
from splitserve.models.step_costs import attended_pairs

MAX_SEQUENCES = 256  # rows of a step that are sampled
_MIN_PROMPT = 512
_PROMPT_LAYERS = 4
_LONGER = 32  # length of the one long context, in multiples of the others
_MEMORY_SHARE = 0.25  # share of a device's free memory, for KV


def attentions(target: Target, rows: int) -> Iterator[Case]:
    if rows <= MAX_SEQUENCES:
        yield from _attention(target, "decode", [(1, target.context)] * rows)
    if 1 < rows <= MAX_SEQUENCES:
        lengths = [(1, target.context * (_LONGER if row == 0 else 1)) for row in range(rows)]
        yield from _attention(target, f"decode, one {_LONGER} times as long", lengths)
    if rows >= _MIN_PROMPT or target.device.type == "cpu":
        yield from _attention(target, "prompt", [(rows, rows)])


def _attention(target: Target, name: str, lengths: Sequence[tuple[int, int]]) -> Iterator[Case]:
    """Yield a case of attention. ``lengths``: (query tokens, context) of each sequence. Calls take the layers in
    turn."""
    config, device = target.config, target.device
    batch = shuffled_batch(lengths, target.block_size)
    num_blocks = sum(len(table) for table in batch.block_tables)
    layer_elements = num_blocks * config.num_kv_heads * 2 * target.block_size * config.head_dim
    num_layers = layers_that_fit(config.num_layers, layer_elements * target.dtype.itemsize, device)
    if num_layers == 0:
        return
    shape = AttentionShape(
        config.num_heads, config.num_kv_heads, config.head_dim, target.block_size, num_layers, target.dtype, device
    )
    memory = target.normal(num_blocks, num_layers, config.num_kv_heads, 2, target.block_size, config.head_dim)
    rows = sum(query_len for query_len, _ in lengths)
    query = target.normal(rows, config.num_heads, config.head_dim)

    layers = [memory[:, layer] for layer in layers_to_call(num_layers, batch)]

    def make_calls(kernels: Kernels) -> list[Call]:
        return attention_calls(kernels, shape, batch, query, layers)

    seen, pairs = sum(context for _, context in lengths), sum(attended_pairs(*length) for length in lengths)
    num_bytes = 2 * seen * config.num_kv_heads * config.head_dim * target.dtype.itemsize + 2 * query.nbytes
    flops = 4 * config.num_heads * config.head_dim * pairs
    label = f"{name}, context {lengths[-1][1]}"
    is_decode = max(query_len for query_len, _ in lengths) == 1
    yield Case("make_attention", label, rows, num_bytes, flops, make_calls, can_be_captured=is_decode)


def attention_calls(
    kernels: Kernels, shape: AttentionShape, batch: PagedBatch, query: Tensor, layers: Sequence[Tensor]
) -> list[Call]:
    """Return one call per layer, all with one plan; for a batch of decodes a CUDA graph can keep that plan."""
    attention = kernels.make_attention(shape)
    plan = attention.plan(batch)
    if max(batch.query_lens) == 1 and kernels.backends["make_attention"] != "reference":
        fixed = attention.make_decode_plan(len(batch.query_lens), max(len(table) for table in batch.block_tables))
        fixed.update(batch)
        plan = fixed
    return [partial(attention.run, query, layer, plan) for layer in layers]


def layers_to_call(num_layers: int, batch: PagedBatch) -> range:
    """Choose the layers: all for decodes, so that KV is cold; a few for chunks, which are long and compute-bound."""
    return range(num_layers) if max(batch.query_lens) == 1 else range(min(num_layers, _PROMPT_LAYERS))


def shuffled_batch(lengths: Sequence[tuple[int, int]], block_size: int) -> PagedBatch:
    """Make sequences of (query tokens, context) over blocks in random order, with no unused block."""
    counts = [-(-context // block_size) for _, context in lengths]
    ids = list(range(sum(counts)))
    random.Random(0).shuffle(ids)
    left = iter(ids)
    tables = [list(itertools.islice(left, count)) for count in counts]
    return PagedBatch([query_len for query_len, _ in lengths], [context for _, context in lengths], tables)


def layers_that_fit(num_layers: int, layer_bytes: int, device: torch.device) -> int:
    """Return the number of layers, at most ``num_layers`` of ``layer_bytes`` each, that fit a share of the free memory;
    0 if not even two fit."""
    if device.type != "cuda":
        return min(num_layers, 2)
    torch.cuda.empty_cache()
    fitting = int(_MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]) // layer_bytes
    return min(num_layers, fitting) if fitting >= 2 else 0


@dataclass(frozen=True, slots=True)
class _KVCopy:
    """Copy of heads from ``first_head`` on of blocks ``ids`` of ``memory``, and a buffer of their size."""

    memory: Tensor
    ids: Tensor
    first_head: int
    buffer: Tensor

    def gathers(self, kernels: Kernels) -> list[Call]:
        out = torch.empty_like(self.buffer)

        def call() -> Tensor:
            kernels.gather_kv(self.memory, self.ids, self.first_head, out)
            return out

        return [call]

    def scatters(self, kernels: Kernels) -> list[Call]:
        target = torch.zeros_like(self.memory)

        def call() -> Tensor:
            kernels.scatter_kv(self.buffer, self.ids, self.first_head, target)
            return target

        return [call]


def kv_copies(operation: str, target: Target, rows: int) -> Iterator[Case]:
    """Yield copies of half of the heads, as for a peer of twice the tensor-parallel size, and of all, as for a host
    tier."""
    config, count = target.config, rows // target.block_size
    sizes = (config.num_layers, config.num_kv_heads, 2, target.block_size, config.head_dim)
    memory_bytes = (count + 1) * torch.Size(sizes).numel() * target.dtype.itemsize
    if count == 0 or layers_that_fit(2, 2 * memory_bytes, target.device) == 0:
        return
    memory = target.normal(count + 1, *sizes)
    ids = torch.randperm(count + 1)[:count].to(target.device)
    for num_heads in sorted({max(1, config.num_kv_heads // 2), config.num_kv_heads}):
        buffer = target.normal(count, sizes[0], num_heads, *sizes[2:])
        copy = _KVCopy(memory, ids, config.num_kv_heads - num_heads, buffer)
        make_calls = copy.gathers if operation == "gather_kv" else copy.scatters
        label = f"{num_heads} of {config.num_kv_heads} heads"
        yield Case(operation, label, count * target.block_size, 2 * buffer.nbytes, 0, make_calls)
