"""KV memory as a runner uses it: the groups of the model's cache, and the group of each layer."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from splitserve.kernels.api import AttentionShape, PagedBatch
from splitserve.kernels.fp8.kv import FP8
from splitserve.kernels.windows import LayerAttention, LayeredAttention
from splitserve.models.cache_groups import LayerGroup, layer_groups
from splitserve.models.config import ModelConfig
from splitserve.models.decoder import RunnableModel
from splitserve.protocol.step import ScheduledChunk


@dataclass(frozen=True, slots=True)
class RunnerCache:
    """Memory of all groups, checked against the model.

    ``groups``: of each group a contiguous ``[num_blocks, num_layers, num_kv_heads, 2 (K/V), block_size, head_dim]``, or
    of latents ``[num_blocks, num_layers, block_size, width]``;
    ``kv_layers``: of each layer its view of that; ``attention``: that of all layers.
    """

    groups: tuple[Tensor, ...]
    shapes: tuple[AttentionShape, ...]  # of each group
    kv_layers: tuple[Tensor, ...]
    attention: LayeredAttention

    @classmethod
    def of(cls, model: RunnableModel, memory: Tensor | Sequence[Tensor]) -> "RunnerCache":
        """Join a model with memory: with a tensor for each of its groups, or with a single one for all layers."""
        layers = range(model.config.num_layers)
        if isinstance(memory, Tensor) or len(memory) == 1:
            groups: tuple[LayerGroup, ...] = (LayerGroup(tuple(layers)),)
        else:
            groups = layer_groups(model.config)
        tensors = (memory,) if isinstance(memory, Tensor) else tuple(memory)
        if len(tensors) != len(groups):
            raise ValueError(f"KV memory of {len(tensors)} groups for a model whose cache has {len(groups)}")
        for tensor, group in zip(tensors, groups, strict=True):
            _check(tensor, len(group.layers), model)
        group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
        kinds = [LayerAttention(group_of[layer], model.config.layer(layer).kind == "sliding") for layer in layers]
        shapes = tuple(_shape(model, tensor) for tensor in tensors)
        is_latent = model.config.latent is not None
        make_attention = model.kernels.make_latent_attention if is_latent else model.kernels.make_attention
        return cls(
            tensors,
            shapes,
            tuple(tensors[group_of[layer]][:, groups[group_of[layer]].layers.index(layer)] for layer in layers),
            LayeredAttention(shapes, kinds, make_attention),
        )

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    @property
    def block_size(self) -> int:
        return self.shapes[0].block_size

    def batches(self, chunks: Sequence[ScheduledChunk]) -> list[PagedBatch]:
        """Return where the chunks' queries and contexts are, in each group: for attention."""
        return [paged_batch(chunks, group, self.block_size) for group in range(self.num_groups)]

    def copy_blocks(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Make the copies of blocks that the chunks need, in the order of the device's other work."""
        for chunk in chunks:
            for copy in chunk.copies:
                self.groups[copy.group][copy.target].copy_(self.groups[copy.group][copy.source])

    def clear(self, ends: Sequence[int]) -> None:
        """Clear the leading blocks of each group, as many as ``ends`` says."""
        for tensor, end in zip(self.groups, ends, strict=True):
            tensor[:end].zero_()


def paged_batch(chunks: Sequence[ScheduledChunk], group: int = 0, block_size: int = 0) -> PagedBatch:
    """Return where the chunks' queries and contexts are in a group. Its contexts begin with its tables.

    ``block_size``: not used for the first group, whose tables begin with the sequences.
    """
    query_lens = [len(chunk.token_ids) for chunk in chunks]
    if group == 0:
        ends = [chunk.start + query_len for chunk, query_len in zip(chunks, query_lens, strict=True)]
        return PagedBatch(query_lens, ends, [chunk.block_ids for chunk in chunks])
    tables = [chunk.table(group) for chunk in chunks]
    context_lens = [
        chunk.start + query_len - table.first_number * block_size
        for chunk, query_len, table in zip(chunks, query_lens, tables, strict=True)
    ]
    return PagedBatch(query_lens, context_lens, [table.block_ids for table in tables])


def _check(tensor: Tensor, num_layers: int, model: RunnableModel) -> None:
    """Raise ValueError if the memory of a group doesn't fit the model."""
    block_size = tensor.shape[-2] if tensor.dim() > 2 else 0
    expected = (num_layers, *model.config.block_shape(block_size)[1:])
    if tensor.shape[1:] != expected or not tensor.is_contiguous():
        needed = ["num_blocks", *expected[:-2], "block_size", expected[-1]]
        raise ValueError(
            f"kv_cache has shape {list(tensor.shape)}; needed is a contiguous "
            f"[{', '.join(str(size) for size in needed)}]"
        )
    if tensor.dtype not in (model.dtype, FP8) or tensor.device != model.device:
        raise ValueError(f"kv_cache is {tensor.dtype} on {tensor.device}; the model is {model.dtype} on {model.device}")


def _shape(model: RunnableModel, tensor: Tensor) -> AttentionShape:
    """Return the shape of attention over the memory of a group."""
    config: ModelConfig = model.config
    return AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=tensor.shape[-2],
        num_layers=tensor.shape[1],
        dtype=model.dtype,
        device=model.device,
        scale=config.attention_scale,
        soft_cap=config.attention_soft_cap,
        window=config.window,
        has_sinks=config.sinks,
        latent=config.latent,
    )
