"""Norm, rotation, activation and KV write in plain PyTorch: right on any device, and the default on CPU.

Signatures and shapes are those of :mod:`splitserve.kernels.api`.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """See :class:`splitserve.kernels.api.RmsNorm`. The product with ``weight`` is in the dtype of ``x``."""
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
    scale.div_(x.shape[-1]).add_(eps).rsqrt_()
    normed: Tensor = (wide * scale).to(x.dtype)
    return normed.mul_(weight)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See :class:`splitserve.kernels.api.Rope`."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return (x * cos.unsqueeze(1)).addcmul_(swapped, sin.unsqueeze(1))


def silu_mul(gate_up: Tensor) -> Tensor:
    """See :class:`splitserve.kernels.api.SiluMul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    activated: Tensor = torch.nn.functional.silu(gate)
    return activated.mul_(up)


def kv_write(kv_layer: Tensor, key: Tensor, value: Tensor, slot_blocks: Tensor, slot_offsets: Tensor) -> None:
    """See :class:`splitserve.kernels.api.KvWrite`."""
    kv_layer[slot_blocks, :, 0, slot_offsets] = key
    kv_layer[slot_blocks, :, 1, slot_offsets] = value
