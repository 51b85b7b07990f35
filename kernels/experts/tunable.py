"""A layer's experts as a tunable of ``splitserve tune`` (:mod:`splitserve.kernels.tuning.tunables`)."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch
from torch import Tensor

from splitserve.kernels.experts.launch import (
    MAX_STREAMED,
    ExpertLaunch,
    SharedMemory,
    expert_launch,
    experts_key,
    fitted,
)
from splitserve.kernels.experts.mxfp4 import dequantised
from splitserve.kernels.experts.reference import LoopedExperts, route
from splitserve.kernels.experts.shared_expert import SharedExpert
from splitserve.kernels.experts.spec import MXFP4_GROUP, GatedActivation
from splitserve.kernels.experts.triton.experts import TritonExperts
from splitserve.kernels.experts.triton.streamed import ROWS_OF_WARP
from splitserve.kernels.experts.weights import ExpertWeights
from splitserve.kernels.fp8.linear import fp8_unavailable_reason
from splitserve.kernels.fp8.triton_quantise import FP8
from splitserve.kernels.fp8.weight import GROUP as FP8_GROUP
from splitserve.kernels.reference.linear import PlainLinear
from splitserve.kernels.triton import operations as triton_ops
from splitserve.kernels.triton.linear import TritonLinear
from splitserve.kernels.tuning.parameters import Params
from splitserve.kernels.tuning.tunables import ExpertSizes, TuneTarget, num_copies

MAX_ROWS = 16384
_MAX_SHARED_BYTES = 225_000
_FP8_TOLERANCE = 0.15  # roundings of FP8 are up to a sixteenth, and follow each other
_MAX_SPLIT_K = 4
_DOUBLED = ("block_m", "block_n", "block_k", "down_block_n", "down_block_k", "num_warps")
_COUNTED = ("num_stages",)
_DOUBLED_OF_PACKED = ("down_num_warps",)
_COUNTED_OF_PACKED = ("down_num_stages", "down_split_k")
_SCALE = 120  # of groups in MXFP4: 2 ** (120 - 127)
_STARTS = (
    ExpertLaunch(1, 4, 1024, 2, 1024),
    ExpertLaunch(16, 64, 128, 128, 128, num_stages=4),
    ExpertLaunch(32, 64, 128, 128, 128),
    ExpertLaunch(32, 128, 64, 256, 64, num_warps=8, num_stages=4),
    ExpertLaunch(64, 64, 128, 128, 128, num_stages=4),
    ExpertLaunch(64, 128, 64, 256, 64, num_warps=8, num_stages=4),
    ExpertLaunch(128, 128, 64, 256, 64, num_warps=8, num_stages=4),
)

_PACKED_STARTS = tuple(
    replace(launch, down_num_warps=launch.num_warps, down_num_stages=launch.num_stages)
    for launch in (
        ExpertLaunch(1, 8, 128, 16, 128, 1, down_split_k=2),
        ExpertLaunch(8, 32, 128, 64, 128),
        ExpertLaunch(16, 64, 128, 128, 128),
        ExpertLaunch(32, 64, 128, 128, 128),
        ExpertLaunch(64, 128, 128, 256, 128, num_warps=8),
        ExpertLaunch(128, 128, 128, 256, 128, num_warps=8, num_stages=2),
    )
)


def make_tunable(_operation: str) -> "ExpertsTunable":
    return ExpertsTunable()


class ExpertsTunable:
    """Implements :class:`splitserve.kernels.tuning.tunables.Tunable`. A model without experts has no shapes."""

    def shape_keys(self, target: TuneTarget) -> list[str]:
        sizes = target.model.experts
        return [] if sizes is None else [_key(target, sizes)]

    def case(self, target: TuneTarget, key: str, rows: int) -> "ExpertsCase | None":
        sizes = target.model.experts
        assert sizes is not None and key == _key(target, sizes)
        return ExpertsCase(target, sizes, rows) if rows <= MAX_ROWS else None


def _key(target: TuneTarget, sizes: ExpertSizes) -> str:
    return experts_key(
        torch.uint8 if sizes.is_mxfp4 else _stored_dtype(target, target.model.hidden_size),
        num_experts=sizes.router.num_experts,
        top_k=sizes.router.top_k,
        hidden_size=target.model.hidden_size,
        inner_size=sizes.inner_size,
    )


def _stored_dtype(target: TuneTarget, columns: int) -> torch.dtype:
    """Return the dtype in which a layer keeps matrices of so many columns that aren't in MXFP4: FP8 in whole groups, as
    :mod:`splitserve.models.weights.loader` does."""
    fp8 = target.model.fp8
    in_groups = fp8 is not None and fp8.block is not None and fp8.block[1] == FP8_GROUP and columns % FP8_GROUP == 0
    return FP8 if in_groups and fp8_unavailable_reason(target.device, target.dtype) is None else target.dtype


class ExpertsCase:
    """Implements :class:`splitserve.kernels.tuning.tunables.TunableCase`. Tokens choose experts at random."""

    def __init__(self, target: TuneTarget, sizes: ExpertSizes, rows: int) -> None:
        self._key, self._rows, self._router = _key(target, sizes), rows, sizes.router
        count, hidden, inner = sizes.router.num_experts, target.model.hidden_size, sizes.inner_size
        self._is_mxfp4, self._is_shard = sizes.is_mxfp4, target.is_shard
        self._is_fp8 = not sizes.is_mxfp4 and _stored_dtype(target, hidden) == FP8
        num_bytes = 3 * count * hidden * inner * (1 if self._is_fp8 else target.dtype.itemsize)
        if sizes.is_mxfp4:
            num_bytes = 3 * count * hidden * inner * 17 // 32
        self._x = _random(target, rows, hidden)
        self._experts, self._factors = route(_random(target, rows, count), None, self._router)
        count = 1 if target.is_for_compiling else num_copies(num_bytes, target.device)
        self._weights = [_random_weights(target, sizes, hidden) for _ in range(count)]
        self._shared = [_random_shared(target, sizes, hidden) for _ in range(count)]

    @property
    def tolerance(self) -> float | None:
        """With weights in FP8, tiles of pairs quantise their inputs, too, which the reference doesn't."""
        return _FP8_TOLERANCE if self._is_fp8 else None

    @property
    def num_bytes(self) -> int:
        """Weights of the chosen experts and of the shared one, and the tokens."""
        one, shared = self._weights[0], self._shared[0]
        hit = torch.unique(self._experts).numel()
        weights = (one.gate_up, one.down, one.gate_up_scales, one.down_scales)
        num_bytes = sum(tensor.nbytes for tensor in weights if tensor is not None)
        shared_bytes = sum(matrix.nbytes for matrix in shared or ())
        return int(num_bytes * hit / one.num_experts + shared_bytes + 3 * self._x.nbytes)

    def candidates(self, best: Params) -> list[Params]:
        """Return starting points, then the neighbours of the best."""
        if not best:
            default = expert_launch(
                self._key, num_experts=self._router.num_experts, top_k=self._router.top_k, num_tokens=self._rows,
                dtype=self._weights[0].gate_up.dtype, down_dtype=self._weights[0].down.dtype, device=self._x.device,
            )  # fmt: skip
            starts = dict.fromkeys((default, *(_PACKED_STARTS if self._is_mxfp4 else _STARTS)))
            return [asdict(launch) for launch in starts if self._fits(launch)]
        return [asdict(launch) for launch in self._neighbours(ExpertLaunch(**best)) if self._fits(launch)]  # type: ignore[arg-type]

    def _neighbours(self, launch: ExpertLaunch) -> list[ExpertLaunch]:
        found = []
        for name in _DOUBLED + (_DOUBLED_OF_PACKED if self._is_mxfp4 else ()):
            value = getattr(launch, name)
            if self._is_fp8 and launch.block_m > 1 and name.endswith("block_k"):
                continue  # tiles take a group at a time
            if self._is_streamed(launch) and name.endswith("block_k"):
                continue  # they take a block at a time
            if name != "block_m" or value > 1:
                found += [replace(launch, **{name: step}) for step in (value // 2, value * 2)]
        counted = _COUNTED + (_COUNTED_OF_PACKED if self._is_mxfp4 else ())
        return found + [replace(launch, **{name: getattr(launch, name) + step}) for name in counted for step in (-1, 1)]

    def _fits(self, launch: ExpertLaunch) -> bool:
        if self._is_mxfp4:
            return self._fits_packed(launch)
        if not (1 <= launch.num_warps <= 8 and 2 <= launch.num_stages <= 6):
            return False
        if launch.block_m == 1:
            per_thread = max(2 * launch.block_n * launch.block_k, launch.down_block_n * launch.down_block_k)
            return self._rows <= 64 and min(launch.block_n, launch.down_block_n) >= 1 and per_thread <= 1 << 14
        blocks = (launch.block_n, launch.block_k, launch.down_block_n, launch.down_block_k)
        if not (16 <= launch.block_m <= 128 and all(16 <= block <= 256 for block in blocks)):
            return False
        one = self._weights[0]
        return fitted(launch, one.gate_up.dtype, one.down.dtype, SharedMemory(_MAX_SHARED_BYTES)) == launch

    def _is_streamed(self, launch: ExpertLaunch) -> bool:
        return self._is_mxfp4 and launch.block_m <= MAX_STREAMED and self._x.dtype == torch.bfloat16

    def _fits_packed(self, launch: ExpertLaunch) -> bool:
        """A quarter of a tile's columns is a matrix instruction's; words and vectors wait in shared memory, or, of few
        pairs, in registers."""
        if (launch.block_m == 1 and self._rows > 64) or not (launch.block_m == 1 or 8 <= launch.block_m <= 128):
            return False
        if not 1 <= launch.down_split_k <= _MAX_SPLIT_K:
            return False
        down_warps, down_stages = launch.down_num_warps or launch.num_warps, launch.down_num_stages or launch.num_stages
        tiles = (
            (2 * launch.block_n, launch.block_k, launch.num_warps, launch.num_stages),
            (launch.down_block_n, launch.down_block_k, down_warps, down_stages),
        )
        if self._is_streamed(launch):
            return all(
                1 <= warps <= 8 and 1 <= stages <= 6 and 1 <= rows // (ROWS_OF_WARP * warps) <= 4
                for rows, _, warps, stages in tiles
            )
        held = max(rows * (columns // 2 + 4 * launch.block_m) for rows, columns, _, _ in tiles)
        return held <= 1 << 16 and all(
            64 <= rows <= 256
            and 128 <= columns <= 512
            and 4 <= warps <= 8
            and 2 <= stages <= 6
            and stages * columns * (rows // 2 + launch.block_m * self._x.element_size()) <= _MAX_SHARED_BYTES
            for rows, columns, warps, stages in tiles
        )

    def calls(self) -> Sequence[Callable[[], Tensor]]:
        pairs = zip(self._weights, self._shared, strict=True)
        return [
            partial(self._call, TritonExperts(weights), _shared_expert(TritonLinear, shared))
            for weights, shared in pairs
        ]

    def _call(self, experts: TritonExperts, shared: SharedExpert | None) -> Tensor:
        """Return the product as a layer takes it: added to the residual, or in the model's dtype."""
        if self._is_shard:
            return experts(self._x, self._experts, self._factors, shared).to(self._x.dtype)
        residual = torch.zeros_like(self._x)
        experts.add_to(residual, self._x, self._experts, self._factors, shared)
        return residual

    def expected(self) -> Tensor:
        own, dtype = self._weights[0], self._x.dtype
        own = replace(
            own,
            gate_up=_wide(own.gate_up, own.gate_up_scales, dtype),
            down=_wide(own.down, own.down_scales, dtype),
            gate_up_scales=None,
            down_scales=None,
        )
        shared = _shared_expert(PlainLinear, self._shared[0])
        return LoopedExperts(own)(self._x, self._experts, self._factors, shared).to(dtype)


def _wide(weight: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return experts' matrices in another dtype."""
    if scales is None:
        return weight
    if weight.dtype == torch.uint8:
        return dequantised(weight, scales, dtype)
    return (weight.float() * scales.repeat_interleave(FP8_GROUP, -1)).to(dtype)


def _random_weights(target: TuneTarget, sizes: ExpertSizes, hidden: int) -> ExpertWeights:
    count, inner = sizes.router.num_experts, sizes.inner_size
    if not sizes.is_mxfp4:
        gate_up, gate_up_scales = _random_matrices(target, count, 2 * inner, hidden)
        down, down_scales = _random_matrices(target, count, hidden, inner)
        return ExpertWeights(gate_up, down, GatedActivation(), gate_up_scales=gate_up_scales, down_scales=down_scales)
    gate_up, down = (
        _random_bytes(target, count, 2 * inner, hidden // 2),
        _random_bytes(target, count, hidden, inner // 2),
    )
    return ExpertWeights(
        gate_up,
        down,
        GatedActivation(interleaved=True),
        gate_up_scales=torch.full(
            (count, 2 * inner, hidden // MXFP4_GROUP), _SCALE, dtype=torch.uint8, device=target.device
        ),
        down_scales=torch.full((count, hidden, inner // MXFP4_GROUP), _SCALE, dtype=torch.uint8, device=target.device),
    )


def _random_shared(target: TuneTarget, sizes: ExpertSizes, hidden: int) -> tuple[Tensor, Tensor] | None:
    """Return the shared expert's gate and up, and down, in the target's dtype; None where the kernels never compute it:
    in FP8, or with a gate of its own."""
    if not sizes.shared_size or sizes.shared_gate or _stored_dtype(target, hidden) == FP8:
        return None
    gate_up = _random(target, 2 * sizes.shared_size, hidden, std=hidden**-0.5)
    return gate_up, _random(target, hidden, sizes.shared_size, std=sizes.shared_size**-0.5)


def _shared_expert(kind: type[PlainLinear], matrices: tuple[Tensor, Tensor] | None) -> SharedExpert | None:
    if matrices is None:
        return None
    gate_up, down = (kind(matrix, rms_norm=triton_ops.rms_norm, silu_mul=triton_ops.silu_mul) for matrix in matrices)
    return SharedExpert(gate_up, down)


def _random_matrices(target: TuneTarget, count: int, rows: int, columns: int) -> tuple[Tensor, Tensor | None]:
    """Return experts' matrices as a layer keeps them, and their scales in FP8."""
    if _stored_dtype(target, columns) != FP8:
        return _random(target, count, rows, columns, std=columns**-0.5), None
    scales = torch.full((count, rows, columns // FP8_GROUP), columns**-0.5, device=target.device)
    return _random(target, count, rows, columns).to(FP8), scales


def _random_bytes(target: TuneTarget, *sizes: int) -> Tensor:
    return torch.randint(256, sizes, dtype=torch.uint8, device=target.device)


def _random(target: TuneTarget, *sizes: int, std: float = 1.0) -> Tensor:
    return torch.empty(sizes, dtype=target.dtype, device=target.device).normal_(0.0, std)
