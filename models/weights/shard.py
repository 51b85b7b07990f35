"""Tensor-parallel shards: ranks, and parts of stored tensors. Pure arithmetic, without torch.

Each layer declares how ranks share its weights (:mod:`splitserve.models.layers.weight`).
"""

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TypeAlias

from splitserve.models.config import ModelConfig

_HEAD_ROWS_MULTIPLE = 16  # of the LM head's rows per rank: GEMMs like aligned rows of logits


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank ``rank`` of ``size``; the default is the whole."""

    rank: int = 0
    size: int = 1
    has_whole_experts: bool = False  # ranks share the experts of a layer, else each expert's inner dimension


class Kept(Enum):
    """The type that a weight has in memory."""

    MODEL = auto()  # the model's dtype, or FP8 as stored
    FLOAT32 = auto()
    BYTES = auto()  # as stored


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle of the stored tensor ``name``; None stands for all rows or columns. A vector has rows only."""

    name: str
    rows: range | None = None
    columns: range | None = None
    kept: Kept = Kept.MODEL


Parts: TypeAlias = tuple[Part, ...]
"""Parts that are read as one, stacked along their rows."""


def local_config(config: ModelConfig, size: int) -> ModelConfig:
    """The configuration of one rank's part: its heads and its share of the MLP; the vocabulary is the model's, and the
    experts are all there."""
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        intermediate_size=config.intermediate_size // size,
    )


def head_rows(vocab_size: int, size: int) -> int:
    """Rows of the LM head per rank: the last ranks' are padded."""
    if size == 1:
        return vocab_size
    rows = -(-vocab_size // size)
    return -(-rows // _HEAD_ROWS_MULTIPLE) * _HEAD_ROWS_MULTIPLE
