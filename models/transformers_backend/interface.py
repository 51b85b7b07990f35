"""Attention of transformers' models, taken over by name: a model made with one of these implementations calls us."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

PAGED = "splitserve"
"""Attention over KV memory. Transformers makes no masks for it."""
OBSERVED = "splitserve_observed"
"""Attention that is looked at: the mask of each call says which tokens attend to which."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of the attention interface. G divides H; the dimensions of keys and values may differ."""

    layer: int
    query: Tensor  # [1, H, T, key_dim]
    key: Tensor  # [1, G, T, key_dim]
    value: Tensor  # [1, G, T, value_dim]
    mask: Tensor | None  # bool [T, T] if attention is observed; None if the model gives none
    given: Mapping[str, Any]  # all other arguments


Attend: TypeAlias = Callable[[AttentionCall], Tensor]
"""A function that returns the result of a call: [1, T, H, value_dim]."""

_SHOWN = "splitserve_shown"  # an attribute of masks

_attend: ContextVar[Attend] = ContextVar("attend")


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Let ``attend`` answer the calls of models that run in this block."""
    token = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(token)


def _called(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *_: Any, **given: Any
) -> tuple[Tensor, None]:
    """Answer a model's call. A module that says no number is layer -1, which no model has."""
    number = getattr(module, "layer_idx", None)
    layer = number if isinstance(number, int) else -1
    mask = getattr(attention_mask, _SHOWN, None)
    return _attend.get()(AttentionCall(layer, query, key, value, mask, given)), None


def _mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., Any], **_: Any
) -> Tensor:  # of transformers' masking_utils
    """Return a mask without data, [1, 1, q_length, kv_length], that carries which tokens attend to which; none where
    numbers alone don't tell."""
    queries, keys = torch.arange(q_length).unsqueeze(1), torch.arange(kv_length).unsqueeze(0)
    zero = torch.tensor(0)
    try:
        shown = torch.as_tensor(mask_function(zero, zero, queries, keys)).expand(q_length, kv_length)
    except (RuntimeError, TypeError, IndexError):  # it depends on tensors of the step
        shown = torch.zeros((q_length, kv_length), dtype=torch.bool)
    mask = torch.empty((1, 1, q_length, kv_length), dtype=torch.bool, device="meta")
    setattr(mask, _SHOWN, shown)
    return mask


for _name in (PAGED, OBSERVED):
    AttentionInterface.register(_name, _called)
AttentionMaskInterface.register(OBSERVED, _mask)
