"""Sums over the ranks of one machine, read and written straight through each other's memory, in one kernel.

For the small tensors of a decode step the latency counts: NCCL's rings pass a tensor on in steps, here everybody reads
from everybody at once. Every rank has a buffer that all can address, a :class:`PeerMemory`. One-shot: each rank
publishes its summand, and adds up all of them. Two-shot: each adds up a slice and writes it to the others: less to move
with many ranks, but they meet twice. The summands are added in the order of the ranks, in float32, with the residual
first, so all ranks get the same bits.

Ranks meet at flags that only ever count up, so that a captured graph can be replayed: program i of a rank waits for
program i of the others, since it reads what those wrote. The summands of two calls in a row lie in different halves: a
rank that has met the others in one call knows that they are done with the call before, though not with this one.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.triton_launch import overlapped, wait

PROGRAMS = 64
"""Of every launch, whatever its size: their counters must stay in step. Few enough to run at once on any GPU."""

_BLOCK = 4096
_NUM_WARPS = 16
_ALIGNMENT = 16  # bytes of one load of one thread
_FLAG_BYTES = 128  # of a program's flags, one for each rank: a cache line of its own


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """One rank's view of the ranks' buffers, each of :func:`buffer_bytes`, zeroed before anybody uses them.

    ``buffers``: their addresses, int64 [size]. ``calls``: int32 [:data:`PROGRAMS`], zero at first, this rank's own.
    Tensors up to ``capacity_bytes`` can be added up.
    """

    rank: int
    size: int
    capacity_bytes: int
    buffers: Tensor
    calls: Tensor


def buffer_bytes(capacity_bytes: int, size: int) -> int:
    """Bytes of each rank's buffer: two halves for summands, one part for the others' results, the flags."""
    assert capacity_bytes % _ALIGNMENT == 0
    assert 4 * size <= _FLAG_BYTES
    return 3 * capacity_bytes + _FLAG_BYTES * PROGRAMS


def one_shot_add(memory: PeerMemory, residual: Tensor, partial: Tensor, max_spins: int = 0) -> None:
    """``residual`` += the sum of all ranks' ``partial``, both contiguous, of one shape and dtype.

    All ranks call it (or :func:`two_shot_add`) in the same order, for the same shapes. With ``max_spins`` a rank waits
    for no more than so many looks at a flag, after which the result is wrong: for trying out only.
    """
    _launch(_one_shot_kernel, memory, residual, partial, max_spins)


def two_shot_add(memory: PeerMemory, residual: Tensor, partial: Tensor, max_spins: int = 0) -> None:
    """See :func:`one_shot_add`."""
    _launch(_two_shot_kernel, memory, residual, partial, max_spins)


def _launch(kernel, memory: PeerMemory, residual: Tensor, partial: Tensor, max_spins: int) -> None:
    assert residual.is_contiguous() and partial.is_contiguous()
    assert residual.shape == partial.shape and residual.dtype == partial.dtype
    assert partial.nbytes <= memory.capacity_bytes
    kernel[(PROGRAMS,)](
        memory.buffers,
        memory.calls,
        residual,
        partial,
        partial.numel(),
        CAPACITY=memory.capacity_bytes,
        RANK=memory.rank,
        SIZE=memory.size,
        BLOCK=_BLOCK,
        NUM_PROGRAMS=PROGRAMS,
        FLAG_BYTES=_FLAG_BYTES,
        MAX_SPINS=max_spins,
        num_warps=_NUM_WARPS,
        **overlapped(partial.device),
    )


@triton.jit
def _at(buffers, rank, offset_bytes, like):
    """Address ``offset_bytes`` behind the start of ``rank``'s buffer, as a pointer to what ``like`` points to."""
    address = tl.load(buffers + rank) + offset_bytes
    return tl.multiple_of(address.to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def _meet(buffers, flags_at, target, like, RANK: tl.constexpr, SIZE: tl.constexpr, MAX_SPINS: tl.constexpr):
    """Tell this program of all other ranks that this one got to ``target``, and wait until they did.

    What any thread of theirs wrote before can be read afterwards. ``flags_at``: bytes from a buffer's start to this
    program's flags, one for each rank. ``like`` is a pointer to int32.
    """
    tl.debug_barrier()
    for step in tl.static_range(1, SIZE):
        flag = _at(buffers, (RANK + step) % SIZE, flags_at, like) + RANK
        tl.atomic_xchg(flag, target, sem="release", scope="sys")
    for step in tl.static_range(1, SIZE):
        flag = _at(buffers, RANK, flags_at, like) + (RANK + step) % SIZE
        spins = 0
        # The difference wraps around as the counters do.
        behind = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - target < 0
        while behind:
            behind = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - target < 0
            if MAX_SPINS > 0:
                spins += 1
                behind = behind & (spins < MAX_SPINS)
    tl.debug_barrier()


@triton.jit
def _sum(buffers, summands_at, residual, partial, at, inside, RANK: tl.constexpr, SIZE: tl.constexpr):
    """float32: the residual plus all ranks' summands, at the offsets ``at``."""
    total = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += tl.load(partial + at, mask=inside, other=0.0).to(tl.float32)
        else:
            total += tl.load(_at(buffers, rank, summands_at, partial) + at, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def _one_shot_kernel(
    buffers,
    calls,
    residual,
    partial,
    num_elements,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    FLAG_BYTES: tl.constexpr,
    MAX_SPINS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait(OVERLAPPED)
    program = tl.program_id(0)
    call = tl.load(calls + program)
    summands_at = (call & 1) * CAPACITY  # the counter wraps around
    published = _at(buffers, RANK, summands_at, partial)
    for first in range(program * BLOCK, num_elements, NUM_PROGRAMS * BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < num_elements
        tl.store(published + at, tl.load(partial + at, mask=inside), mask=inside)
    flags_at = 3 * CAPACITY + program * FLAG_BYTES
    _meet(buffers, flags_at, 2 * call + 1, calls, RANK, SIZE, MAX_SPINS)
    for first in range(program * BLOCK, num_elements, NUM_PROGRAMS * BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < num_elements
        total = _sum(buffers, summands_at, residual, partial, at, inside, RANK, SIZE)
        tl.store(residual + at, total.to(residual.dtype.element_ty), mask=inside)
    tl.store(calls + program, call + 1)


@triton.jit
def _two_shot_kernel(
    buffers,
    calls,
    residual,
    partial,
    num_elements,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    FLAG_BYTES: tl.constexpr,
    MAX_SPINS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait(OVERLAPPED)
    program = tl.program_id(0)
    call = tl.load(calls + program)
    summands_at = (call & 1) * CAPACITY  # the counter wraps around
    length = tl.cdiv(num_elements, 16 * SIZE) * 16  # of a rank's slice
    published = _at(buffers, RANK, summands_at, partial)
    for step in tl.static_range(1, SIZE):
        start = (RANK + step) % SIZE * length
        end = tl.minimum(start + length, num_elements)
        for first in range(start + program * BLOCK, end, NUM_PROGRAMS * BLOCK):
            at = first + tl.arange(0, BLOCK)
            inside = at < end
            tl.store(published + at, tl.load(partial + at, mask=inside), mask=inside)
    flags_at = 3 * CAPACITY + program * FLAG_BYTES
    _meet(buffers, flags_at, 2 * call + 1, calls, RANK, SIZE, MAX_SPINS)
    start = RANK * length
    end = tl.minimum(start + length, num_elements)
    for first in range(start + program * BLOCK, end, NUM_PROGRAMS * BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < end
        total = _sum(buffers, summands_at, residual, partial, at, inside, RANK, SIZE)
        total = total.to(residual.dtype.element_ty)
        tl.store(residual + at, total, mask=inside)
        for step in tl.static_range(1, SIZE):
            tl.store(_at(buffers, (RANK + step) % SIZE, 2 * CAPACITY, partial) + at, total, mask=inside)
    _meet(buffers, flags_at, 2 * call + 2, calls, RANK, SIZE, MAX_SPINS)
    results = _at(buffers, RANK, 2 * CAPACITY, partial)
    for step in tl.static_range(1, SIZE):
        start = (RANK + step) % SIZE * length
        end = tl.minimum(start + length, num_elements)
        for first in range(start + program * BLOCK, end, NUM_PROGRAMS * BLOCK):
            at = first + tl.arange(0, BLOCK)
            inside = at < end
            tl.store(residual + at, tl.load(results + at, mask=inside), mask=inside)
    tl.store(calls + program, call + 1)
