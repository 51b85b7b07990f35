"""Choice of a backend for each operation: once at start, by device and dtype, with overrides by name.

A backend is a :class:`Candidate`: a name, a check that returns why it can't run here (or None), and a loader, so that a
missing package costs nothing unless it is requested. Candidates are listed best first; the reference is last and can
always run. A new backend is one more line in ``_CANDIDATES``.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from splitserve.kernels.api import Kernels
from splitserve.kernels.experts import reference as experts
from splitserve.kernels.experts.router import PlainRouter
from splitserve.kernels.latent import reference as latent
from splitserve.kernels.reference import attention, kv_copy, linear, norms, sampling
from splitserve.kernels.reference import operations as reference


@dataclass(frozen=True, slots=True)
class Target:
    """Device, dtype and head size that the kernels will run with, and whether attention has sinks."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int | None = None
    has_sinks: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend of an operation. ``why_not`` returns why it can't run on a target, or None if it can."""

    backend: str
    why_not: Callable[[Target], str | None]
    load: Callable[[], Any]


def _always(_target: Target) -> str | None:
    return None


def _onednn_missing(target: Target) -> str | None:
    return linear.onednn_unavailable_reason(target.device, target.dtype)


def _triton_missing(target: Target) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton isn't installed; pip install '.[gpu]' in a clone of Splitserve"
    if target.device.type != "cuda":
        return f"it runs on CUDA devices, not on {target.device.type}"
    return None


def _flashinfer_missing(target: Target) -> str | None:
    if target.device.type != "cuda":
        return f"it runs on CUDA devices, not on {target.device.type}"
    if target.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {target.dtype}"
    if target.has_sinks:
        return "it takes no attention sinks"
    if target.head_dim not in (None, 64, 128, 256):
        return f"it has no kernel for head_dim {target.head_dim}"
    if importlib.util.find_spec("flashinfer") is None:
        return "the package flashinfer isn't installed; pip install '.[gpu]' in a clone of Splitserve"
    return _triton_missing(target)


def _load(module: str, name: str) -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module(f"splitserve.kernels.{module}"), name)


def _triton(module: str, name: str) -> Candidate:
    return Candidate("triton", _triton_missing, _load(module, name))


_CANDIDATES: Mapping[str, tuple[Candidate, ...]] = {
    "begin_step": (
        _triton("triton.operations", "begin_step"),
        Candidate("reference", _always, lambda: reference.begin_step),
    ),
    "rms_norm": (_triton("triton.operations", "rms_norm"), Candidate("reference", _always, lambda: reference.rms_norm)),
    "pack_norm": (_triton("triton.norms", "TritonNorm"), Candidate("reference", _always, lambda: norms.PlainNorm)),
    "prepare_qkv": (
        _triton("triton.attention.qkv", "prepare_qkv"),
        Candidate("reference", _always, lambda: reference.prepare_qkv),
    ),
    "silu_mul": (_triton("triton.operations", "silu_mul"), Candidate("reference", _always, lambda: reference.silu_mul)),
    "gelu_mul": (_triton("triton.operations", "gelu_mul"), Candidate("reference", _always, lambda: reference.gelu_mul)),
    "sample": (_triton("triton.sampling", "sample"), Candidate("reference", _always, lambda: sampling.sample)),
    "mask_logits": (
        _triton("triton.sampling", "mask_logits"),
        Candidate("reference", _always, lambda: sampling.mask_logits),
    ),
    "penalise_logits": (
        _triton("triton.sampling", "penalise_logits"),
        Candidate("reference", _always, lambda: sampling.penalise_logits),
    ),
    "score_tokens": (
        _triton("triton.sampling", "score_tokens"),
        Candidate("reference", _always, lambda: sampling.score_tokens),
    ),
    "pack_linear": (
        _triton("triton.linear", "TritonLinear"),
        Candidate("onednn", _onednn_missing, lambda: linear.OneDnnLinear),
        Candidate("reference", _always, lambda: linear.PlainLinear),
    ),
    "route": (
        _triton("experts.triton.routing", "route"),
        Candidate("reference", _always, lambda: experts.route),
    ),
    "pack_router": (
        _triton("experts.triton.router", "TritonRouter"),
        Candidate("reference", _always, lambda: PlainRouter),
    ),
    "pack_experts": (
        _triton("experts.triton.experts", "TritonExperts"),
        Candidate("reference", _always, lambda: experts.LoopedExperts),
    ),
    "make_attention": (
        Candidate("hybrid", _flashinfer_missing, _load("flashinfer.hybrid", "HybridPagedAttention")),
        Candidate("flashinfer", _flashinfer_missing, _load("flashinfer.attention", "FlashInferPagedAttention")),
        _triton("triton.attention.paged", "TritonPagedAttention"),
        Candidate("reference", _always, lambda: attention.ReferencePagedAttention),
    ),
    "prepare_latent": (
        _triton("latent.triton", "prepare_latent"),
        Candidate("reference", _always, lambda: latent.prepare_latent),
    ),
    "make_latent_attention": (
        Candidate("hybrid", _flashinfer_missing, _load("latent.hybrid", "make_attention")),
        Candidate("flashinfer", _flashinfer_missing, _load("latent.flashinfer", "make_attention")),
        _triton("latent.triton", "TritonLatentAttention"),
        Candidate("reference", _always, lambda: latent.ReferenceLatentAttention),
    ),
    "gather_kv": (_triton("triton.gather", "gather_kv"), Candidate("reference", _always, lambda: kv_copy.gather_kv)),
    "scatter_kv": (_triton("triton.gather", "scatter_kv"), Candidate("reference", _always, lambda: kv_copy.scatter_kv)),
}

