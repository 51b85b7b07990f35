"""Mixtures of experts (arXiv:1701.06538, arXiv:2101.03961): each token is computed by a few of many MLPs."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from splitserve.kernels.experts.spec import MXFP4_GROUP as GROUP
from splitserve.models.config import ModelConfig
from splitserve.models.experts import ExpertsSpec
from splitserve.models.layers.layer import Layer, WeightSource
from splitserve.models.layers.projection import InputProjections
from splitserve.models.layers.residual import Normed, Product
from splitserve.models.layers.weight import OfExpert, Role, Stack, Units, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from splitserve.kernels.experts import weights as kernels
    from splitserve.kernels.experts.shared_expert import SharedExpert
    from splitserve.models.parallel.ranks import Collectives


class Router(Layer):
    """The choice of experts, whole on every rank: all ranks choose the same ones."""

    _router: "kernels.Router"

    def __init__(self, name: str, config: ModelConfig, spec: ExpertsSpec, *, correction: str) -> None:
        count = spec.router.num_experts
        self.spec = spec.router
        self._has_shared = bool(spec.shared_size) and not spec.shared_gate
        self._weight = Weight(f"{name}.weight", (count, config.hidden_size), Role.ROUTER)
        self._declared_bias = Weight(f"{name}.bias", (count,), Role.BIAS)
        self._declared_correction = Weight(correction, (count,), Role.CORRECTION_BIAS)

    def stacks(self) -> Iterator[Stack]:
        yield (self._weight,)
        if self.spec.logits_bias:
            yield (self._declared_bias,)
        if self.spec.correction_bias:
            yield (self._declared_correction,)

    def load(self, source: WeightSource) -> None:
        from splitserve.kernels.experts.weights import RouterWeights

        weight = source.vector((self._weight,))
        bias = source.vector((self._declared_bias,)) if self.spec.logits_bias else None
        correction = source.vector((self._declared_correction,)) if self.spec.correction_bias else None
        if self.spec.wide_logits:
            weight = weight.float()
        weights = RouterWeights(self.spec, weight, bias, correction, self._has_shared)
        self._router = source.kernels.pack_router(weights)

    def __call__(self, x: Normed) -> "tuple[Tensor, Tensor, Tensor]":
        """Return the normalised rows [T, hidden], each one's experts int32 [T, k] and their factors float32 [T, k]."""
        return self._router(x.hidden, x.weight, x.eps, x.normed)


class SharedExperts(Layer):
    """A gated MLP that every token has, beside its chosen experts. Ranks share the intermediate dimension."""

    expert: "SharedExpert"

    def __init__(self, name: str, config: ModelConfig, spec: ExpertsSpec, *, gate: str) -> None:
        size = spec.shared_size
        inner = Units(f"a shared expert's intermediate size of {size}", size)
        self._gate_up = InputProjections(
            config.hidden_size, ((f"{name}.gate_proj", size, inner), (f"{name}.up_proj", size, inner))
        )
        self._weight = Weight(f"{name}.down_proj.weight", (config.hidden_size, size), Role.PROJECTION, columns=inner)
        self._gate = Weight(f"{gate}.weight", (1, config.hidden_size), Role.ROUTER) if spec.shared_gate else None

    def stacks(self) -> Iterator[Stack]:
        yield from self._gate_up.stacks()
        yield (self._weight,)
        if self._gate is not None:
            yield (self._gate,)

    def load(self, source: WeightSource) -> None:
        from splitserve.kernels.experts.shared_expert import SharedExpert

        self._gate_up.load(source)
        down = source.linear((self._weight,))
        own_gate = None if self._gate is None else source.linear((self._gate,))
        self.expert = SharedExpert(self._gate_up.linear, down, own_gate)


