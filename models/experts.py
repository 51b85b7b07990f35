"""The experts that a config.json describes: sizes, router, the layers that have them. No torch here."""

from dataclasses import dataclass, field

from splitserve.common.errors import CheckpointError
from splitserve.common.model_files import few
from splitserve.kernels.experts.spec import GatedActivation, GroupScore, RouterSpec, Score
from splitserve.models.fields import ConfigFields


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts, the same in every layer that has one."""

    router: RouterSpec
    inner_size: int  # the intermediate size of an expert
    dense_layers: frozenset[int] = frozenset()  # layers with a dense MLP instead
    activation: GatedActivation = field(default_factory=GatedActivation)
    biases: bool = False  # of the experts' projections
    shared_size: int = 0  # the intermediate size of the experts that every token has; 0: there are none
    shared_gate: bool = False  # their product is multiplied by a sigmoid
    is_mxfp4: bool = False  # matrices are stored in MXFP4 (:mod:`splitserve.kernels.experts.mxfp4`)
    is_transposed: bool = False  # a layer's matrices are stored as one tensor [experts, in_features, out_features]


def check_router(spec: RouterSpec, *, experts: str, groups: str = "n_group", kept: str = "topk_group") -> RouterSpec:
    """Return ``spec``. Raises :class:`CheckpointError` for numbers that don't fit each other, with the names that
    config.json has for the numbers of experts, groups and kept groups."""
    if spec.num_experts % spec.num_groups:
        raise CheckpointError(
            f"config.json: {groups} is {spec.num_groups}; a divisor of {experts} ({spec.num_experts}) is needed"
        )
    if spec.kept_groups > spec.num_groups:
        raise CheckpointError(
            f"config.json: {kept} is {spec.kept_groups}; at most {groups} ({spec.num_groups}) is possible"
        )
    if spec.kept_groups < spec.num_groups and spec.group_score is GroupScore.TOP2_SUM and spec.group_size < 2:
        raise CheckpointError(f"config.json: {groups} is {spec.num_groups}; groups of at least 2 experts are needed")
    allowed = spec.kept_groups * spec.group_size
    if spec.top_k > allowed:
        raise CheckpointError(
            f"config.json: num_experts_per_tok is {spec.top_k}; at most {allowed} experts take part in the choice"
        )
    return spec


def layer_numbers(given: ConfigFields, name: str, num_layers: int) -> frozenset[int]:
    """Return a list of layers. Raises :class:`CheckpointError` for numbers of layers that there aren't."""
    numbers = given.items(name)
    wrong = [number for number in numbers if type(number) is not int or not 0 <= number < num_layers]
    if wrong:
        raise CheckpointError(f"config.json: {name} has {few(wrong)}; layers are numbered from 0 to {num_layers - 1}")
    return frozenset(numbers)


def deepseek_experts(given: ConfigFields) -> ExpertsSpec:
    """Read the experts of models whose router is that of DeepSeek V3 (arXiv:2412.19437): sigmoid scores with a
    correction bias, groups scored by their best two experts, shared experts, first layers without experts."""
    count = "n_routed_experts"
    given.choice("scoring_func", ("sigmoid",), "sigmoid")
    given.choice("topk_method", ("noaux_tc",), "noaux_tc")
    router = RouterSpec(
        given.positive(count),
        given.positive("num_experts_per_tok", 8),
        Score.SIGMOID,
        normalised=given.flag("norm_topk_prob", default=True),
        scale=given.number("routed_scaling_factor", 1.0),
        num_groups=given.positive("n_group", 1),
        kept_groups=given.positive("topk_group", 1),
        correction_bias=True,
        wide_logits=True,
    )
    inner_size = given.positive("moe_intermediate_size")
    return ExpertsSpec(
        check_router(router, experts=count),
        inner_size,
        dense_layers=frozenset(range(given.natural("first_k_dense_replace", 0))),
        shared_size=inner_size * given.natural("n_shared_experts", 0),
    )
