"""Models with latent attention: published configs, bytes of the cache, weights in FP8, layers that are left out."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from latent_model import SIZES, make_model
from splitserve.common.errors import CheckpointError
from splitserve.models.config import ModelConfig, load_model_config
from splitserve.models.declared import declare
from splitserve.models.latent import LatentSizes
from splitserve.models.runner.runner import ModelRunner
from splitserve.models.weights.loader import load_model
from splitserve.models.weights.sizes import kv_token_bytes
from splitserve.protocol.memory_records import LATENT_ORDER, LayoutRecord, latent_group
from splitserve.protocol.step import SampleSpec, ScheduledChunk

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
PROMPT = random.Random(0).choices(range(2048), k=90)

# As their releases have them: fields that decide shapes, and those that a reader could stumble over
_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}
_YARN = {"type": "yarn", "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
V3: dict[str, Any] = {
    **_COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rope_scaling": {**_YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
V2_LITE: dict[str, Any] = {
    **_COMMON,
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": {**_YARN, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
K2: dict[str, Any] = {
    **V3,
    "first_k_dense_replace": 1,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**_YARN, "beta_fast": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
K2_5: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": K2,
    "vision_config": {"hidden_size": 1152},
}
GLM_FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}


def read(tmp_path: Path, config: dict[str, Any]) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("config", "num_bytes", "scale"),
    [
        (V3, 70_272, 192**-0.5 * (0.1 * math.log(40) + 1) ** 2),
        (V2_LITE, 31_104, 192**-0.5 * (0.0707 * math.log(40) + 1) ** 2),
        (K2, 70_272, 192**-0.5 * (0.1 * math.log(32) + 1) ** 2),
        (K2_5, 70_272, 192**-0.5 * (0.1 * math.log(32) + 1) ** 2),
        (GLM_FLASH, 54_144, 256**-0.5),
    ],
    ids=["V3", "V2-Lite", "K2", "K2.5", "GLM-4.7-Flash"],
)
def test_published_configs(tmp_path: Path, config: dict[str, Any], num_bytes: int, scale: float) -> None:
    """Bytes of a token's latents in bfloat16, the factor of scores, and declarations that fit together."""
    served = read(tmp_path, config)
    assert kv_token_bytes(served, 2) == num_bytes
    assert served.attention_scale == pytest.approx(scale, rel=1e-12)
    assert served.latent is not None and served.latent.width == 576
    if served.num_layers > 50:  # declaring tens of thousands of tensors once more takes seconds
        return
    assert kv_token_bytes(served, 1, num_ranks=8) == 4 * num_bytes
    weights = {weight.name: weight for weight in declare(served).weights()}
    assert weights["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].shape == (576, served.hidden_size)
    assert weights["model.layers.5.mlp.experts.0.down_proj.weight"].shape[0] == served.hidden_size


def test_every_rank_has_the_whole_latent() -> None:
    group = latent_group(61, 64, 576, "bfloat16")
    for num_ranks in (1, 2, 8):
        layout = LayoutRecord(
            "m", "w", "bfloat16", 64, 61, 1, 576, tensor_parallel_size=num_ranks, order=LATENT_ORDER, groups=(group,)
        )
        assert layout.block_bytes == 64 * 70_272 and layout.block_shape == (61, 64, 576)
        assert layout.cache.is_simple
        for theirs in (1, 4):
            other = layout.cache.__class__(layout.groups, theirs).blocks()
            sources = [layout.block_layout.whole_source(rank, other) for rank in range(num_ranks)]
            assert sources == [rank % theirs for rank in range(num_ranks)], "readers are spread over the peer's ranks"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8; .* each of the 128 attention heads"),
        ({"attention_bias": True}, "attention_bias is true; latent attention is supported without biases"),
        ({"head_dim": 128}, "head_dim is 128; qk_nope_head_dim and qk_rope_head_dim make it 64 or 192"),
        ({"kv_lora_rank": None}, "kv_lora_rank is None; a positive integer"),
        ({"n_group": None}, "n_group is None; a positive"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2; only 1 is supported"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid' is supported"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; only 'noaux_tc' is supported"),
        ({"index_topk": 2048}, "'index_topk': unknown for this architecture"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "'compressed-tensors'.* isn't supported"),
        ({"n_group": 7}, "n_group is 7; a divisor of n_routed_experts"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_served_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, {**V3, **change})


def test_v2_refuses_normalised_weights_of_experts(tmp_path: Path) -> None:
    """Releases and transformers disagree about them."""
    with pytest.raises(CheckpointError, match="norm_topk_prob is true; only false is supported"):
        read(tmp_path, {**V2_LITE, "norm_topk_prob": True})


def logits_of(path: Path) -> torch.Tensor:
    """Return the logits after :data:`PROMPT`, in two chunks: one attends expanded, the other absorbed."""
    config = load_model_config(path)
    model = load_model(path, config, dtype=torch.float32, device=CPU)
    runner = ModelRunner(model, torch.full((8, *config.block_shape(16)), math.nan))
    logits = None
    with torch.inference_mode():
        for start, end in ((0, 89), (89, 90)):
            spec = SampleSpec(0.0, 0, 1.0, 0, 0, end) if end == len(PROMPT) else None
            chunk = ScheduledChunk(PROMPT[start:end], start, range(8), spec)
            logits = model.forward(runner._batch([chunk]), runner.cache.kv_layers, runner.cache.attention)
    assert logits is not None
    return logits[0]


def test_weights_in_fp8_are_dequantised_for_absorption(tmp_path: Path) -> None:
    """In blocks of 128 by 128 of several scales: the logits are those of the dequantised weights."""
    make_model(kv_lora_rank=160, hidden_size=160, num_attention_heads=8, num_key_value_heads=8).save_pretrained(
        tmp_path
    )
    plain, fp8 = tmp_path / "plain", tmp_path / "fp8"
    stored, rounded = {}, {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        stored[name] = rounded[name] = tensor
        if name.endswith(("_proj.weight", "_mqa.weight")):
            rows, columns = (torch.arange(size) // 128 for size in tensor.shape)
            scales = torch.rand(int(rows[-1]) + 1, int(columns[-1]) + 1) / 200 + 0.002
            wide = scales[rows][:, columns]
            stored[name] = (tensor / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales
            rounded[name] = stored[name].float() * wide
    assert stored["model.layers.0.self_attn.kv_b_proj.weight_scale_inv"].shape == (3, 2)
    config = json.loads((tmp_path / "config.json").read_text())
    quantisation = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for path, tensors, extra in ((plain, rounded, {}), (fp8, stored, {"quantization_config": quantisation})):
        path.mkdir()
        (path / "config.json").write_text(json.dumps({**config, **extra}))
        save_file(tensors, path / "model.safetensors")
    torch.testing.assert_close(logits_of(fp8), logits_of(plain), rtol=1e-5, atol=1e-4)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """And so is the rest of a checkpoint with vision: the logits stay the same."""
    model = make_model(num_nextn_predict_layers=1)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0, -1]
    torch.testing.assert_close(logits_of(tmp_path), expected, rtol=1e-4, atol=1e-3)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {
        "model.layers.2.eh_proj.weight": torch.zeros(4, 4),
        "model.layers.2.shared_head.norm.weight": torch.ones(4),
    }
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    torch.testing.assert_close(logits_of(tmp_path), expected, rtol=1e-4, atol=1e-3)
    config = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": config, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    parts = {f"language_model.{name}": tensor for name, tensor in {**tensors, **extra}.items()}
    parts["vision_tower.patch_embed.proj.weight"] = torch.zeros(4, 4)
    save_file(parts, tmp_path / "model.safetensors")
    torch.testing.assert_close(logits_of(tmp_path), expected, rtol=1e-4, atol=1e-3)


def test_sizes_of_the_random_checkpoints() -> None:
    """Extents of the latent differ, so that none can take another's place."""
    sizes = LatentSizes(32, 24, 16, 20, 48)
    assert (sizes.width, sizes.query_dim) == (48, 40) and SIZES["kv_lora_rank"] == sizes.rank
