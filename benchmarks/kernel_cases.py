"""What ``splitserve bench kernels`` runs: each operation at the shapes that a model's step has, on random inputs.

A case has several copies of its inputs, together larger than the level-2 cache, which its calls take in turn; what a
step has only just computed is warm there, so small operations look slower here than they are in a step.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from splitserve.kernels.api import AttentionShape, Kernels, Linear, PagedBatch, SamplingBatch
from splitserve.kernels.tunables import num_copies
from splitserve.models.config import ModelConfig
from splitserve.models.declared import stored_weights
from splitserve.models.layers.weight import Role

Call = Callable[[], Tensor]
MakeCalls = Callable[[Kernels], list[Call]]

_MAX_SEQUENCES = 256  # rows of a step that are sampled from
_MIN_PROMPT = 512
_PROMPT_LAYERS = 4
_POSITIONS = 4096
_MEMORY_SHARE = 0.25  # of a device's free memory, for KV


@dataclass(frozen=True, slots=True)
class Case:
    """One operation at one shape. ``make_calls`` with a backend's kernels: calls on fresh, equal inputs; their answers
    are what the operation returns or writes. ``num_bytes``, ``flops``: what a call must move and compute at least."""

    operation: str
    name: str
    rows: int
    num_bytes: int
    flops: int
    make_calls: MakeCalls
    can_be_captured: bool = True


@dataclass(frozen=True, slots=True)
class Target:
    """``context``: tokens of each sequence that is decoded."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    block_size: int
    context: int

    def normal(self, *sizes: int, scale: float = 1.0) -> Tensor:
        """Random numbers of standard deviation ``scale``, on the device."""
        return torch.empty(sizes, dtype=self.dtype, device=self.device).normal_(0.0, scale)

    def copies(self, num_bytes: int, make: Callable[[], Tensor]) -> list[Tensor]:
        return [make() for _ in range(num_copies(num_bytes, self.device))]


def cases(target: Target, rows: int, operations: Sequence[str]) -> Iterator[Case]:
    """All of ``operations`` in a step of ``rows`` tokens, made one by one: inputs of large ones are gigabytes."""
    for operation in operations:
        yield from _MAKERS[operation](target, rows)


def _begin_step(target: Target, rows: int) -> Iterator[Case]:
    config, device = target.config, target.device
    shape = AttentionShape(1, config.num_kv_heads, config.head_dim, target.block_size, 1, target.dtype, device)
    embedding = target.normal(config.vocab_size, config.hidden_size)
    rotations = target.normal(_POSITIONS, 2, config.head_dim)
    drawn = torch.zeros(rows, dtype=torch.int64, device=device)
    num_bytes = 2 * rows * (config.hidden_size + 2 * config.head_dim) * target.dtype.itemsize

    def make_inputs() -> Tensor:
        blocks = torch.arange(rows, device=device)
        token_ids, positions = (
            torch.randint(0, end, (rows,), device=device) for end in (config.vocab_size, _POSITIONS)
        )
        return torch.stack((token_ids, positions, blocks, torch.full_like(blocks, -1)))

    inputs = target.copies(num_bytes, make_inputs)

    def make_calls(kernels: Kernels) -> list[Call]:
        def call(each: Tensor) -> Tensor:
            return kernels.begin_step(each, drawn, embedding, rotations, shape).hidden

        return [partial(call, each) for each in inputs]

    yield Case("begin_step", f"{config.hidden_size}", rows, num_bytes, 0, make_calls)


def _rms_norm(target: Target, rows: int) -> Iterator[Case]:
    size = target.config.hidden_size
    weight = target.normal(size)
    num_bytes = 2 * rows * size * target.dtype.itemsize
    inputs = target.copies(num_bytes, lambda: target.normal(rows, size))

    def make_calls(kernels: Kernels) -> list[Call]:
        return [partial(kernels.rms_norm, x, weight, 1e-5) for x in inputs]

    yield Case("rms_norm", f"{size}", rows, num_bytes, 0, make_calls)


