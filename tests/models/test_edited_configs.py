"""config.json with fields in unusual places, or that contradict each other: transformers' logits, or a refusal."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from family_runs import NUM_BLOCKS, make_runner
from splitserve.common.errors import CheckpointError
from splitserve.models.config import load_model_config
from splitserve.protocol.step import SampleSpec, ScheduledChunk

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 256,
    "initializer_range": 0.3, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
EXPERTS = {
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
PROMPT = list(range(3, 73))
ORIGINAL = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
LONG = {"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4, "short_factor": [1.0] * 8}
LONG |= {"long_factor": [1.0 + index for index in range(8)]}
BY_KIND = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": {**YARN, ORIGINAL: 16}}
WINDOWS = {"use_sliding_window": True, "sliding_window": 8}
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
LEGACY = {"rope_parameters": "absent"}
MINISTRAL_3 = {"rope_parameters": {**YARN, ORIGINAL: 16, "llama_4_scaling_beta": 0.5}}
FULL_IN_ALL = {"layer_types": ["full_attention"] * 4}


def write(directory: Path, architecture: str, given: dict[str, Any]) -> Path:
    """Write a checkpoint of random weights whose config.json has ``given``, and not the fields that are "absent"."""
    import transformers

    model_class = getattr(transformers, architecture)
    torch.manual_seed(0)
    model_class(model_class.config_class(**SIZES, **EXPERTS.get(architecture, {}))).save_pretrained(directory)
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **given}
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "absent"}))
    return directory


def logits_of_transformers(path: Path) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([PROMPT])).logits[0, -1]
    return found


def logits_of_ours(path: Path) -> torch.Tensor:
    runner = make_runner(path)
    chunk = ScheduledChunk(PROMPT, 0, range(NUM_BLOCKS), SampleSpec(0.0, 0, 1.0, 0, 0, len(PROMPT)))
    with torch.inference_mode():
        logits = runner.model.forward(runner._batch([chunk]), runner.cache.kv_layers, runner.cache.attention)
    assert logits is not None
    return logits[0]


@pytest.mark.parametrize(
    ("architecture", "given"),
    [
        # The original length beside the fields of the rotations has priority over the one among them
        ("LlamaForCausalLM", {ORIGINAL: 16, "rope_parameters": YARN}),
        ("LlamaForCausalLM", {ORIGINAL: 16, "rope_parameters": "absent", "rope_scaling": YARN}),
        ("LlamaForCausalLM", {ORIGINAL: 16, "rope_parameters": {**YARN, ORIGINAL: 64}}),
        ("LlamaForCausalLM", {ORIGINAL: 16, "rope_parameters": {**LLAMA3, ORIGINAL: 64}}),
        ("LlamaForCausalLM", {ORIGINAL: 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("MistralForCausalLM", {ORIGINAL: 16, "rope_parameters": YARN, "sliding_window": None}),
        ("Qwen3ForCausalLM", {ORIGINAL: 16, "rope_parameters": YARN}),
        ("Ministral3ForCausalLM", {ORIGINAL: 32, **MINISTRAL_3}),
        ("Phi3ForCausalLM", {ORIGINAL: 16, "rope_parameters": {**LONG, ORIGINAL: 512}}),
        ("Phi3ForCausalLM", {ORIGINAL: "absent", "rope_parameters": {**LONG, ORIGINAL: 16}}),
        # ... but not where the rotations are by kind of layer
        ("Gemma3ForCausalLM", {ORIGINAL: 64, "rope_parameters": BY_KIND, "sliding_window": 8}),
        # ... for which rope_scaling is of full attention
        ("Olmo3ForCausalLM", {**WINDOW, **LEGACY, "rope_scaling": {**YARN, ORIGINAL: 16}}),
        (
            "Olmo3ForCausalLM",
            {**WINDOW, **LEGACY, "rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 8}},
        ),
        (
            "Olmo3ForCausalLM",
            {**WINDOW, "rope_theta": 1e6, "rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}},
        ),
        ("Olmo3ForCausalLM", {"sliding_window": "absent", "rope_parameters": BY_KIND}),
        ("Gemma3ForCausalLM", {**WINDOW, **LEGACY, "rope_theta": 1e4, "rope_local_base_freq": 500.0}),
        # Both fields may say the same
        ("LlamaForCausalLM", {"rope_scaling": {**YARN, ORIGINAL: 16}, "rope_parameters": {**YARN, ORIGINAL: 16}}),
        # Layers with a window where layer_types doesn't say it: those that aren't rotated; all
        ("SmolLM3ForCausalLM", {**WINDOWS, "layer_types": "absent", "no_rope_layers": [1, 0, 1, 1]}),
        ("SmolLM3ForCausalLM", {**WINDOWS, "layer_types": "absent", "no_rope_layers": "absent"}),
        ("Qwen3MoeForCausalLM", {**WINDOWS, "max_window_layers": 2}),
        ("Qwen3MoeForCausalLM", {**WINDOWS, "max_window_layers": "absent"}),
        ("Qwen3MoeForCausalLM", {"use_sliding_window": False, "sliding_window": 8}),
        ("Qwen3MoeForCausalLM", {"use_sliding_window": True, "sliding_window": None}),
        ("MixtralForCausalLM", {"sliding_window": 8}),
        # Fields of published files: Devstral 2's, Gemma 2's of 9B, Tiny Aya's
        ("Ministral3ForCausalLM", {"rope_parameters": {**YARN, ORIGINAL: 16, "llama_4_scaling_beta": 0.0}}),
        ("Gemma2ForCausalLM", {"sliding_window": 8, "sliding_window_size": 8}),
        ("Cohere2ForCausalLM", {"use_parallel_embedding": False}),
        # ... and of those that transformers 4 saved
        ("Cohere2ForCausalLM", {**WINDOW, "_sliding_window_pattern": 2, "_attn_implementation": "eager"}),
    ],
)
def test_logits_are_those_of_transformers(architecture: str, given: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, architecture, given)
    expected = logits_of_transformers(path)
    torch.testing.assert_close(logits_of_ours(path), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_the_context_is_the_original_one_beside_the_rotations_stretched(tmp_path: Path) -> None:
    given = {ORIGINAL: 64, "rope_parameters": {**YARN, ORIGINAL: 16}}
    assert load_model_config(write(tmp_path, "LlamaForCausalLM", given)).max_position_embeddings == 512


@pytest.mark.parametrize(
    ("architecture", "given", "message"),
    [
        *(
            (f"{name}ForCausalLM", {"sliding_window": 8, **FULL_IN_ALL}, "layer_types has 'full_attention', but all")
            for name in ("Ministral3", "Mixtral", "Phi3", "Starcoder2")
        ),
        ("Qwen3MoeForCausalLM", {**WINDOWS, **FULL_IN_ALL}, "layer_types has 'full_attention', but all"),
        ("Olmo3ForCausalLM", {ORIGINAL: 64}, f"{ORIGINAL} is 64; only None"),
        # Rotations: what transformers reads in another way than its earlier version, or passes over
        *(
            (f"{name}ForCausalLM", {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e6}}, "are both given")
            for name in ("Llama", "Qwen3")
        ),
        *(
            (f"{name}ForCausalLM", {"rope_parameters": BY_KIND}, "are rotated alike")
            for name in ("Cohere2", "Gemma2", "Mistral")
        ),
        *(
            (f"{name}ForCausalLM", {**WINDOW, **given}, message)
            for name in ("Gemma3", "Olmo3")
            for given, message in (
                ({"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters has 'rope_theta'; 'full_attention' and"),
                ({**LEGACY, "rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_scaling.type isn't supported"),
                ({**LEGACY, "rope_scaling": BY_KIND}, "rope_scaling has 'sliding_attention', 'full_attention'"),
                ({**LEGACY, "rope_scaling": {**YARN, ORIGINAL: 16, "truncate": False}}, "truncate is false; only true"),
            )
        ),
        ("Olmo3ForCausalLM", {**WINDOW, **LEGACY, "rope_theta": 1e4}, "rope_theta is 10000, which transformers 4"),
        ("Ministral3ForCausalLM", {"rope_parameters": {**YARN, ORIGINAL: 16}}, "llama_4_scaling_beta is None"),
        ("Phi3ForCausalLM", {"rope_parameters": {**YARN, ORIGINAL: 16}}, "rope_type is 'yarn'; only 'default'"),
        ("Gemma2ForCausalLM", {"sliding_window": 8, "sliding_window_size": 4}, "sliding_window_size is 4; only 8"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping is 30.0; only None"),
        # null is false in transformers: DeepSeek's norm_topk_prob for one
        ("Starcoder2ForCausalLM", {"use_bias": None}, "use_bias is None; true or false"),
        ("LlamaForCausalLM", {"is_causal": False}, "is_causal is false; only true"),
        ("Gemma2ForCausalLM", {"is_causal": False}, "is_causal is false; only true"),
    ],
)
def test_contradictions_are_refused_by_name(
    architecture: str, given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_model_config(write(tmp_path, architecture, given))


def test_the_one_value_of_is_causal_is_accepted(tmp_path: Path) -> None:
    load_model_config(write(tmp_path, "LlamaForCausalLM", {"is_causal": True}))
