"""Launch of Triton kernels such that a kernel may start while its predecessor ends.

With programmatic dependent launch (compute capability 9.0 and later) the next kernel's programs replace those that have
ended, and wait on the device until the previous kernel has completed. A decode step has hundreds of kernels of a few
microseconds, so the gaps between them matter. Every kernel launched this way must call ``wait`` before it reads what a
kernel wrote, or writes what one may read: completion is then transitive. It may at once read what was written before
the first kernel of a step (weights, the plan's numbers, which are copied, not computed). A program that does neither
may end without a wait, as long as another one of its kernel waits.

Programs that start early are placed where there is room, so unevenly while the previous kernel holds most of the
device. That is good for short kernels, and for those that fetch weights before they wait; a long kernel is better
started when the device is empty.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import functools
from typing import Any

import torch
import triton
import triton.language as tl


def overlapped(device: torch.device) -> dict[str, Any]:
    """Return keyword arguments for a launch on ``device`` of a kernel that takes and honours ``OVERLAPPED``."""
    if device.type != "cuda" or not _has_dependent_launch(device.index or 0):
        return {"OVERLAPPED": False}
    return {"OVERLAPPED": True, "launch_pdl": True}


@functools.cache
def _has_dependent_launch(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index) >= (9, 0)


@triton.jit
def wait(OVERLAPPED: tl.constexpr):
    """Let the next kernel start where there is room, and wait for the end of the previous one."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_alone(OVERLAPPED: tl.constexpr):
    """Wait for the end of the previous kernel. The next one starts when this one ends: had it few programs, they would
    crowd on the multiprocessors that become free first."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_first(OVERLAPPED: tl.constexpr):
    """Wait for the end of the previous kernel, then let the next one start. For a kernel of few programs before a long
    one: the latter's are placed evenly, since the previous kernel is gone."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(rows_at, first_k, K: tl.constexpr, COUNT: tl.constexpr):
    """Prefetch elements ``first_k`` to ``first_k + COUNT`` of each row of ``K`` into the L2 cache, 128 bytes at a
    time."""
    LINE: tl.constexpr = 128 // (rows_at.dtype.element_ty.primitive_bitwidth // 8)
    NUM_LINES: tl.constexpr = (COUNT + LINE - 1) // LINE
    at = rows_at[:, None] + tl.minimum(first_k + tl.arange(0, NUM_LINES) * LINE, K - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
