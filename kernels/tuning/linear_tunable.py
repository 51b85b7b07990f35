"""Triton's products of few rows as tunables of ``splitserve tune`` (:mod:`splitserve.kernels.tuning.tunables`)."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from splitserve.kernels.reference import operations as reference
from splitserve.kernels.reference.linear import PlainLinear
from splitserve.kernels.triton import operations as triton_ops
from splitserve.kernels.triton.linear import MAX_ROWS, TritonLinear
from splitserve.kernels.tuning.linear_launch import CUBLAS, LinearLaunch, Variant, default_params, multiprocessors
from splitserve.kernels.tuning.parameters import Params, shape_key
from splitserve.kernels.tuning.tunables import DecoderSizes, TuneTarget, num_copies

_EPS = 1e-5
_MAX_SHARED_BYTES = 225_000  # per program, on the GPUs with most shared memory
_MIN_SHARED_BYTES = 24_000  # fewer bytes can't keep memory busy
_MAX_SPLIT_K = 8  # one program sums all parts of a tile
_ONE_ROW = [
    LinearLaunch(block_m=1, block_n=block_n, block_k=block_k, num_warps=num_warps)
    for block_n, block_k, num_warps in [(2, 4096, 4), (1, 4096, 4), (8, 512, 2), (4, 1024, 4), (2, 1024, 4)]
]
_FEW_ROWS = [
    LinearLaunch(16, 32, 256, 1, 4, 6, 512),
    LinearLaunch(16, 64, 256, 1, 4, 3, 128, tma=True),
    LinearLaunch(16, 64, 256, 2, 4, 4, 512),
    LinearLaunch(16, 32, 512, 1, 4, 3, 512),
    # Narrow tiles spread evenly over the multiprocessors where there are few wide ones for each.
    LinearLaunch(16, 16, 256, 1, 4, 4, 512),
    LinearLaunch(16, 16, 512, 1, 4, 4, 512),
]
_SOME_ROWS = [
    LinearLaunch(64, 32, 128, 1, 4, 6, 512),
    LinearLaunch(64, 64, 128, 1, 4, 6, 512),
    LinearLaunch(64, 128, 64, 1, 4, 4, 128, tma=True),
    LinearLaunch(64, 256, 64, 1, 4, 4, 0, tma=True),
    # Wide tiles in parts: each of many narrow tiles reads all inputs, which may be more bytes than all weights.
    LinearLaunch(64, 64, 128, 2, 4, 4, 512),
    LinearLaunch(64, 64, 128, 2, 4, 5, 128, tma=True, joined=False),
    LinearLaunch(64, 128, 64, 4, 4, 5, 128, tma=True),
]
_MANY_ROWS = [LinearLaunch(128, 128, 64, 1, 8, 4, 0, tma=True), LinearLaunch(128, 256, 64, 1, 8, 3, 0, tma=True)]


def make_tunable(operation: str) -> "LinearTunable":
    return LinearTunable(cast("Variant", operation.removeprefix("linear_")))


class LinearTunable:
    """Implements :class:`splitserve.kernels.tuning.tunables.Tunable`."""

    def __init__(self, variant: Variant) -> None:
        self._variant: Variant = variant

    def shape_keys(self, target: TuneTarget) -> list[str]:
        return list(dict.fromkeys(shape_key(target.dtype, n=n, k=k) for n, k in self._shapes(target)))

    def _shapes(self, target: TuneTarget) -> list[tuple[int, int]]:
        """Return outputs and inputs of a decoder's products of this variant: of its head, of attention unless that is
        latent, of the MLP unless there are experts. Layers in FP8 have products of their own, without parameters."""
        model = target.model
        hidden, heads = model.hidden_size, model.num_heads * model.head_dim
        qkv = heads + 2 * model.num_kv_heads * model.head_dim
        norm = [(model.vocab_size, hidden)]
        gated: list[tuple[int, int]] = []
        to_hidden: list[tuple[int, int]] = []
        if model.fp8 is None and model.latent is None:
            norm.insert(0, (qkv, hidden))
            to_hidden.append((hidden, heads))
        if model.fp8 is None and model.experts is None:
            inner = (1 + model.mlp_gate) * model.intermediate_size
            (gated if self._fuses_gate(model) else norm).append((inner, hidden))
            to_hidden.append((hidden, model.intermediate_size))
        shapes: dict[Variant, list[tuple[int, int]]] = {
            "plain": to_hidden if target.is_shard else [],
            "norm": norm,
            "gated": gated,
            "add": [] if target.is_shard else to_hidden,
        }
        return shapes[self._variant]

    @staticmethod
    def _fuses_gate(model: DecoderSizes) -> bool:
        """Return whether the MLP's first product and its activation are one kernel."""
        return model.mlp_gate and model.activation == "silu" and not model.mlp_bias

    def case(self, target: TuneTarget, key: str, rows: int) -> "LinearCase | None":
        shape = {shape_key(target.dtype, n=n, k=k): (n, k) for n, k in self._shapes(target)}[key]
        return LinearCase(self._variant, target, *shape, rows) if rows <= MAX_ROWS else None


