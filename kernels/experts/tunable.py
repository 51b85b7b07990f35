"""A layer's experts as a tunable of ``splitserve tune`` (:mod:`splitserve.kernels.tuning.tunables`)."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch
from torch import Tensor

from splitserve.kernels.experts.launch import ExpertLaunch, expert_launch, experts_key
from splitserve.kernels.experts.mxfp4 import dequantised
from splitserve.kernels.experts.reference import LoopedExperts, route
from splitserve.kernels.experts.spec import MXFP4_GROUP, GatedActivation
from splitserve.kernels.experts.triton.experts import TritonExperts
from splitserve.kernels.experts.weights import ExpertWeights
from splitserve.kernels.tuning.parameters import Params
from splitserve.kernels.tuning.tunables import ExpertSizes, TuneTarget, num_copies

MAX_ROWS = 16384
_MAX_SHARED_BYTES = 225_000
_SCALE = 120  # of groups in MXFP4: 2 ** (120 - 127)
_STARTS = (
    ExpertLaunch(1, 4, 1024, 8, 1024),
    ExpertLaunch(16, 32, 128, 64, 128),
    ExpertLaunch(32, 64, 64, 128, 64),
    ExpertLaunch(64, 64, 64, 128, 64),
    ExpertLaunch(128, 64, 64, 128, 64, num_warps=8),
    ExpertLaunch(128, 128, 64, 256, 64, num_warps=8),
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
        torch.uint8 if sizes.is_mxfp4 else target.dtype,
        num_experts=sizes.router.num_experts,
        top_k=sizes.router.top_k,
        hidden_size=target.model.hidden_size,
        inner_size=sizes.inner_size,
    )


class ExpertsCase:
    """Implements :class:`splitserve.kernels.tuning.tunables.TunableCase`. Tokens choose experts at random."""

    def __init__(self, target: TuneTarget, sizes: ExpertSizes, rows: int) -> None:
        self._key, self._rows, self._router = _key(target, sizes), rows, sizes.router
        count, hidden, inner = sizes.router.num_experts, target.model.hidden_size, sizes.inner_size
        self._is_mxfp4 = sizes.is_mxfp4
        num_bytes = 3 * count * hidden * inner * target.dtype.itemsize
        if sizes.is_mxfp4:
            num_bytes = 3 * count * hidden * inner * 17 // 32
        self._x = _random(target, rows, hidden)
        self._experts, self._factors = route(_random(target, rows, count), None, self._router)
        self._weights = [_random_weights(target, sizes, hidden) for _ in range(num_copies(num_bytes, target.device))]

    @property
    def num_bytes(self) -> int:
        """Weights of the chosen experts, and the tokens."""
        one = self._weights[0]
        hit = torch.unique(self._experts).numel()
        weights = (one.gate_up, one.down, one.gate_up_scales, one.down_scales)
        num_bytes = sum(tensor.nbytes for tensor in weights if tensor is not None)
        return int(num_bytes * hit / one.num_experts + 3 * self._x.nbytes)

    def candidates(self, best: Params) -> list[Params]:
        """Return starting points, then the neighbours of the best."""
        if not best:
            default = expert_launch(
                self._key, num_experts=self._router.num_experts, top_k=self._router.top_k, num_tokens=self._rows
            )
            return [asdict(launch) for launch in dict.fromkeys((default, *_STARTS)) if self._fits(launch)]
        return [asdict(launch) for launch in self._neighbours(ExpertLaunch(**best)) if self._fits(launch)]  # type: ignore[arg-type]

    def _neighbours(self, launch: ExpertLaunch) -> list[ExpertLaunch]:
        found = []
        for name in ("block_m", "block_n", "block_k", "down_block_n", "down_block_k", "num_warps"):
            value = getattr(launch, name)
            if name != "block_m" or value > 1:
                found += [replace(launch, **{name: step}) for step in (value // 2, value * 2)]
        return found + [replace(launch, num_stages=launch.num_stages + step) for step in (-1, 1)]

    def _fits(self, launch: ExpertLaunch) -> bool:
        if not (1 <= launch.num_warps <= 8 and 2 <= launch.num_stages <= 6):
            return False
        if launch.block_m == 1:
            per_thread = max(2 * launch.block_n * launch.block_k, launch.down_block_n * launch.down_block_k)
            return self._rows <= 64 and min(launch.block_n, launch.down_block_n) >= 1 and per_thread <= 1 << 14
        blocks = (launch.block_n, launch.block_k, launch.down_block_n, launch.down_block_k)
        if not (16 <= launch.block_m <= 128 and all(16 <= block <= 256 for block in blocks)):
            return False
        if self._is_mxfp4 and min(launch.block_k, launch.down_block_k) < MXFP4_GROUP:
            return False
        columns = max(
            (launch.block_m + launch.block_n) * launch.block_k,
            (launch.block_m + launch.down_block_n) * launch.down_block_k,
        )
        return launch.num_stages * columns * self._x.element_size() <= _MAX_SHARED_BYTES

    def calls(self) -> Sequence[Callable[[], Tensor]]:
        return [partial(TritonExperts(weights), self._x, self._experts, self._factors) for weights in self._weights]

    def expected(self) -> Tensor:
        own = self._weights[0]
        if own.gate_up_scales is not None and own.down_scales is not None:
            own = replace(
                own,
                gate_up=dequantised(own.gate_up, own.gate_up_scales, self._x.dtype),
                down=dequantised(own.down, own.down_scales, self._x.dtype),
                gate_up_scales=None,
                down_scales=None,
            )
        return LoopedExperts(own)(self._x, self._experts, self._factors)


def _random_weights(target: TuneTarget, sizes: ExpertSizes, hidden: int) -> ExpertWeights:
    count, inner = sizes.router.num_experts, sizes.inner_size
    if not sizes.is_mxfp4:
        gate_up = _random(target, count, 2 * inner, hidden, std=hidden**-0.5)
        return ExpertWeights(gate_up, _random(target, count, hidden, inner, std=inner**-0.5), GatedActivation())
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


def _random_bytes(target: TuneTarget, *sizes: int) -> Tensor:
    return torch.randint(256, sizes, dtype=torch.uint8, device=target.device)


def _random(target: TuneTarget, *sizes: int, std: float = 1.0) -> Tensor:
    return torch.empty(sizes, dtype=target.dtype, device=target.device).normal_(0.0, std)
