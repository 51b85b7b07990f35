"""Memory of peers: buffers that every rank of one machine can address, and flags at which their kernels meet."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.triton.operations import sum_of_parts

ALIGNMENT = 16  # bytes of one load of one thread
FLAG_BYTES = 128  # flags of a program, one for each rank: a cache line of its own


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """One rank's view of the ranks' buffers, each of :func:`.all_reduce.buffer_bytes`, zeroed before any use.

    :func:`.all_reduce.flagless_add` has separate buffers, of :func:`.all_reduce.flagless_bytes`, filled with negative
    zeros of the dtype of all its calls; :mod:`.all_gather` has separate ones again.
    """

    rank: int
    size: int
    capacity_bytes: int  # largest tensor; for a gather: largest result
    buffers: Tensor  # their addresses, int64 [size]
    calls: Tensor  # int32 [2, programs of a launch], zero at first, this rank's own: state of programs between calls


@triton.jit
def at_peer(buffers, rank, offset_bytes, like):
    """Return the address ``offset_bytes`` after the start of ``rank``'s buffer, as a pointer of the type of
    ``like``."""
    address = tl.load(buffers + rank) + offset_bytes
    return tl.multiple_of(address.to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def meet(buffers, flags_at, target, like, RANK: tl.constexpr, SIZE: tl.constexpr, MAX_SPINS: tl.constexpr):
    """Signal this program of all other ranks that this one has reached ``target``, and wait until they have.

    All that any of their threads wrote before can be read afterwards. ``flags_at``: bytes from a buffer's start to this
    program's flags, one for each rank. ``like``: a pointer to int32.
    """
    tl.debug_barrier()
    for step in tl.static_range(1, SIZE):
        flag = at_peer(buffers, (RANK + step) % SIZE, flags_at, like) + RANK
        tl.atomic_xchg(flag, target, sem="release", scope="sys")
    for step in tl.static_range(1, SIZE):
        flag = at_peer(buffers, RANK, flags_at, like) + (RANK + step) % SIZE
        spins = 0
        # The difference wraps around like the counters.
        behind = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - target < 0
        while behind:
            behind = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - target < 0
            if MAX_SPINS > 0:
                spins += 1
                behind = behind & (spins < MAX_SPINS)
    tl.debug_barrier()


@triton.jit
def summand(parts, at, inside, num_elements, residual, PARTS: tl.constexpr):
    """Return this rank's summand at the offsets ``at``, in the residual's dtype."""
    return sum_of_parts(parts, at, inside, num_elements, PARTS).to(residual.dtype.element_ty)
