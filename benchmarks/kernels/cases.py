"""Cases of ``splitserve bench kernels``: each operation at the shapes of a model's step, on random inputs.

A case has several copies of its inputs, together larger than the level-2 cache, which its calls use in turn; in a step,
recently computed inputs are still cached, so small operations look slower here than they are in a step.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from splitserve.benchmarks.kernels.case import Call, Case, Target
from splitserve.benchmarks.kernels.expert_cases import expert_products, expert_routers, expert_routes
from splitserve.benchmarks.kernels.kv_cases import MAX_SEQUENCES, attentions, kv_copies
from splitserve.benchmarks.kernels.latent_cases import latent_attentions, prepared_latents
from splitserve.kernels.api import AttentionShape, Kernels, Linear
from splitserve.kernels.norms import NormWeights
from splitserve.kernels.raw_qkv import RawQkv
from splitserve.kernels.sampling import SamplingBatch
from splitserve.models.declared import stored_weights
from splitserve.models.layers.weight import Role

_POSITIONS = 4096
_NUM_TOP = 5


def cases(target: Target, rows: int, operations: Sequence[str]) -> Iterator[Case]:
    """Yield all of ``operations`` in a step of ``rows`` tokens, made one by one: inputs of large ones are gigabytes."""
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
        return torch.stack((token_ids, positions, torch.full_like(blocks, -1), blocks))

    inputs = target.copies(num_bytes, make_inputs)

    def make_calls(kernels: Kernels) -> list[Call]:
        def call(each: Tensor) -> Tensor:
            return kernels.begin_step(each, drawn, embedding, rotations, [shape]).hidden

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


def _norms(target: Target, rows: int) -> Iterator[Case]:
    """A norm of a product, its addition to the residual, and the norm of the sum."""
    size = target.config.hidden_size
    weights = NormWeights(target.normal(size).float(), 1e-5)
    num_bytes = 4 * rows * size * target.dtype.itemsize
    inputs = target.copies(num_bytes, lambda: target.normal(2, rows, size))

    def make_calls(kernels: Kernels) -> list[Call]:
        norm = kernels.pack_norm(weights)

        def call(residual: Tensor, x: Tensor) -> Tensor:
            norm.add_to(residual, x, weights)
            return residual

        return [partial(call, *both.clone()) for both in inputs]

    yield Case("pack_norm", f"{size}", rows, num_bytes, 0, make_calls)


def _gates(operation: str, target: Target, rows: int) -> Iterator[Case]:
    size = target.config.intermediate_size
    num_bytes = 3 * rows * size * target.dtype.itemsize
    inputs = target.copies(num_bytes, lambda: target.normal(rows, 2 * size))

    def make_calls(kernels: Kernels) -> list[Call]:
        return [partial(getattr(kernels, operation), x.clone()) for x in inputs]

    yield Case(operation, f"{size}", rows, num_bytes, 0, make_calls)


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
        raw = [RawQkv(qkv, norm, 1e-6, rotation, slots) for qkv in inputs]
        return [partial(kernels.prepare_qkv, each, kv_layer) for each in raw]

    label = f"{heads}+2*{kv_heads} heads of {head_dim}" + (", norm" if norm is not None else "")
    yield Case("prepare_qkv", label, rows, num_bytes, 0, make_calls)


def _linears(target: Target, rows: int) -> Iterator[Case]:
    """Yield the matrix products of a layer with their fused neighbours, and the head."""
    config = target.config
    hidden, attended = config.hidden_size, config.num_heads * config.head_dim
    projected = attended + 2 * config.num_kv_heads * config.head_dim
    yield _linear(target, rows, "norm", projected, hidden)
    yield _linear(target, rows, "add", hidden, attended)
    yield _linear(target, rows, "gated", 2 * config.intermediate_size, hidden)
    yield _linear(target, rows, "add", hidden, config.intermediate_size)
    if rows <= MAX_SEQUENCES:
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
    if rows <= MAX_SEQUENCES:
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


def _masks(target: Target, rows: int) -> Iterator[Case]:
    if rows <= MAX_SEQUENCES:
        vocab_size = target.config.vocab_size
        num_bytes = 4 * rows * vocab_size  # nearly all logits are written
        inputs = target.copies(num_bytes, lambda: target.normal(rows, vocab_size).float())
        numbers = torch.arange(rows, device=target.device)
        bits = torch.zeros((rows, -(-vocab_size // 32)), dtype=torch.int32, device=target.device)

        def make_calls(kernels: Kernels) -> list[Call]:
            def call(logits: Tensor) -> Tensor:
                kernels.mask_logits(logits, numbers, bits)
                return logits

            return [partial(call, logits) for logits in inputs]

        yield Case("mask_logits", f"of {vocab_size}", rows, num_bytes, 0, make_calls)


def _penalties(target: Target, rows: int) -> Iterator[Case]:
    if rows <= MAX_SEQUENCES:
        vocab_size = target.config.vocab_size
        num_bytes = 4 * rows * vocab_size  # of occurrences: few logits are changed
        inputs = target.copies(num_bytes, lambda: _few_occurrences(target, rows))
        logits = target.normal(rows, vocab_size).float()
        numbers = torch.arange(rows, device=target.device)
        penalties = torch.tensor([[1.0, 0.0, 0.0]], device=target.device).repeat(
            rows, 1
        )  # results of all calls are alike

        def make_calls(kernels: Kernels) -> list[Call]:
            def call(occurrences: Tensor) -> Tensor:
                kernels.penalise_logits(logits, numbers, numbers, occurrences, penalties)
                return logits

            return [partial(call, occurrences) for occurrences in inputs]

        yield Case("penalise_logits", f"of {vocab_size}", rows, num_bytes, 0, make_calls)


def _few_occurrences(target: Target, rows: int) -> Tensor:
    """Return occurrences as after some hundred tokens, int32 [rows, vocab]."""
    found = torch.zeros((rows, target.config.vocab_size), dtype=torch.int32, device=target.device)
    found[:, :: max(1, target.config.vocab_size // 256)] = 1
    return found


def _scores(target: Target, rows: int) -> Iterator[Case]:
    if rows <= MAX_SEQUENCES:
        vocab_size = target.config.vocab_size
        num_bytes = rows * vocab_size * target.dtype.itemsize
        inputs = target.copies(num_bytes, lambda: target.normal(rows, vocab_size, scale=4.0))
        token_ids = torch.arange(rows, device=target.device)

        def make_calls(kernels: Kernels) -> list[Call]:
            def call(logits: Tensor) -> Tensor:
                return kernels.score_tokens(logits, token_ids, _NUM_TOP)[0]

            return [partial(call, logits) for logits in inputs]

        yield Case("score_tokens", f"best {_NUM_TOP} of {vocab_size}", rows, num_bytes, 0, make_calls)


_MAKERS: dict[str, Callable[[Target, int], Iterator[Case]]] = {
    "begin_step": _begin_step,
    "rms_norm": _rms_norm,
    "prepare_qkv": _prepare_qkv,
    "pack_norm": _norms,
    "silu_mul": partial(_gates, "silu_mul"),
    "gelu_mul": partial(_gates, "gelu_mul"),
    "sample": _samples,
    "mask_logits": _masks,
    "penalise_logits": _penalties,
    "score_tokens": _scores,
    "pack_linear": _linears,
    "route": expert_routes,
    "pack_router": expert_routers,
    "pack_experts": expert_products,
    "make_attention": attentions,
    "prepare_latent": prepared_latents,
    "make_latent_attention": latent_attentions,
    "gather_kv": partial(kv_copies, "gather_kv"),
    "scatter_kv": partial(kv_copies, "scatter_kv"),
}