def _silu_mul(target: Target, rows: int) -> Iterator[Case]:
    size = target.config.intermediate_size
    num_bytes = 3 * rows * size * target.dtype.itemsize
    inputs = target.copies(num_bytes, lambda: target.normal(rows, 2 * size))

    def make_calls(kernels: Kernels) -> list[Call]:
        return [partial(kernels.silu_mul, x.clone()) for x in inputs]

    yield Case("silu_mul", f"{size}", rows, num_bytes, 0, make_calls)


def _prepare_qkv(target: Target, rows: int) -> Iterator[Case]:
    config, block_size = target.config, target.block_size
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    has_norms = any(weight.role is Role.HEAD_NORM for weight in stored_weights(config).values())
    norm = target.normal(heads + kv_heads, head_dim) if has_norms else None
    num_blocks = -(-rows // block_size)
    kv_layer = target.normal(num_blocks, 1, kv_heads, 2, block_size, head_dim)[:, 0]
    shape = AttentionShape(heads, kv_heads, head_dim, block_size, 1, target.dtype, target.device)
    positions = torch.arange(rows, device=target.device)
    slots = shape.slots(positions // block_size, positions % block_size)
    angles = positions.float().unsqueeze(1) * torch.rand(head_dim // 2, device=target.device)
    cos, sin = angles.cos().to(target.dtype), angles.sin().to(target.dtype)
    rotation = torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)
    num_bytes = 2 * rows * (heads + 2 * kv_heads) * head_dim * target.dtype.itemsize
    inputs = target.copies(num_bytes, lambda: target.normal(1, rows, heads + 2 * kv_heads, head_dim))

    def make_calls(kernels: Kernels) -> list[Call]:
        prepare = partial(kernels.prepare_qkv, kv_layer=kv_layer, slots=slots)
        return [partial(prepare, qkv, norm, 1e-6, rotation) for qkv in inputs]

    label = f"{heads}+2*{kv_heads} heads of {head_dim}" + (", norm" if norm is not None else "")
    yield Case("prepare_qkv", label, rows, num_bytes, 0, make_calls)


def _linears(target: Target, rows: int) -> Iterator[Case]:
    """The products of a layer with what stands around them, and the head."""
    config = target.config
    hidden, attended = config.hidden_size, config.num_heads * config.head_dim
    projected = attended + 2 * config.num_kv_heads * config.head_dim
    yield _linear(target, rows, "norm", projected, hidden)
    yield _linear(target, rows, "add", hidden, attended)
    yield _linear(target, rows, "gated", 2 * config.intermediate_size, hidden)
    yield _linear(target, rows, "add", hidden, config.intermediate_size)
    if rows <= _MAX_SEQUENCES:
        yield _linear(target, rows, "norm", config.vocab_size, hidden)


def _linear(target: Target, rows: int, variant: str, outputs: int, inputs: int) -> Case:
    itemsize, read = target.dtype.itemsize, outputs * inputs
    written = rows * outputs // 2 if variant == "gated" else rows * outputs * (2 if variant == "add" else 1)
    weights = target.copies(read * itemsize, lambda: target.normal(outputs, inputs, scale=inputs**-0.5))
    x, norm = target.normal(rows, inputs), target.normal(inputs)
    residual = target.normal(rows, outputs) if variant == "add" else x

    def make_calls(kernels: Kernels) -> list[Call]:
        kept = residual.clone()

        def call(linear: Linear) -> Tensor:
            if variant == "add":
                linear.add_to(kept, x)
                return kept
            if variant == "norm":
                return linear.after_norm(x, norm, 1e-5)
            return linear.gated_after_norm(x, norm, 1e-5)

        return [partial(call, kernels.pack_linear(weight)) for weight in weights]

    num_bytes = (read + rows * inputs + written) * itemsize
    return Case("pack_linear", f"{variant} {inputs}->{outputs}", rows, num_bytes, 2 * rows * read, make_calls)


def _samples(target: Target, rows: int) -> Iterator[Case]:
    if rows <= _MAX_SEQUENCES:
        yield _sample(target, rows, "greedy", 0.0, 1.0)
        yield _sample(target, rows, "top-p 0.9", 0.8, 0.9)


def _sample(target: Target, rows: int, name: str, temperature: float, top_p: float) -> Case:
    vocab_size = target.config.vocab_size
    num_bytes = rows * vocab_size * target.dtype.itemsize
    inputs = target.copies(num_bytes, lambda: target.normal(rows, vocab_size, scale=4.0))
    batch = SamplingBatch([temperature] * rows, [0] * rows, [top_p] * rows, range(rows), [0] * rows, [1] * rows)

    def make_calls(kernels: Kernels) -> list[Call]:
        return [partial(kernels.sample, logits, batch) for logits in inputs]

    return Case("sample", f"{name} of {vocab_size}", rows, num_bytes, 0, make_calls, can_be_captured=False)


def _attentions(target: Target, rows: int) -> Iterator[Case]:
    if rows <= _MAX_SEQUENCES:
        yield from _attention(target, "decode", [(1, target.context)] * rows)
    if rows >= _MIN_PROMPT or target.device.type == "cpu":
        yield from _attention(target, "prompt", [(rows, rows)])


def _attention(target: Target, name: str, lengths: Sequence[tuple[int, int]]) -> Iterator[Case]:
    """``lengths``: (query tokens, context) of each sequence, alike. Calls take the layers in turn."""
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
    label = f"{name}, context {lengths[0][1]}"
    yield Case("make_attention", label, rows, num_bytes, flops, make_calls, can_be_captured=name == "decode")


def attention_calls(
    kernels: Kernels, shape: AttentionShape, batch: PagedBatch, query: Tensor, layers: Sequence[Tensor]
) -> list[Call]:
    """One call per layer, all with one plan; for a batch of decodes it's a plan that a CUDA graph can keep."""
    attention = kernels.make_attention(shape)
    plan = attention.plan(batch)
    if max(batch.query_lens) == 1 and kernels.backends["make_attention"] != "reference":
        fixed = attention.make_decode_plan(len(batch.query_lens), max(len(table) for table in batch.block_tables))
        fixed.update(batch)
        plan = fixed
    return [partial(attention.run, query, layer, plan) for layer in layers]


def layers_to_call(num_layers: int, batch: PagedBatch) -> range:
    """All of them for decodes, so that KV is cold; a few for chunks, which are long and bound by computing."""
    return range(num_layers) if max(batch.query_lens) == 1 else range(min(num_layers, _PROMPT_LAYERS))


def attended_pairs(query_len: int, context: int) -> int:
    """(query, key) pairs of causal attention, the queries being the last of the context."""
    return query_len * (2 * context - query_len + 1) // 2


def shuffled_batch(lengths: Sequence[tuple[int, int]], block_size: int) -> PagedBatch:
    """Sequences of (query tokens, context) over blocks in random order, no block left over."""
    counts = [-(-context // block_size) for _, context in lengths]
    ids = list(range(sum(counts)))
    random.Random(0).shuffle(ids)
    left = iter(ids)
    tables = [list(itertools.islice(left, count)) for count in counts]
    return PagedBatch([query_len for query_len, _ in lengths], [context for _, context in lengths], tables)


def layers_that_fit(num_layers: int, layer_bytes: int, device: torch.device) -> int:
    """At most ``num_layers`` of ``layer_bytes`` each in a share of what is free; 0 if not even two do."""
    if device.type != "cuda":
        return min(num_layers, 2)
    torch.cuda.empty_cache()
    fitting = int(_MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]) // layer_bytes
    return min(num_layers, fitting) if fitting >= 2 else 0


@dataclass(frozen=True, slots=True)
class _KVCopy:
    """Heads from ``first_head`` on of blocks ``ids`` of ``memory``, and a buffer of their size."""

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


def _kv_copies(operation: str, target: Target, rows: int) -> Iterator[Case]:
    """Half of the heads, as for a peer of twice the tensor-parallel size, and all of them, as for a host tier."""
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


_MAKERS: dict[str, Callable[[Target, int], Iterator[Case]]] = {
    "begin_step": _begin_step,
    "rms_norm": _rms_norm,
    "prepare_qkv": _prepare_qkv,
    "silu_mul": _silu_mul,
    "sample": _samples,
    "pack_linear": _linears,
    "make_attention": _attentions,
    "gather_kv": partial(_kv_copies, "gather_kv"),
    "scatter_kv": partial(_kv_copies, "scatter_kv"),
}
