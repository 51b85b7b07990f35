"""Each family of the registry against transformers: random checkpoints in which every weight changes the tokens."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from family_runs import CPU, NUM_BLOCKS, draws, greedy_together, make_runner, tokens_of_two_ranks
from family_runs import greedy as greedy_tokens
from latent_families import LATENT_FAMILIES, LATENT_MISTAKES
from splitserve.kernels.experts.spec import GroupScore, Score
from splitserve.kernels.fp8.kv import FP8, DequantisingAttention
from splitserve.kernels.reference.attention import ReferencePagedAttention
from splitserve.kernels.registry import select_kernels
from splitserve.models.config import load_model_config
from splitserve.models.declared import declare
from splitserve.models.families.registry import FAMILIES
from splitserve.models.runner.runner import ModelRunner
from splitserve.models.weights.checkpoint import read_records
from splitserve.models.weights.fused_experts import expert_records
from splitserve.protocol.step import SampleSpec, ScheduledChunk

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_NEW_TOKENS = 16
NUM_AT_EDGES = 4  # after prompts whose length is the point
NUM_OF_RANKS = 8  # each is a step of two threads that wait for each other
VOCAB_SIZE = 500
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# As transformers makes them, norms are ones and biases zeros; a residual of hundreds hides small biases of products.
NOISE = 0.3
BIAS = 1.0
BIASED = {"attention_bias": True, "mlp_bias": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4, "factor": 64.0}
LONG |= {"short_factor": [1.0] * 6, "long_factor": [1.0 + index / 4 for index in range(6)]}
BY_KIND = {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOW = {"sliding_window": 8, "layer_types": KINDS}
SCALES = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Features that are off by default, or that default to sizes of large models
OWN_SIZES: dict[str, dict[str, Any]] = {
    "ArceeForCausalLM": {**BIASED, "rope_parameters": YARN},
    # Layers without a window aren't rotated, where a bias of keys changes nothing: the middle one has a window
    "Cohere2ForCausalLM": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "attention_bias": True,
    },
    "Gemma2ForCausalLM": {
        **WINDOW,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "Gemma3ForCausalLM": {
        **WINDOW,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {**BY_KIND, "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}},
    },
    "Glm4ForCausalLM": {"attention_bias": True},
    "Glm4MoeForCausalLM": {
        **EXPERTS,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
    },
    **LATENT_FAMILIES,
    "GptOssForCausalLM": {
        **WINDOW,
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "intermediate_size": 32,
        "swiglu_limit": 3.0,
        "rope_parameters": {**YARN, "truncate": False},
    },
    "GraniteForCausalLM": {**BIASED, **SCALES},
    "LlamaForCausalLM": BIASED,
    "MiniMaxM2ForCausalLM": {
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "intermediate_size": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "Ministral3ForCausalLM": {
        "sliding_window": 20,
        "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5},
    },
    "MistralForCausalLM": {"sliding_window": 17},
    "MixtralForCausalLM": {"num_experts_per_tok": 2, "num_local_experts": 4, "intermediate_size": 32},
    "NemotronForCausalLM": {**BIASED, "initializer_range": 0.1},  # squares grow: large ones hide biases
    "Olmo3ForCausalLM": {**WINDOW, "rope_parameters": {**BY_KIND, "full_attention": YARN}},
    "Phi3ForCausalLM": {"head_dim": 16, "rope_parameters": {**LONG, "partial_rotary_factor": 0.75}},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "Qwen3ForCausalLM": {"attention_bias": True},
    "Qwen3MoeForCausalLM": {
        **EXPERTS,
        "num_experts": 6,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
        "attention_bias": True,
    },
    "SeedOssForCausalLM": {"attention_out_bias": True, "mlp_bias": True},
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0, 1]},
}
LENGTHS = (5, 33, 70, 1, 7, 8, 9, 15, 16, 17, 19, 20, 21)  # around the sizes of blocks and windows
PROMPTS = [random.Random(length).choices(range(VOCAB_SIZE), k=length) for length in LENGTHS]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A checkpoint that transformers has made, and the tokens that it draws after :data:`PROMPTS`."""
    import transformers

    model_class = getattr(transformers, request.param)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**{**SIZES, **OWN_SIZES.get(request.param, {})})).eval()
    model.config.eos_token_id = model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("_bias"):
                is_bias = name.endswith("bias") and "norm" not in name
                parameter.add_((BIAS if is_bias else NOISE) * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(NOISE * torch.randn_like(buffer))
        logits = model(torch.tensor([PROMPTS[1]])).logits[0, -1]
    path = tmp_path_factory.mktemp("families") / request.param
    model.save_pretrained(path)
    save_file({"logits": logits.contiguous()}, path.parent / f"{request.param}.logits")
    return path, [reference_tokens(model, prompt) for prompt in PROMPTS]


def reference_tokens(model: Any, prompt: list[int]) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_NEW_TOKENS if len(prompt) in LENGTHS[:3] else NUM_AT_EDGES,
        do_sample=False,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def greedy(runner: ModelRunner, prompt: list[int], budget: int, count: int = NUM_NEW_TOKENS) -> list[int]:
    return greedy_tokens(runner, prompt, budget, count)


def differs(runner: ModelRunner, expected: list[list[int]]) -> bool:
    """Return whether a token after one of the first prompts isn't the expected one. Nothing is drawn after that one."""
    return any(
        drawn != token
        for index in (1, 2, 0)
        for drawn, token in zip(draws(runner, PROMPTS[index], 512), expected[index], strict=False)
    )


@pytest.mark.parametrize("budget", [512, 16, 13])
def test_greedy_tokens_are_those_of_transformers(family: tuple[Path, list[list[int]]], budget: int) -> None:
    path, expected = family
    count = len(PROMPTS) if budget == 512 else 3
    runner = make_runner(path, num_prompts=count)
    assert greedy_together(runner, PROMPTS[:count], budget, list(map(len, expected[:count]))) == expected[:count]


def test_logits_are_those_of_transformers(family: tuple[Path, list[list[int]]]) -> None:
    """Scales and soft caps of logits change no greedy token."""
    path, _ = family
    runner = make_runner(path)
    chunk = ScheduledChunk(PROMPTS[1], 0, range(NUM_BLOCKS), SampleSpec(0.0, 0, 1.0, 0, 0, len(PROMPTS[1])))
    with torch.inference_mode():
        logits = runner.model.forward(runner._batch([chunk]), runner.cache.kv_layers, runner.cache.attention)
    assert logits is not None
    expected = load_file(path.parent / f"{path.name}.logits")["logits"]
    torch.testing.assert_close(logits[0], expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


# What each of these changes is a mistake that could be made; each must change the tokens of some prompt.
MISTAKES: list[tuple[str, dict[str, Any]]] = [
    *LATENT_MISTAKES,
    ("ArceeForCausalLM", {"activation": "silu"}),
    ("ArceeForCausalLM", {"rope_scaling": None}),
    ("Cohere2ForCausalLM", {"rotates_neighbours": False}),
    ("Cohere2ForCausalLM", {"unrotated_layers": ()}),
    ("Cohere2ForCausalLM", {"window": 7}),
    ("Cohere2ForCausalLM", {"window": 9}),
    ("Gemma2ForCausalLM", {"activation": "silu"}),
    ("Gemma2ForCausalLM", {"attention_scale": None}),
    ("Gemma2ForCausalLM", {"attention_soft_cap": None}),
    ("Gemma2ForCausalLM", {"embedding_scale": 1.0}),
    ("Gemma2ForCausalLM", {"window": 7}),
    ("Gemma2ForCausalLM", {"window": 9}),
    ("Gemma2ForCausalLM", {"sliding_layers": (1,)}),
    ("Gemma3ForCausalLM", {"sliding_rope": None}),
    ("Gemma3ForCausalLM", {"rope_scaling": None}),
    ("Glm4ForCausalLM", {"rotary_dim": None}),
    ("Glm4ForCausalLM", {"rotates_neighbours": False}),
    ("Glm4MoeForCausalLM", {"rotary_dim": None}),
    ("Glm4MoeForCausalLM", {"experts": {"router": {"score": Score.SOFTMAX}}}),
    ("Glm4MoeForCausalLM", {"experts": {"router": {"normalised": False}}}),
    ("Glm4MoeForCausalLM", {"experts": {"router": {"scale": 1.0}}}),
    ("Glm4MoeForCausalLM", {"experts": {"router": {"num_groups": 1, "kept_groups": 1}}}),
    ("Glm4MoeForCausalLM", {"experts": {"router": {"num_groups": 2, "kept_groups": 1}}}),
    ("Glm4MoeForCausalLM", {"experts": {"router": {"kept_groups": 3}}}),
    ("Glm4MoeForCausalLM", {"experts": {"router": {"group_score": GroupScore.MAX}}}),
    ("Glm4MoeForCausalLM", {"experts": {"router": {"top_k": 1}}}),
    ("GptOssForCausalLM", {"window": 7}),
    ("GptOssForCausalLM", {"window": 9}),
    ("GptOssForCausalLM", {"rope_scaling": None}),
    ("GptOssForCausalLM", {"rope_scaling": {"truncate": True}}),
    ("GptOssForCausalLM", {"rope_scaling": {"attention_factor": 1.0}}),
    ("GptOssForCausalLM", {"experts": {"router": {"score": Score.SOFTMAX}}}),
    ("GptOssForCausalLM", {"experts": {"activation": {"interleaved": False}}}),
    ("GptOssForCausalLM", {"experts": {"activation": {"limit": None}}}),
    ("GptOssForCausalLM", {"experts": {"activation": {"sigmoid_factor": 1.0}}}),
    ("GptOssForCausalLM", {"experts": {"activation": {"up_offset": 0.0}}}),
    ("GraniteForCausalLM", {"attention_scale": None}),
    ("GraniteForCausalLM", {"embedding_scale": 1.0}),
    ("GraniteForCausalLM", {"residual_scale": 1.0}),
    ("MiniMaxM2ForCausalLM", {"rotary_dim": None}),
    ("MiniMaxM2ForCausalLM", {"experts": {"router": {"score": Score.SOFTMAX}}}),
    ("MiniMaxM2ForCausalLM", {"experts": {"router": {"normalised": False}}}),
    ("Ministral3ForCausalLM", {"query_beta": 0.0}),
    ("Ministral3ForCausalLM", {"rope_scaling": None}),
    ("Ministral3ForCausalLM", {"window": 21}),
    ("MistralForCausalLM", {"window": 16}),
    ("MixtralForCausalLM", {"experts": {"router": {"normalised": False}}}),
    ("MixtralForCausalLM", {"experts": {"router": {"top_k": 1}}}),
    ("MixtralForCausalLM", {"experts": {"activation": {"interleaved": True}}}),
    ("NemotronForCausalLM", {"rotary_dim": None}),
    ("Olmo3ForCausalLM", {"sliding_rope": None}),
    ("Phi3ForCausalLM", {"rope_scaling": None}),
    ("Phi3ForCausalLM", {"rotary_dim": 8, "rope_scaling": None}),
    ("Qwen2ForCausalLM", {"sliding_layers": (0, 1, 2)}),
    ("Qwen3MoeForCausalLM", {"experts": {"router": {"normalised": False}}}),
    ("Qwen3MoeForCausalLM", {"experts": {"router": {"score": Score.SIGMOID}}}),
    ("SmolLM3ForCausalLM", {"unrotated_layers": ()}),
]


def changed(value: Any, change: dict[str, Any]) -> Any:
    """Replace fields of ``value``, and fields of those whose change is a dict itself."""
    fields = {
        name: changed(getattr(value, name), new) if isinstance(new, dict) else new for name, new in change.items()
    }
    return replace(value, **fields)


def test_every_feature_changes_the_tokens(family: tuple[Path, list[list[int]]]) -> None:
    path, expected = family
    config = load_model_config(path)
    for architecture, change in MISTAKES:
        if architecture == path.name:
            runner = make_runner(path, config=changed(config, change))
            assert differs(runner, expected), change


def test_the_text_model_of_a_checkpoint_with_other_parts_is_served(tmp_path: Path) -> None:
    import transformers

    text = {**SIZES, **OWN_SIZES["Gemma3ForCausalLM"], "tie_word_embeddings": True}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=1
    )
    config.eos_token_id = config.boi_token_index = config.eoi_token_index = None
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    model.save_pretrained(tmp_path)
    served = load_model_config(tmp_path)
    assert (served.architecture, served.text_of) == ("gemma3", "Gemma3ForConditionalGeneration")
    assert greedy(make_runner(tmp_path), PROMPTS[1], 512) == reference_tokens(model, PROMPTS[1])


def test_two_ranks_draw_the_same_tokens(family: tuple[Path, list[list[int]]]) -> None:
    path, expected = family
    first = [tokens[:NUM_OF_RANKS] for tokens in expected[:3]]
    prompts, same = PROMPTS[:3], {0: first, 1: first}
    assert tokens_of_two_ranks(path, prompts, NUM_OF_RANKS) == same
    if load_model_config(path).experts is not None:
        assert tokens_of_two_ranks(path, prompts, NUM_OF_RANKS, has_whole_experts=True) == same


def test_every_weight_changes_the_tokens(family: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    """So none is forgotten: each tensor of a middle layer in turn is another one."""
    path, expected = family
    assert max(len(set(tokens)) for tokens in expected) > NUM_NEW_TOKENS // 2, "text that repeats itself shows little"
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if "layers.1." in name]:
        changed = -tensors[name] if tensors[name].dim() == 2 else tensors[name].flip(0)
        save_file({**tensors, name: changed.contiguous()}, tmp_path / "model.safetensors")
        runner = make_runner(tmp_path)
        assert differs(runner, expected), name


@pytest.mark.parametrize("family", ["Gemma2ForCausalLM", "Gemma3ForCausalLM", "NemotronForCausalLM"], indirect=True)
def test_norms_without_their_offset_change_the_tokens(family: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    """A norm of 1 + w that forgets the 1, of one layer, of its queries and keys, or at the end."""
    path, expected = family
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    tensors = load_file(path / "model.safetensors")
    norms = [
        name for name in tensors if name.endswith("norm.weight") and ("layers.1." in name or "layers." not in name)
    ]
    assert len(norms) >= 3
    for name in norms:
        save_file({**tensors, name: tensors[name] - 1.0}, tmp_path / "model.safetensors")
        assert differs(make_runner(tmp_path), expected), name


def test_dummy_weights_have_the_checkpoints_shape(family: tuple[Path, list[list[int]]]) -> None:
    path, _ = family
    weights = list(declare(load_model_config(path)).weights())
    stored = expert_records(read_records(path), weights)
    assert {weight.name: weight.shape for weight in weights} == {name: each.shape for name, each in stored.items()}
    runner = make_runner(path, load_format="dummy")
    assert all(0 <= token < VOCAB_SIZE for token in greedy(runner, PROMPTS[0], 512, count=3))


def test_scales_of_keys_and_values_divide_what_is_stored(family: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    """Powers of two change no digit: in the first layer the stored numbers are those without scales, divided."""
    path, _ = family
    if load_model_config(path).latent is not None:
        pytest.skip("a latent is stored as it is: there are no scales of keys and values")
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    attention = "model.layers.0.self_attn"
    scales = {f"{attention}.k_scale": torch.tensor(4.0), f"{attention}.v_scale": torch.tensor(0.25)}
    save_file({**load_file(path / "model.safetensors"), **scales}, tmp_path / "model.safetensors")
    kernels = select_kernels(CPU, torch.float32)
    kernels = replace(kernels, make_attention=lambda shape: DequantisingAttention(shape, ReferencePagedAttention))
    plain, scaled = make_runner(path), make_runner(tmp_path, kernels=kernels, kv_dtype=FP8)
    for runner in (plain, scaled):
        greedy(runner, PROMPTS[1], 512, count=1)
    factors = torch.tensor([4.0, 0.25]).view(1, 2, 1, 1)
    written = plain.cache.groups[0][:2, 0]  # two full blocks
    assert torch.equal(scaled.cache.groups[0][:2, 0].float(), (written / factors).to(FP8).float())
    assert float(written.abs().max()) < 100, "FP8 holds it"
