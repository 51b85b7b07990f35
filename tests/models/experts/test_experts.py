"""Experts beyond what a family's checkpoint shows: routers and activations of others, storage, splits, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from splitserve.common.errors import CheckpointError, ConfigError
from splitserve.kernels.experts.reference import LoopedExperts, route
from splitserve.kernels.experts.spec import GatedActivation, GroupScore, RouterSpec, Score
from splitserve.kernels.experts.weights import ExpertWeights
from splitserve.models.config import load_model_config
from splitserve.models.declared import check_tensor_parallel_size, declare, shard_of
from splitserve.models.layers.experts import ExpertsMlp
from splitserve.models.layers.weight import Role
from splitserve.models.step_costs import token_flops
from splitserve.models.weights.loader import load_model
from splitserve.models.weights.shard import Shard
from splitserve.orchestration.doctor.model import look_at_model

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 100,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
QWEN = {**SIZES, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "norm_topk_prob": True}
GLM = {**SIZES, "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
GLM |= {"first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
MINIMAX = {**SIZES, "architectures": ["MiniMaxM2ForCausalLM"], "num_local_experts": 4}


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_checkpoint(directory: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Write a random checkpoint, and return its tensors."""
    weights = declare(load_model_config(write_config(directory, config))).weights()
    generator = torch.Generator().manual_seed(0)
    tensors = {weight.name: torch.randn(weight.shape, generator=generator) * 0.1 for weight in weights}
    save_file(tensors, directory / "model.safetensors")
    return tensors


def experts_of(directory: Path, layer: int = 0, **options: Any) -> ExpertWeights:
    model = load_model(directory, load_model_config(directory), dtype=torch.float32, device=CPU, **options)
    mlp: Any = model.decoder.layers[layer]
    assert isinstance(mlp.mlp, ExpertsMlp) and isinstance(mlp.mlp.experts, LoopedExperts)
    return mlp.mlp.experts.weights


# ---- routers and activations of families that are not here ----


def test_softmax_over_the_chosen_ones_is_that_of_gpt_oss() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts, GptOssTopKRouter

    config = GptOssConfig(hidden_size=32, intermediate_size=24, num_local_experts=6, num_experts_per_tok=3)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    router, experts = GptOssTopKRouter(config), GptOssExperts(config)
    x = torch.randn(9, 32)
    with torch.no_grad():
        for parameter in (*router.parameters(), *experts.parameters()):
            parameter.normal_()
        logits, factors, chosen = router(x)
        expected = experts(x, chosen, factors)
        own_chosen, own_factors = route(logits, None, RouterSpec(6, 3, Score.SOFTMAX_OF_TOP))
        activation = GatedActivation(interleaved=True, limit=experts.limit, sigmoid_factor=experts.alpha, up_offset=1.0)
        weights = ExpertWeights(
            experts.gate_up_proj.transpose(1, 2).contiguous(),
            experts.down_proj.transpose(1, 2).contiguous(),
            activation,
            gate_up_bias=experts.gate_up_proj_bias,
            down_bias=experts.down_proj_bias,
        )
        actual = LoopedExperts(weights)(x, own_chosen, own_factors)
    assert torch.equal(own_chosen, chosen.int()) and torch.equal(own_factors, factors)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-3)


def test_groups_by_their_best_expert_are_those_of_deepseek_v2() -> None:
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Config, DeepseekV2TopkRouter

    config = DeepseekV2Config(
        hidden_size=32, n_routed_experts=12, num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=16.0
    )
    config.topk_method, config.num_experts = "group_limited_greedy", 12
    torch.manual_seed(0)
    router = DeepseekV2TopkRouter(config)
    with torch.no_grad():
        router.weight.normal_()
        logits, factors, chosen = router(torch.randn(20, 32))
    spec = RouterSpec(12, 4, num_groups=4, kept_groups=2, group_score=GroupScore.MAX, scale=16.0)
    own_chosen, own_factors = route(logits, None, spec)
    order, own_order = chosen.argsort(-1), own_chosen.argsort(-1)
    assert torch.equal(own_chosen.gather(-1, own_order), chosen.gather(-1, order).int())
    assert torch.equal(own_factors.gather(-1, own_order), factors.gather(-1, order))


# ---- storage ----