class ExpertsMlp(Layer):
    """A router and its experts, with shared experts where the model has them.

    Ranks share each expert's intermediate dimension, or the experts (:class:`splitserve.models.weights.shard.Shard`).
    Every rank has all tokens; the ranks' sums are added as those of a dense MLP are.

    ``projections``: names of gate, up and down in each expert; gate and up may be one tensor, which is then named once.
    """

    experts: "kernels.Experts"

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        *,
        router: str = "gate",
        correction: str = "gate.e_score_correction_bias",
        experts: str = "experts",
        projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
        shared: str = "shared_experts",
        shared_gate: str = "shared_expert_gate",
    ) -> None:
        spec = config.experts
        assert spec is not None
        self.spec = spec
        self.router = Router(f"{name}.{router}", config, spec, correction=f"{name}.{correction}")
        self._declare(f"{name}.{experts}", config.hidden_size, spec, projections)
        self.shared = None
        if spec.shared_size:
            self.shared = SharedExperts(f"{name}.{shared}", config, spec, gate=f"{name}.{shared_gate}")

    def _declare(self, name: str, hidden_size: int, spec: ExpertsSpec, projections: tuple[str, ...]) -> None:
        *gate_up, down = projections
        size, rows = spec.inner_size, 2 * spec.inner_size // len(gate_up)
        inner = Units(f"an expert's intermediate size of {size}", size)
        if spec.is_mxfp4:
            groups = size // GROUP
            inner = Units(f"{groups} groups of {GROUP} in an expert's intermediate size of {size}", groups)
        experts = Units(f"{spec.router.num_experts} experts", spec.router.num_experts)
        owners = [OfExpert(index, experts) for index in range(experts.count)]

        def gate_ups(ending: str, role: Role, *columns: int) -> Stack:
            return tuple(
                Weight(
                    f"{name}.{own.index}.{each}.{ending}", (rows, *columns), role, rows=inner, expert=own,
                    is_transposed=spec.is_transposed,
                )
                for own in owners
                for each in gate_up
            )  # fmt: skip

        def downs(ending: str, role: Role, *columns: int) -> Stack:
            return tuple(
                Weight(
                    f"{name}.{own.index}.{down}.{ending}", (hidden_size, *columns), role,
                    columns=inner if columns else None, expert=own, is_transposed=spec.is_transposed,
                )
                for own in owners
            )  # fmt: skip

        self._scales: tuple[Stack, Stack] | None = None
        if spec.is_mxfp4:
            self._gate_up = gate_ups("blocks", Role.EXPERT_BLOCKS, hidden_size // 2)
            self._down = downs("blocks", Role.EXPERT_BLOCKS, size // 2)
            scales = gate_ups("scales", Role.EXPERT_SCALES, hidden_size // GROUP)
            self._scales = scales, downs("scales", Role.EXPERT_SCALES, size // GROUP)
        else:
            self._gate_up = gate_ups("weight", Role.EXPERT, hidden_size)
            self._down = downs("weight", Role.EXPERT, size)
        self._biases = (gate_ups("bias", Role.BIAS), downs("bias", Role.BIAS)) if spec.biases else None

    def stacks(self) -> Iterator[Stack]:
        yield from self.router.stacks()
        yield self._gate_up
        yield self._down
        yield from self._scales or ()
        yield from self._biases or ()
        if self.shared is not None:
            yield from self.shared.stacks()

    def load(self, source: WeightSource) -> None:
        self.router.load(source)
        self.experts = source.experts(self._gate_up, self._down, self.spec.activation, self._biases, self._scales)
        if self.shared is not None:
            self.shared.load(source)
        self._group = source.group

    def __call__(self, x: Normed) -> Product:
        normed, experts, factors = self.router(x)
        return Product(_SumOfRanks(self, experts, factors, self._group), normed)

    def add_to(self, residual: "Tensor", x: "Tensor", experts: "Tensor", factors: "Tensor") -> None:
        """Add the product of the normalised ``x`` to ``residual`` [T, hidden], of a model that one rank has."""
        self.experts.add_to(residual, x, experts, factors, self._shared_expert)

    def product(self, x: "Tensor", experts: "Tensor", factors: "Tensor") -> "Tensor":
        """Return this rank's share of the product [T, hidden] of the normalised ``x``."""
        return self.experts(x, experts, factors, self._shared_expert).to(x.dtype)

    @property
    def _shared_expert(self) -> "SharedExpert | None":
        return None if self.shared is None else self.shared.expert


class _SumOfRanks:
    """The product of all ranks with chosen experts. See :class:`splitserve.kernels.api.ResidualLinear`."""

    def __init__(self, mlp: ExpertsMlp, experts: "Tensor", factors: "Tensor", group: "Collectives") -> None:
        self._mlp, self._choice = mlp, (experts, factors)
        self._group = group

    def add_to(
        self,
        residual: "Tensor",
        x: "Tensor",
        norm: "Tensor | None" = None,
        eps: float = 0.0,
        *,
        bias: "Tensor | None" = None,
    ) -> "Tensor | None":
        """Add the product to ``residual``; return its norm where the collective has made it."""
        assert bias is None, "experts have their own"
        if self._group.shard.size == 1:
            self._mlp.add_to(residual, x, *self._choice)
            return None
        if x.shape[0] == 1:
            norm = None  # as in splitserve.models.parallel.ranks.RowParallelLinear
        return self._group.add_reduced(residual, self._mlp.product(x, *self._choice).unsqueeze(0), norm, eps)
