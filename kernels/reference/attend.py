"""Attention with its log-sum-exp in PyTorch's operations, over parts of the keys that are then merged."""

import torch
from torch import Tensor

QUERY_BLOCK = 64  # queries that share one mask: the fused kernel's own causal mode also computes masked scores


def attend_segment(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, *, soft_cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return :func:`attend` of all queries, or block by block over the keys that each block attends to (see
    :class:`_Segment`)."""
    if mask is None:
        return attend(query, keys, values, None, scale, soft_cap=soft_cap)
    num_queries, num_keys = query.shape[2], keys.shape[2]
    # Blocks are counted from the end, so that one mask suffices for all: an earlier block uses its right-hand part.
    parts = []
    for last in range(num_queries, 0, -QUERY_BLOCK):
        first = max(0, last - QUERY_BLOCK)
        seen = num_keys - (num_queries - last)
        block_mask = mask[first - last :, num_keys - seen :]
        block = (query[:, :, first:last], keys[:, :, :seen], values[:, :, :seen])
        parts.append(attend(*block, block_mask, scale, soft_cap=soft_cap))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in reversed(parts)], 2), torch.cat([lse for _, lse in reversed(parts)], 2)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, *, soft_cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention with its log-sum-exp: ``query`` [1, H, L, D], ``keys`` and ``values`` [1, G, K, D], ``mask``
    [L, K].

    Return the output [1, H, L, D] and the log of the softmax's denominator, float32 [1, H, L].
    """
    if query.device.type == "cpu" and soft_cap is None:  # the fused one has no soft cap
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, False, attn_mask=mask, scale=scale
        )
        return out, lse.view(query.shape[:3])
    return attend_portable(query, keys, values, mask, scale, soft_cap=soft_cap)


def attend_portable(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, *, soft_cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute :func:`attend` in plain operations, for devices without the fused one."""
    group_size = query.shape[1] // keys.shape[1]
    scores = query.float() @ keys.repeat_interleave(group_size, dim=1).transpose(2, 3).float() * scale
    if soft_cap is not None:
        scores = soft_capped(scores, soft_cap)
    if mask is not None:
        scores += mask
    out = scores.softmax(dim=-1) @ values.repeat_interleave(group_size, dim=1).float()
    return out.to(query.dtype), scores.logsumexp(dim=-1)


def soft_capped(scores: Tensor, cap: float) -> Tensor:
    """Bound scores smoothly by ``cap`` (arXiv:2408.00118)."""
    return (scores / cap).tanh_().mul_(cap)


def merge(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys, each as (output, log-sum-exp), into attention over their
    union."""
    lse = torch.logaddexp(left[1], right[1])
    out = left[0] * (left[1] - lse).exp().unsqueeze(-1) + right[0] * (right[1] - lse).exp().unsqueeze(-1)
    return out.to(left[0].dtype), lse


def with_sinks(sinks: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Give each head's sink (float32 [H]) its share of the softmax: ``out`` [1, H, L, D], ``lse`` [1, H, L]."""
    return (out * torch.sigmoid(lse - sinks.view(1, -1, 1)).unsqueeze(-1)).to(out.dtype)


def softmax_with(sinks: Tensor | None, scores: Tensor) -> Tensor:
    """Return the weights of tokens, float32, for ``scores`` [S, G, heads that share keys, C] beside the sinks [H]."""
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)
    shared = sinks.view(1, *scores.shape[1:3], 1).expand(scores.shape[0], -1, -1, -1)
    return torch.softmax(torch.cat((scores.float(), shared), -1), dim=-1)[..., :-1]
