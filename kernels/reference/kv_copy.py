"""Copies of a range of key/value heads of KV blocks, to and from one contiguous buffer: in plain PyTorch, on any
device.

A worker with another tensor-parallel size needs some heads of each block, and a host tier needs blocks one after
another; neither is available as large contiguous pieces of the KV memory itself.
"""

import torch
from torch import Tensor


def gather_kv(kv_cache: Tensor, block_ids: Tensor, first_head: int, out: Tensor) -> None:
    """See :class:`splitserve.kernels.api.GatherKV`."""
    check_kv_copy(kv_cache, block_ids, first_head, out)
    heads = kv_cache[:, :, first_head : first_head + out.shape[2]]
    if out.device == kv_cache.device:
        torch.index_select(heads, 0, block_ids, out=out)
    else:
        out.copy_(heads.index_select(0, block_ids), non_blocking=True)


def scatter_kv(source: Tensor, block_ids: Tensor, first_head: int, kv_cache: Tensor) -> None:
    """See :class:`splitserve.kernels.api.ScatterKV`."""
    check_kv_copy(kv_cache, block_ids, first_head, source)
    heads = kv_cache[:, :, first_head : first_head + source.shape[2]]
    heads.index_copy_(0, block_ids, source.to(kv_cache.device, non_blocking=True))


def check_kv_copy(kv_cache: Tensor, block_ids: Tensor, first_head: int, buffer: Tensor) -> None:
    """Assert the preconditions of both directions. Reads no values: no id is checked."""
    _, num_layers, num_heads, *rest = kv_cache.shape
    assert kv_cache.is_contiguous() and buffer.is_contiguous() and kv_cache.dtype == buffer.dtype
    assert block_ids.dtype == torch.int64 and block_ids.device == kv_cache.device and block_ids.is_contiguous()
    assert buffer.shape == (block_ids.shape[0], num_layers, buffer.shape[2], *rest), (kv_cache.shape, buffer.shape)
    assert 0 <= first_head < first_head + buffer.shape[2] <= num_heads, (first_head, buffer.shape[2], num_heads)
    assert buffer.device == kv_cache.device or buffer.is_pinned()
