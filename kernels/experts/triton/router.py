"""A router as one Triton kernel for few rows: norm, logits, choice of experts.

A program makes a logit of a row; the last of a row's programs to finish chooses the row's experts. The weights are
loaded before the wait for the kernel that makes the rows.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.experts.router import PlainRouter
from splitserve.kernels.experts.triton.routing import choice_constants, choose
from splitserve.kernels.triton.launch import overlapped, wait, wait_first
from splitserve.kernels.triton.operations import normalised

MAX_PROGRAMS = 4096  # of rows times experts: with more, each weight is read too often
_ELEMENTS_PER_WARP = 2048


class TritonRouter(PlainRouter):
    """See :class:`splitserve.kernels.experts.weights.Router`."""

    def __call__(
        self, x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        own, spec, num_rows = self.weights, self.weights.spec, x.shape[0]
        if num_rows * spec.num_experts > MAX_PROGRAMS:
            return super().__call__(x, norm, eps, normed)
        source = x if normed is None else normed
        assert source.stride(1) == 1 and own.weight.is_contiguous()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if normed is None else normed
        logits = torch.empty((num_rows, spec.num_experts), dtype=torch.float32, device=x.device)
        experts = torch.empty((num_rows, spec.top_k), dtype=torch.int32, device=x.device)
        factors = torch.empty((num_rows, spec.top_k), dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(x.shape[1])
        _router_kernel[(spec.num_experts, num_rows)](
            source,
            norm,
            own.weight,
            logits if own.bias is None else own.bias,
            logits if own.correction is None else own.correction,
            out,
            logits,
            _tickets(x.device),
            experts,
            factors,
            source.stride(0),
            eps,
            STARTS_NEXT=own.has_shared and num_rows == 1,
            NORMALISES=normed is None,
            HAS_LOGITS_BIAS=own.bias is not None,
            IS_WIDE=spec.wide_logits,
            HIDDEN=x.shape[1],
            BLOCK=block,
            **choice_constants(spec, has_bias=own.correction is not None),
            num_warps=max(1, min(8, block // _ELEMENTS_PER_WARP)),
            **overlapped(x.device),
        )
        return out, experts, factors


@functools.cache
def _tickets(device: torch.device) -> Tensor:
    """Return a row's programs that have arrived, zero between launches. Routers of one stream share them: each waits
    for its predecessor."""
    return torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device)


@triton.jit
def _wait(STARTS_NEXT: tl.constexpr, OVERLAPPED: tl.constexpr):
    """Wait for the kernel that makes the rows. The next kernel may start before that if it has weights to load until
    the choice is made, and else afterwards, when it is placed evenly."""
    if STARTS_NEXT:
        wait(OVERLAPPED)
    else:
        wait_first(OVERLAPPED)


@triton.jit(do_not_specialize=["x_stride"])
def _router_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    logits_bias_ptr,
    correction_ptr,
    normed_ptr,
    logits_ptr,
    tickets_ptr,
    experts_ptr,
    factors_ptr,
    x_stride,
    eps,
    STARTS_NEXT: tl.constexpr,
    NORMALISES: tl.constexpr,
    HAS_LOGITS_BIAS: tl.constexpr,
    IS_WIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    SCORE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMALISED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    NUM_EXPERTS: tl.constexpr = GROUPS * GROUP_SIZE
    expert, row, columns = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    weight = tl.load(weight_ptr + expert * HIDDEN + columns, mask=inside, other=0.0)
    _wait(STARTS_NEXT, OVERLAPPED)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    if NORMALISES:
        x = normalised(x, tl.load(norm_ptr + columns, mask=inside, other=0.0), eps, HIDDEN)
        if expert == 0:
            tl.store(normed_ptr + row * HIDDEN + columns, x, mask=inside)
    logit = tl.sum(weight.to(tl.float32) * x.to(tl.float32), 0)
    if not IS_WIDE:
        logit = logit.to(x.dtype).to(tl.float32)
    if HAS_LOGITS_BIAS:
        logit += tl.load(logits_bias_ptr + expert).to(tl.float32)
        if not IS_WIDE:
            logit = logit.to(x.dtype).to(tl.float32)
    tl.store(logits_ptr + row * NUM_EXPERTS + expert, logit)
    tl.debug_barrier()  # the logit is stored before the ticket is taken
    if tl.atomic_add(tickets_ptr + row, 1, sem="acq_rel") == NUM_EXPERTS - 1:
        tl.debug_barrier()
        choose(
            logits_ptr + row * NUM_EXPERTS, correction_ptr, experts_ptr + row * TOP_K, factors_ptr + row * TOP_K, SCALE,
            SCORE, HAS_BIAS, NORMALISED, GROUPS, GROUP_SIZE, KEPT_GROUPS, BEST_TWO, TOP_K, GROUP_BLOCK, SIZE_BLOCK,
            SLOT_BLOCK,
        )  # fmt: skip
        tl.store(tickets_ptr + row, 0)