def fused(tensors: dict[str, torch.Tensor], count: int, gate: str, up: str, down: str) -> dict[str, torch.Tensor]:
    """Return the tensors with all experts of a layer as one."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for prefix in {name.split(".experts.")[0] for name in tensors if ".experts." in name}:
        each = [f"{prefix}.experts.{index}" for index in range(count)]
        stacks = [torch.cat((tensors[f"{name}.{gate}.weight"], tensors[f"{name}.{up}.weight"])) for name in each]
        found[f"{prefix}.experts.gate_up_proj"] = torch.stack(stacks)
        found[f"{prefix}.experts.down_proj"] = torch.stack([tensors[f"{name}.{down}.weight"] for name in each])
    return found


@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2), Shard(1, 2, has_whole_experts=True)])
def test_experts_may_be_stored_as_one_tensor(tmp_path: Path, shard: Shard) -> None:
    """A rank's part is read from there, too; the layout differs, the weights don't."""
    tensors = write_checkpoint(tmp_path / "each", QWEN)
    write_config(tmp_path / "fused", QWEN)
    save_file(fused(tensors, 4, "gate_proj", "up_proj", "down_proj"), tmp_path / "fused" / "model.safetensors")
    (tmp_path / "fused" / "tokenizer.json").write_text("{}")
    assert not look_at_model(str(tmp_path / "fused")).problems
    options = {} if shard.size == 1 else {"group": _Group(shard)}
    one, other = experts_of(tmp_path / "each", **options), experts_of(tmp_path / "fused", **options)
    assert torch.equal(one.gate_up, other.gate_up) and torch.equal(one.down, other.down)
    own = slice(2, 4) if shard.has_whole_experts else slice(0, 4)
    assert (one.first, one.num_experts) == (own.start, own.stop - own.start)
    inner = slice(64, 128) if shard.size == 2 and not shard.has_whole_experts else slice(0, 128)
    expected = [tensors[f"model.layers.0.mlp.experts.{index}.down_proj.weight"][:, inner] for index in range(4)]
    assert torch.equal(one.down, torch.stack(expected[own]))
    gate = tensors[f"model.layers.0.mlp.experts.{own.start}.gate_proj.weight"][inner]
    assert torch.equal(one.gate_up[0, : gate.shape[0]], gate)


class _Group:
    """The collectives of one rank whose peers are not there: it loads, and runs no step."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard


def test_fused_tensors_of_the_wrong_shape_are_named(tmp_path: Path) -> None:
    tensors = fused(write_checkpoint(tmp_path, QWEN), 4, "gate_proj", "up_proj", "down_proj")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    for changed, message in (
        (tensors[name][:3], r"lacks model\.layers\.1\.mlp\.experts\.3\.gate_proj\.weight"),
        (tensors[name][:, :-1], r"gate_up_proj .* has shape \[4, 255, 64\]; .* the second a multiple of 2"),
        (tensors[name][..., :-1], r"gate_up_proj .* has shape \[128, 63\]; config\.json needs \[128, 64\]"),
        (tensors[name].flatten(1), r"gate_up_proj .* has shape \[4, 16384\]; .* need three dimensions"),
    ):
        save_file({**tensors, name: changed.contiguous()}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            experts_of(tmp_path)


def test_a_missing_and_a_surplus_expert_are_named(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, QWEN)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight"):
        experts_of(tmp_path)
    save_file({**tensors, name.replace("3", "4"): tensors[name].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"doesn't explain: model\.layers\.1\.mlp\.experts\.4\.up_proj\.weight"):
        experts_of(tmp_path)


def test_layers_of_a_speculator_are_left_out(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, GLM)
    stored = {**tensors, "model.layers.2.eh_proj.weight": torch.zeros(64, 128)}
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"doesn't explain: model\.layers\.2\.eh_proj\.weight"):
        experts_of(tmp_path)
    write_config(tmp_path, {**GLM, "num_nextn_predict_layers": 1})
    experts_of(tmp_path)


def test_correction_biases_stay_in_float32(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, GLM)
    model = load_model(tmp_path, load_model_config(tmp_path), dtype=torch.bfloat16, device=CPU)
    mlp: Any = model.decoder.layers[1]
    expected = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert torch.equal(mlp.mlp.router._router.weights.correction, expected)
    assert not torch.equal(expected, expected.bfloat16().float())


def test_fp8_experts_are_the_dequantised_ones(tmp_path: Path) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    tensors = write_checkpoint(tmp_path / "plain", {**QWEN, "hidden_size": 256})
    write_config(tmp_path / "fp8", {**QWEN, "hidden_size": 256, "quantization_config": fp8})
    stored, rounded = dict(tensors), dict(tensors)
    for weight in declare(load_model_config(tmp_path / "plain")).weights():
        if weight.role is Role.EXPERT:
            scales = torch.rand(weight.shape[0] // 128, weight.shape[1] // 128) + 0.5
            stored[weight.name] = (tensors[weight.name] / 0.01).to(torch.float8_e4m3fn)
            stored[f"{weight.name}_scale_inv"] = scales
            wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            rounded[weight.name] = stored[weight.name].float() * wide
    save_file(stored, tmp_path / "fp8" / "model.safetensors")
    save_file(rounded, tmp_path / "plain" / "model.safetensors")
    one, other = experts_of(tmp_path / "fp8"), experts_of(tmp_path / "plain")
    assert torch.equal(one.gate_up, other.gate_up) and torch.equal(one.down, other.down)


# ---- splits ----


@pytest.mark.parametrize(
    ("size", "wanted", "inner", "has_whole_experts"),
    [
        (1, "on", 128, False),
        (2, "auto", 128, False),
        (2, "on", 128, True),
        (4, "auto", 128, False),
        (4, "auto", 40, True),  # 10 of each expert: no multiple of 16
        (4, "off", 40, False),
        (4, "auto", 30, True),  # 30 are not four equal parts
    ],
)
def test_ranks_share_the_experts_or_what_is_in_them(
    tmp_path: Path, size: int, wanted: str, inner: int, has_whole_experts: bool
) -> None:
    config = load_model_config(write_config(tmp_path, {**QWEN, "moe_intermediate_size": inner}))
    assert shard_of(config, size - 1, size, wanted) == Shard(size - 1, size, has_whole_experts)


@pytest.mark.parametrize(
    ("size", "wanted", "message"),
    [
        (
            4,
            "off",
            "an expert's intermediate size of 30 can't be shared by 4 .* ranks with expert_parallel off; 1, 2 work",
        ),
        (3, "on", "4 experts can't be shared by 3 .* ranks with expert_parallel on; 1, 2, 4 work"),
        (3, "auto", "an expert's intermediate size of 30 and 4 experts can't be shared by 3 .* ranks; 1, 2, 4 work"),
    ],
)
def test_sizes_that_cannot_split_are_refused(tmp_path: Path, size: int, wanted: str, message: str) -> None:
    config = load_model_config(write_config(tmp_path, {**QWEN, "moe_intermediate_size": 30}))
    with pytest.raises(ConfigError, match=message):
        check_tensor_parallel_size(config, size, wanted)


def test_a_model_without_experts_shares_none(tmp_path: Path) -> None:
    dense = {key: value for key, value in SIZES.items() if key not in ("num_experts_per_tok", "moe_intermediate_size")}
    config = load_model_config(write_config(tmp_path, {**dense, "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match="expert_parallel is on, but the model has no experts"):
        shard_of(config, 0, 2, "on")
    assert shard_of(config, 0, 2) == Shard(0, 2)


# ---- config.json ----


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**QWEN, "num_experts": 0}, "num_experts is 0; a positive integer"),
        ({**QWEN, "num_experts_per_tok": 5}, "num_experts_per_tok is 5; at most 4 experts"),
        ({**QWEN, "mlp_only_layers": [0, 2]}, "mlp_only_layers has 2; layers are numbered from 0 to 1"),
        ({**QWEN, "shared_expert_intermediate_size": 64}, "'shared_expert_intermediate_size': unknown"),
        ({**GLM, "n_group": 3}, r"n_group is 3; a divisor of n_routed_experts \(8\)"),
        ({**GLM, "topk_group": 5}, r"topk_group is 5; at most n_group \(4\)"),
        ({**GLM, "n_group": 8, "num_experts_per_tok": 1}, "n_group is 8; groups of at least 2 experts"),
        ({**GLM, "num_experts_per_tok": 6}, "num_experts_per_tok is 6; at most 4 experts take part"),
        ({**GLM, "scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid'"),
        ({**GLM, "routed_scaling_factor": "2"}, "routed_scaling_factor is '2'"),
        ({**GLM, "first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ({**MINIMAX, "attn_type_list": [1, 0]}, "attn_type_list has .*0"),
        ({**MINIMAX, "use_qk_norm": False}, "use_qk_norm is false; only true"),
        ({**MINIMAX, "shared_intermediate_size": 8}, "shared_intermediate_size isn't 0"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_model_config(write_config(tmp_path, config))


def test_a_token_costs_the_experts_that_it_has(tmp_path: Path) -> None:
    costs = [
        token_flops(load_model_config(write_config(tmp_path, {**QWEN, "num_experts_per_tok": count})))
        for count in (1, 2, 4)
    ]
    one_expert = 2 * SIZES["num_hidden_layers"] * 3 * SIZES["hidden_size"] * SIZES["moe_intermediate_size"]
    assert [costs[1] - costs[0], costs[2] - costs[1]] == [one_expert, 2 * one_expert]
