"""Norm, rotation, activation and KV write in plain PyTorch: correct on any device, and the default on CPU.

Signatures and shapes are those of :mod:`splitserve.kernels.api`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from splitserve.kernels.api import AttentionShape, TokenRows
from splitserve.kernels.fp8.kv import FP8, LARGEST
from splitserve.kernels.raw_qkv import RawQkv
from splitserve.kernels.windows import slots_of_groups


def begin_step(
    inputs: Tensor, drawn: Tensor, embedding: Tensor, rotations: Tensor, shapes: Sequence[AttentionShape]
) -> TokenRows:
    """See :class:`splitserve.kernels.api.BeginStep`."""
    positions = inputs[1]
    cos, sin = rotations[positions].unbind(1)
    hidden = torch.nn.functional.embedding(known_tokens(inputs, drawn), embedding).to(shapes[0].dtype)
    return TokenRows(hidden, (cos, sin), slots_of_groups(shapes, inputs[3:], positions))


def known_tokens(inputs: Tensor, drawn: Tensor) -> Tensor:
    """Return the token ids [T] of a step; those that the host doesn't know are looked up in ``drawn``."""
    token_ids, previous = inputs[0], inputs[2]
    return torch.where(previous >= 0, drawn[previous.clamp(min=0)].clamp(min=0), token_ids)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See :class:`splitserve.kernels.api.RmsNorm`. The product with ``weight`` is in the dtype of ``x``."""
    wide = x.float()
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
    scale.div_(x.shape[-1]).add_(eps).rsqrt_()
    normed: Tensor = (wide * scale).to(x.dtype)
    return normed.mul_(weight)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head. ``x`` [T, heads, D]; ``cos``, ``sin`` [T, D], the first half of sin negated."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.mul(first, cos[..., :half], out=out[..., :half]).addcmul_(second, sin[..., :half])
    torch.mul(second, cos[..., half:], out=out[..., half:]).addcmul_(first, sin[..., half:])
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """See :class:`splitserve.kernels.api.SiluMul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate, inplace=True) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """See :class:`splitserve.kernels.api.GeluMul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def prepare_qkv(raw: RawQkv, kv_layer: Tensor) -> Tensor:
    """See :class:`splitserve.kernels.api.PrepareQkv`."""
    qkv = join_parts(raw.parts, raw.rotation[0].dtype)
    if raw.bias is not None:
        qkv = qkv + raw.bias.view(qkv.shape[1:])
    num_kv_heads = kv_layer.shape[1]
    num_rotated = qkv.shape[1] - num_kv_heads
    rotated = qkv[:, :num_rotated]
    if raw.norm is not None:
        rotated = rms_norm(rotated, raw.norm, raw.eps)
    rotated = rope(rotated, *raw.rotation)
    num_heads = num_rotated - num_kv_heads
    kv_write(kv_layer, rotated[:, num_heads:], qkv[:, num_rotated:], raw.slots)
    return rotated[:, :num_heads]


def join_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of :meth:`splitserve.kernels.api.Linear.parts` over their first dimension, in ``dtype``."""
    return parts[0] if parts.shape[0] == 1 else parts.sum(0).to(dtype)


def kv_write(kv_layer: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write ``key`` and ``value`` [T, G, D] at ``slots`` [T, G]. A flat view takes half the time of full indexing."""
    num_blocks, num_kv_heads, _, block_size, head_dim = kv_layer.shape
    num_rows = (num_blocks - 1) * (kv_layer.stride(0) // head_dim) + (2 * num_kv_heads - 1) * block_size
    rows = slots.flatten()
    for index, content in enumerate((key, value)):
        offset = kv_layer.storage_offset() + index * block_size * head_dim
        flat = kv_layer.as_strided((num_rows, head_dim), (head_dim, 1), offset)
        if kv_layer.dtype == FP8:
            content = content.clamp(-LARGEST, LARGEST)  # noqa: PLW2901
        flat.index_put_((rows,), content.reshape(-1, head_dim).to(kv_layer.dtype))