class LinearCase:
    """Implements :class:`splitserve.kernels.tuning.tunables.TunableCase`."""

    tolerance = None

    def __init__(self, variant: Variant, target: TuneTarget, out_features: int, in_features: int, rows: int) -> None:
        self._variant, self._rows = variant, rows
        self._is_shard = target.is_shard  # then the sum over ranks has normalised the rows already
        self._has_reader = variant != "gated" and out_features != target.model.vocab_size
        self._width = 1 + (variant == "gated")
        num_bytes = out_features * in_features * target.dtype.itemsize
        count = 1 if target.is_for_compiling else num_copies(num_bytes, target.device)
        self._weights = [_random(target, out_features, in_features, std=in_features**-0.5) for _ in range(count)]
        self._x = _random(target, rows, in_features)
        self._norm = _random(target, in_features)
        self._residual = _random(target, rows, out_features)
        self._next_norm = _random(target, out_features)

    @property
    def num_bytes(self) -> int:
        outputs = self._residual.nbytes // self._width * (1 + self._has_reader)
        return int(self._weights[0].nbytes + self._x.nbytes + outputs)

    def candidates(self, best: Params) -> list[Params]:
        """Return starting points for this number of rows, then the neighbours of the best.

        cuBLAS has no neighbours, so it is added in the second round: if it were the best in the first, the search would
        end.
        """
        if not best:
            starts = dict.fromkeys(launch for launch in self._starts() if launch != CUBLAS and self._fits(launch))
            return [asdict(launch) for launch in starts] or [asdict(CUBLAS)]
        launch = LinearLaunch(**best)  # type: ignore[arg-type]
        return [asdict(CUBLAS), *(asdict(found) for found in self._neighbours(launch) if self._fits(found))]

    def _starts(self) -> Sequence[LinearLaunch]:
        if self._rows == 1:
            return [self._default(), *_ONE_ROW, *_FEW_ROWS]
        if self._rows <= 16:
            return [self._default(), *_FEW_ROWS]
        if self._rows <= 64:
            block_m = 32 if self._rows <= 32 else 64
            return [self._default(), *(replace(launch, block_m=block_m) for launch in _SOME_ROWS)]
        return [*(replace(launch, block_m=128) for launch in _SOME_ROWS), *_MANY_ROWS]

    def _default(self) -> LinearLaunch:
        out_features, in_features = self._weights[0].shape
        num_processors = multiprocessors()
        return default_params(
            self._variant, self._x.dtype, out_features, in_features, self._rows, num_processors=num_processors
        )

    def _neighbours(self, launch: LinearLaunch) -> list[LinearLaunch]:
        if launch == CUBLAS:
            return []
        names = ["block_n", "block_k", "num_warps"]
        if launch.block_m > 1:
            names += ["num_stages", "split_k"]
        found = []
        for name in names:
            value = getattr(launch, name)
            steps = (value - 1, value + 1) if name in ("num_stages", "split_k") else (value // 2, value * 2)
            found += [replace(launch, **{name: step}) for step in steps if step >= 1]
        if launch.block_m > 1:
            found += [
                replace(launch, block_n=launch.block_n * 2, split_k=launch.split_k * 2),
                replace(launch, block_n=launch.block_n // 2, split_k=max(1, launch.split_k // 2)),
            ]
            found += [replace(launch, prefetch=count) for count in (0, 128, 512, 2048)]
            found += [replace(launch, tma=tma) for tma in (False, True)]
            found += [replace(launch, joined=joined) for joined in (False, True)]
        return [replace(each, joined=True) if each.split_k == 1 else each for each in found]

    def _fits(self, launch: LinearLaunch) -> bool:
        out_features, in_features = self._weights[0].shape
        width = launch.block_n * self._width
        if launch.block_n > out_features or launch.block_k > in_features or launch.num_warps > 8:
            return False
        if launch.block_m == 1:
            return 8 <= width * launch.block_k // (32 * launch.num_warps) <= 128  # elements per thread
        shared = launch.num_stages * (width + launch.block_m) * launch.block_k * self._x.element_size()
        has_room = _MIN_SHARED_BYTES <= shared <= _MAX_SHARED_BYTES and launch.block_m * width <= 128 * 256
        if launch.split_k > 1 and (launch.split_k > _MAX_SPLIT_K or self._rows > launch.block_m):
            return False
        if not launch.joined and not (launch.leaves_parts and self._has_reader):
            return False
        return has_room and launch.num_stages >= 2 and launch.num_warps >= 4 and launch.block_n >= 16

    def calls(self) -> list[Callable[[], Tensor]]:
        return [self._call(TritonLinear, weight) for weight in self._weights]

    def _call(self, kind: type[PlainLinear], weight: Tensor) -> Callable[[], Tensor]:
        linear = kind(weight, rms_norm=triton_ops.rms_norm, silu_mul=triton_ops.silu_mul)
        normed = triton_ops.rms_norm(self._x, self._norm, _EPS) if self._is_shard else None
        if self._variant == "gated":
            return lambda: linear.gated_after_norm(self._x, self._norm, _EPS, normed)
        if not self._has_reader:
            return lambda: linear.after_norm(self._x, self._norm, _EPS, normed)
        return partial(self._product_and_reader, linear, normed, self._residual.clone())

    def _product_and_reader(self, linear: PlainLinear, normed: Tensor | None, residual: Tensor) -> Tensor:
        """Run the product and the kernel that follows it in a step, or one that reads as much: it may sum the product's
        parts."""
        if self._variant == "add":
            if linear.add_to(residual, self._x, self._next_norm, _EPS) is None:
                triton_ops.rms_norm(residual, self._next_norm, _EPS)
        elif self._variant == "norm":
            parts = linear.parts_after_norm(self._x, self._norm, _EPS, normed)
            triton_ops.add_parts(residual, parts, self._next_norm, _EPS)
        else:
            triton_ops.add_parts(residual, linear.parts(self._x), self._next_norm, _EPS)
        return residual

    def expected(self) -> Tensor:
        weight = self._weights[0].float()
        x = self._x if self._variant in ("add", "plain") else reference.rms_norm(self._x, self._norm, _EPS)
        product = x.float() @ weight.T
        if self._variant == "gated":
            product = reference.silu_mul(product)
        if self._has_reader:
            product += self._residual.float()
        result: Tensor = product.to(self._x.dtype)
        return result


def _random(target: TuneTarget, *sizes: int, std: float = 1.0) -> Tensor:
    return torch.empty(sizes, dtype=target.dtype, device=target.device).normal_(0.0, std)
