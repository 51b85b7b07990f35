"""How Triton's decode attention is launched for a batch size: tuned (``splitserve tune``), else a safe default."""

from dataclasses import dataclass

from splitserve.kernels.api import AttentionShape
from splitserve.kernels.tuning.parameters import shape_key, tuned

OPERATION = "attention_decode"
MAX_PARTS = 64
PROGRAMS_PER_DEVICE = 528  # 4 for each of an H100's 132 multiprocessors


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """``num_parts``: programs that share a (sequence, key/value head); ``tile``: tokens of context that a program looks
    at in one go, a power of two."""

    num_parts: int
    tile: int = 64
    num_warps: int = 2
    num_stages: int = 3


def decode_launch(shape: AttentionShape, batch_size: int) -> DecodeLaunch:
    """For a plan of ``batch_size`` sequences; one plan is launched with one of these for all its contexts."""
    num_parts = PROGRAMS_PER_DEVICE // (batch_size * shape.num_kv_heads)
    default = DecodeLaunch(max(1, min(MAX_PARTS, num_parts)))
    return tuned(default, OPERATION, decode_key(shape), batch_size)


def decode_key(shape: AttentionShape) -> str:
    """What the tuned files call ``shape``; rows are sequences."""
    return shape_key(
        shape.dtype,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
    )
