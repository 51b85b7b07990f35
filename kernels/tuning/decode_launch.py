"""Launch parameters of Triton's decode attention by batch size: tuned (``splitserve tune``), else a safe default."""

from dataclasses import dataclass

from splitserve.kernels.api import AttentionShape
from splitserve.kernels.tuning.parameters import shape_key, tuned

OPERATION = "attention_decode"
MAX_PARTS = 64
PROGRAMS_PER_DEVICE = 528  # 4 for each of an H100's 132 multiprocessors


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """Launch parameters of decode attention."""

    num_parts: int  # programs that share a (sequence, key/value head)
    tile: int = 64  # tokens of context that a program handles at a time, a power of two
    num_warps: int = 2
    num_stages: int = 3


def decode_launch(shape: AttentionShape, batch_size: int) -> DecodeLaunch:
    """Return the parameters for a plan of ``batch_size`` sequences; a plan uses the same ones for all its contexts."""
    num_parts = PROGRAMS_PER_DEVICE // (batch_size * shape.num_kv_heads)
    default = DecodeLaunch(max(1, min(MAX_PARTS, num_parts)))
    return tuned(default, OPERATION, decode_key(shape), batch_size)


def decode_key(shape: AttentionShape) -> str:
    """Return the key of ``shape`` in the tuned files; rows are sequences."""
    return shape_key(
        shape.dtype,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
    )
