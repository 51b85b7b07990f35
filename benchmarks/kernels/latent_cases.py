"""Cases of ``splitserve bench kernels`` with latent attention; models without it lend their heads to small latents."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from splitserve.benchmarks.kernels.case import Call, Case, Target
from splitserve.benchmarks.kernels.kv_cases import MAX_SEQUENCES, layers_that_fit, layers_to_call, shuffled_batch
from splitserve.kernels.api import AttentionPlan, AttentionShape, Kernels
from splitserve.kernels.latent.shape import LatentShape
from splitserve.models.step_costs import attended_pairs

_SMALL = LatentShape(rank=64, plain_dim=32, rotated_dim=16, value_dim=32)
_MIN_PROMPT = 512


def prepared_latents(target: Target, rows: int) -> Iterator[Case]:
    """Yield norm, rotation and write of latents. A call returns the layer that it has written."""
    sizes = target.config.latent or _SMALL
    num_heads, width = target.config.num_heads, sizes.width
    num_blocks = -(-rows // target.block_size)
    norm, rotation = target.normal(sizes.rank), tuple(target.normal(rows, sizes.rotated_dim) for _ in range(2))
    layer = torch.zeros(num_blocks, target.block_size, width, dtype=target.dtype, device=target.device)
    slots = torch.arange(rows, device=target.device)[:, None]
    num_bytes = rows * (2 * width + 2 * num_heads * sizes.rotated_dim) * target.dtype.itemsize
    latents = target.copies(num_bytes, lambda: target.normal(rows, width))
    query = target.normal(rows, num_heads, sizes.query_dim)

    def make_calls(kernels: Kernels) -> list[Call]:
        def call(latent: Tensor) -> Tensor:
            kernels.prepare_latent(query, latent, norm, 1e-6, (rotation[0], rotation[1]), kv_layer=layer, slots=slots)
            return layer

        return [partial(call, latent) for latent in latents]

    yield Case("prepare_latent", f"{num_heads} heads, {width}", rows, num_bytes, 0, make_calls)


def latent_attentions(target: Target, rows: int) -> Iterator[Case]:
    """Yield attention over latents, of decodes and of a prompt."""
    if rows <= MAX_SEQUENCES:
        yield from _attention(target, "decode", [(1, target.context)] * rows)
    if rows >= _MIN_PROMPT or target.device.type == "cpu":
        yield from _attention(target, "prompt", [(rows, rows)])


def _attention(target: Target, name: str, lengths: Sequence[tuple[int, int]]) -> Iterator[Case]:
    sizes, config = target.config.latent or _SMALL, target.config
    batch = shuffled_batch(lengths, target.block_size)
    num_blocks = sum(len(table) for table in batch.block_tables)
    layer_bytes = num_blocks * target.block_size * sizes.width * target.dtype.itemsize
    num_layers = layers_that_fit(config.num_layers, layer_bytes, target.device)
    if num_layers == 0:
        return
    shape = AttentionShape(
        config.num_heads, 1, sizes.rotated_dim, target.block_size, num_layers, target.dtype, target.device, latent=sizes
    )
    memory = target.normal(num_blocks, num_layers, target.block_size, sizes.width)
    layers = [memory[:, layer] for layer in layers_to_call(num_layers, batch)]
    rows = sum(query_len for query_len, _ in lengths)
    query = target.normal(rows, config.num_heads, sizes.query_dim)
    expansion = target.normal(config.num_heads, sizes.plain_dim + sizes.value_dim, sizes.rank, scale=0.1)

    def make_calls(kernels: Kernels) -> list[Call]:
        attention = kernels.make_latent_attention(shape)
        plan: AttentionPlan = attention.plan(batch)
        if max(batch.query_lens) == 1 and kernels.backends["make_latent_attention"] != "reference":
            fixed = attention.make_decode_plan(len(batch.query_lens), max(len(table) for table in batch.block_tables))
            fixed.update(batch)
            plan = fixed
        return [partial(attention.run_latent, query, expansion, layer, plan) for layer in layers]

    seen, pairs = sum(context for _, context in lengths), sum(attended_pairs(*length) for length in lengths)
    num_bytes = seen * sizes.width * target.dtype.itemsize + expansion.nbytes + 2 * query.nbytes
    flops = 2 * config.num_heads * (2 * sizes.rank + sizes.rotated_dim) * pairs
    label = f"{name}, context {lengths[0][1]}"
    yield Case("make_latent_attention", label, rows, num_bytes, flops, make_calls, can_be_captured=name == "decode")