OPERATIONS = tuple(_CANDIDATES)


def select_kernels(
    device: torch.device,
    dtype: torch.dtype,
    overrides: Mapping[str, str] | None = None,
    head_dim: int | None = None,
    has_sinks: bool = False,
) -> Kernels:
    """Return the best backend of each operation for ``device``, ``dtype`` and ``head_dim`` (None: any); ``has_sinks``:
    that of attention gets some.

    ``overrides`` maps an operation of :data:`OPERATIONS` to the backend that must run it. Raises ValueError with the
    problem of an override: an unknown name, or the reason why that backend can't run here.
    """
    overrides = overrides or {}
    target = Target(device, dtype, head_dim, has_sinks)
    for operation in overrides:
        if operation not in _CANDIDATES:
            raise ValueError(f"unknown operation {operation!r}; there are {', '.join(OPERATIONS)}")
    chosen = {operation: _choose(operation, target, overrides.get(operation)) for operation in OPERATIONS}
    loaded = {operation: candidate.load() for operation, candidate in chosen.items()}
    around = {operation: loaded[operation] for operation in ("rms_norm", "silu_mul")}
    loaded["pack_linear"] = functools.partial(loaded["pack_linear"], **around)
    choice = {operation: loaded[operation] for operation in ("pack_linear", "rms_norm", "route")}
    loaded["pack_router"] = functools.partial(loaded["pack_router"], **choice)
    return Kernels(**loaded, backends={operation: candidate.backend for operation, candidate in chosen.items()})


def backends(operation: str, target: Target) -> dict[str, str | None]:
    """Return all backends of an operation, best first, each with the reason why it can't run on ``target``, or None if
    it can."""
    return {candidate.backend: candidate.why_not(target) for candidate in _CANDIDATES[operation]}


def _choose(operation: str, target: Target, wanted: str | None) -> Candidate:
    candidates = _CANDIDATES[operation]
    if wanted is None:
        return next(candidate for candidate in candidates if candidate.why_not(target) is None)
    for candidate in candidates:
        if candidate.backend == wanted:
            if reason := candidate.why_not(target):
                raise ValueError(f"backend {wanted!r} can't run {operation}: {reason}")
            return candidate
    names = ", ".join(candidate.backend for candidate in candidates)
    raise ValueError(f"{operation} has no backend {wanted!r}; there are {names}")
