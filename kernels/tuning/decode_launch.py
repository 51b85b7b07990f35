"""Launch parameters of Triton's decode attention by batch size: tuned (``splitserve tune``), else a safe default."""

import math
from dataclasses import dataclass

from splitserve.kernels.api import AttentionShape
from splitserve.kernels.tuning.parameters import shape_key, tuned

OPERATION = "attention_decode"
MAX_PARTS = 64
PROGRAMS_PER_DEVICE = 528  # 4 for each of an H100's 132 multiprocessors
_PARTS_OF_MANY = range(1, 5)  # where programs of whole contexts fill the device
_PART_COST = 0.05  # what each part more costs, as a share of the time in which all programs run without a gap


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """Launch parameters of decode attention."""

    num_parts: int  # programs that share a key/value head of a sequence whose context is the mean
    tile: int = 64  # tokens of context that a program handles at a time, a power of two
    num_warps: int = 2
    num_stages: int = 3


def decode_launch(shape: AttentionShape, batch_size: int) -> DecodeLaunch:
    """Return the parameters for a plan of ``batch_size`` sequences; a plan uses the same ones for all its contexts."""
    default = DecodeLaunch(_num_parts(batch_size * shape.num_kv_heads))
    return tuned(default, OPERATION, decode_key(shape), batch_size)


def _num_parts(num_programs: int) -> int:
    """Return the parts of ``num_programs`` equal contexts: as many as fill the device at most once, where whole
    contexts leave room for it, else so many that all parts nearly fill it a whole number of times."""
    if num_programs < PROGRAMS_PER_DEVICE:
        return min(MAX_PARTS, PROGRAMS_PER_DEVICE // num_programs)
    times = num_programs / PROGRAMS_PER_DEVICE
    return min(_PARTS_OF_MANY, key=lambda count: math.ceil(times * count) / (times * count) + _PART_COST * count)


def decode_key(shape: AttentionShape) -> str:
    """Return the key of ``shape`` in the tuned files; rows are sequences."""
    return shape_key(
        shape.dtype,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
    )
