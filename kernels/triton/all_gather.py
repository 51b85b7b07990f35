"""All-gather of columns over the ranks of one machine, written directly into each other's memory, in one kernel.

Each rank writes its columns to their location in every rank's result. Ranks meet twice: before, so that no rank's
previous result is overwritten while earlier kernels read it; and after, so that all columns have arrived.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.triton.launch import overlapped, wait
from splitserve.kernels.triton.peer_memory import ALIGNMENT, FLAG_BYTES, PeerMemory, at_peer, meet

PROGRAMS = 128
"""Programs of every launch: fixed, because their counters must stay in step. Few enough to run concurrently on the GPUs
that this kernel is meant for."""

_BLOCK = 4096


def gather_bytes(capacity_bytes: int) -> int:
    """Return the bytes of each rank's buffer: a result, the flags. The flags must be zero before the first call."""
    assert capacity_bytes % ALIGNMENT == 0
    return capacity_bytes + FLAG_BYTES * PROGRAMS


def gather_columns(memory: PeerMemory, mine: Tensor, part: Tensor, max_spins: int = 0) -> Tensor:
    """Return ``part`` [R, N] of all ranks side by side: [R, size * N], in ``mine``, this rank's own buffer (uint8),
    valid until the next call.

    All ranks call it in the same order, for the same shapes. With ``max_spins`` a rank reads a flag at most that many
    times, after which the result is wrong: for trials only.
    """
    rows, columns = part.shape
    num_bytes = memory.size * part.nbytes
    assert part.is_contiguous() and num_bytes <= memory.capacity_bytes
    _gather_columns_kernel[(PROGRAMS,)](
        memory.buffers,
        memory.calls,
        part,
        rows,
        COLUMNS=columns,
        CAPACITY=memory.capacity_bytes,
        RANK=memory.rank,
        SIZE=memory.size,
        FLAG_BYTES=FLAG_BYTES,
        BLOCK=_BLOCK,
        NUM_PROGRAMS=PROGRAMS,
        MAX_SPINS=max_spins,
        num_warps=16,
        **overlapped(part.device),
    )
    return mine[:num_bytes].view(part.dtype).view(rows, memory.size * columns)


@triton.jit(do_not_specialize=["rows"])
def _gather_columns_kernel(
    buffers,
    calls,
    part,
    rows,
    COLUMNS: tl.constexpr,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    FLAG_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    MAX_SPINS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    BLOCKS_PER_ROW: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    wait(OVERLAPPED)
    program = tl.program_id(0)
    call = tl.load(calls + program)  # the counter wraps around
    flags_at = CAPACITY + program * FLAG_BYTES
    meet(buffers, flags_at, 2 * call + 1, calls, RANK, SIZE, MAX_SPINS)
    for index in range(program, rows * BLOCKS_PER_ROW, NUM_PROGRAMS):
        row = index // BLOCKS_PER_ROW
        column = index % BLOCKS_PER_ROW * BLOCK + tl.arange(0, BLOCK)
        inside = column < COLUMNS
        content = tl.load(part + row * COLUMNS + column, mask=inside)
        for step in tl.static_range(SIZE):
            result = at_peer(buffers, (RANK + step) % SIZE, 0, part)
            tl.store(result + (row * SIZE + RANK) * COLUMNS + column, content, mask=inside)
    meet(buffers, flags_at, 2 * call + 2, calls, RANK, SIZE, MAX_SPINS)
    tl.store(calls + program, call + 1)
