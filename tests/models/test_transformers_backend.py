"""Architectures without a family, through transformers' code: their tokens are those of ``generate``, or they are
refused before memory is taken. SPLITSERVE_ARCHITECTURES: which ones; `scripts/long-tests models` runs all."""

import json
import os
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core_worker import BLOCK_SIZE, CoreWorker
from serving import Reference, transformers_greedy
from splitserve.common.errors import CheckpointError, ConfigError
from splitserve.models.config import ModelConfig, load_model_config
from splitserve.models.declared import check_tensor_parallel_size
from splitserve.models.families.registry import FAMILIES
from splitserve.models.runner.runner import ModelRunner
from splitserve.models.step_costs import kv_token_elements, token_flops, weight_elements
from splitserve.models.transformers_backend.known import REFUSED, TESTED
from splitserve.models.transformers_backend.loading import load_transformers_model
from splitserve.protocol.step import SampleSpec, ScheduledChunk, StepPlan
from transformers_models import CHANGED, EVERY, NATIVE, SIZES, WINDOW, write_transformers_model

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
MAX_TOKENS = 10
FEW = ("GPT2LMHeadModel", "OPTForCausalLM", "FlintForCausalLM", "VaultGemmaForCausalLM", "MiniCPM3ForCausalLM")
CHOSEN = tuple(filter(None, os.environ.get("SPLITSERVE_ARCHITECTURES", "").split(","))) or FEW


def make_prompts() -> list[list[int]]:
    """Prompts around the sizes of a block and the window, of several chunks, and two with a common prefix."""
    chosen = random.Random(7)

    def draw(count: int) -> list[int]:
        return [chosen.randrange(300, 1500) for _ in range(count)]

    shared = draw(3 * BLOCK_SIZE)
    lengths = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, WINDOW - 1, WINDOW, WINDOW + 1, 130)
    return [shared + draw(3), *(draw(length) for length in lengths), shared + draw(40)]


PROMPTS = make_prompts()


@pytest.fixture(scope="module", params=CHOSEN)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Reference]]:
    path = write_transformers_model(tmp_path_factory.mktemp("transformers") / request.param, request.param)
    return path, transformers_greedy(path, PROMPTS, MAX_TOKENS)


@pytest.fixture(scope="module")
def config(checkpoint: tuple[Path, list[Reference]]) -> Iterator[ModelConfig]:
    yield load_model_config(checkpoint[0], "transformers")


def test_tokens_of_chunks_prefixes_and_repetitions_are_those_of_generate(
    checkpoint: tuple[Path, list[Reference]],
) -> None:
    path, references = checkpoint
    worker = CoreWorker(path, kv_bytes=8 << 20, backend="transformers")
    for is_repeated in (False, True):
        for prompt, reference, tokens in zip(PROMPTS, references, worker.run(PROMPTS, MAX_TOKENS), strict=True):
            assert reference.agrees(tokens), f"repeated: {is_repeated}, prompt of {len(prompt)}: {tokens}"
        if is_repeated:
            wanted = [(len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in PROMPTS]
            assert worker.num_cached_tokens == wanted, "a repeated prompt is found up to its last token's block"
        else:
            assert worker.num_cached_tokens[-1] >= BLOCK_SIZE, "the first prompt and the last share a prefix"


def test_preempted_sequences_draw_the_same_tokens(
    checkpoint: tuple[Path, list[Reference]], config: ModelConfig
) -> None:
    path, _ = checkpoint
    prompts = [PROMPTS[8][start : start + 60] for start in range(0, 70, 12)]
    block_bytes = 4 * BLOCK_SIZE * kv_token_elements(config)
    plenty, small = (
        CoreWorker(path, kv_bytes=number * block_bytes, max_model_len=160, backend="transformers")
        for number in (80, 18)
    )
    assert small.run(prompts, 40) == plenty.run(prompts, 40)
    assert small.core.state.counters.preemptions > 0 and plenty.core.state.counters.preemptions == 0


def tokens_of(path: Path, config: ModelConfig, prompt: list[int]) -> list[int]:
    """Greedy tokens after ``prompt``, with a config that may be wrong."""
    model = load_transformers_model(path, config, dtype=torch.float32, device=CPU)
    num_blocks = -(-(len(prompt) + MAX_TOKENS) // BLOCK_SIZE)
    runner = ModelRunner(model, torch.full((num_blocks, *config.block_shape(BLOCK_SIZE)), torch.nan))
    tokens, start = list(prompt), 0
    for _ in range(MAX_TOKENS):
        spec = SampleSpec(0.0, 0, 1.0, 0, 0, len(tokens))
        (token,) = runner.run(StepPlan([ScheduledChunk(tokens[start:], start, range(num_blocks), spec)])).token_ids
        assert token is not None
        start = len(tokens)
        tokens.append(token)
    return tokens[len(prompt) :]


def mistakes(config: ModelConfig) -> Iterator[dict[str, Any]]:
    """Yield mistakes that could be made of the model's masks, scale, cap and sinks."""
    if config.sliding_layers:
        assert config.window is not None
        full = tuple(layer for layer in range(config.num_layers) if layer not in config.sliding_layers)
        yield from ({"window": config.window - 1}, {"window": config.window + 1}, {"sliding_layers": ()})
        if full:
            yield {"sliding_layers": full}
    else:
        yield from ({"window": WINDOW, "sliding_layers": tuple(range(config.num_layers))},)
    if config.attention_soft_cap is not None:
        yield {"attention_soft_cap": None}


def test_mistakes_of_masks_and_scales_change_the_tokens(
    checkpoint: tuple[Path, list[Reference]], config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else equal tokens would prove nothing."""
    from splitserve.models.transformers_backend import model

    path, references = checkpoint
    longest_first = sorted(zip(PROMPTS, references, strict=True), key=lambda pair: -len(pair[0]))

    def changes_tokens(config: ModelConfig) -> bool:
        return any(tokens_of(path, config, prompt) != reference.token_ids for prompt, reference in longest_first)

    assert longest_first[0][1].agrees(tokens_of(path, config, longest_first[0][0]))
    for change in mistakes(config):
        assert changes_tokens(replace(config, **change)), change
    called = model.PagedStep.__call__
    for argument, wrong in (("scaling", lambda value: 1.5 * value), ("s_aux", lambda value: value + 3.0)):
        if argument == "s_aux" and not config.sinks:
            continue

        def call(step: Any, given: Any, argument: str = argument, wrong: Any = wrong) -> Any:
            value = given.given.get(argument)
            value = given.query.shape[3] ** -0.5 if value is None else value
            return called(step, replace(given, given={**given.given, argument: wrong(value)}))

        monkeypatch.setattr(model.PagedStep, "__call__", call)
        assert changes_tokens(config), argument


# ---- once, whatever is chosen ----


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_transformers_model(tmp_path_factory.mktemp("transformers") / "gpt2", "GPT2LMHeadModel")


def test_a_model_without_a_family_is_served_by_transformers(gpt2: Path) -> None:
    config = load_model_config(gpt2)
    assert (config.backend, config.architecture) == ("transformers", "GPT2LMHeadModel")
    assert kv_token_elements(config) == 3 * 2 * 64 and weight_elements(config) > 0 and token_flops(config) > 0
    with pytest.raises(CheckpointError, match=r"architectures is .'GPT2LMHeadModel'.; supported are Arcee"):
        load_model_config(gpt2, "native")
    with pytest.raises(ConfigError, match="a worker has one rank; got 2 tensor-parallel ranks"):
        check_tensor_parallel_size(config, 2)


def test_a_family_comes_first(tmp_path: Path) -> None:
    path = write_transformers_model(tmp_path / "llama", "LlamaForCausalLM")
    assert load_model_config(path).backend == "native"
    assert load_model_config(path, "transformers").backend == "transformers"


def test_yarn_stretches_contexts_that_the_config_does_not_name(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
    changes = {"max_position_embeddings": 64, "rope_parameters": yarn}
    path = write_transformers_model(tmp_path / "llama", "LlamaForCausalLM", **changes)
    assert load_model_config(path, "transformers").max_position_embeddings == 512
    prompts = [list(range(100, 200)), list(range(5, 75))]
    own = CoreWorker(path, kv_bytes=8 << 20, backend="transformers").run(prompts, MAX_TOKENS)
    references = transformers_greedy(path, prompts, MAX_TOKENS)
    assert all(reference.agrees(tokens) for reference, tokens in zip(references, own, strict=True))


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "BloomForCausalLM": ({}, "it computes attention by itself"),
    "MptForCausalLM": ({"d_model": 64, "n_heads": 4, "n_layers": 2}, "it computes attention by itself"),
    "FalconForCausalLM": ({}, "can't be looked at without weights|it computes attention by itself|doesn't compute"),
    "Llama4ForCausalLM": ({}, "layer_types has 'chunked_attention'; only full_attention and sliding_attention"),
    "DiffLlamaForCausalLM": ({}, "one call of the attention interface for each of its 3 layers is needed, got 6"),
    "BertLMHeadModel": ({"is_decoder": False}, "attends to other tokens than all before it"),
    "Qwen3NextForCausalLM": ({}, "recurrent state isn't supported yet"),
    "Qwen3_5ForCausalLM": ({}, "recurrent state isn't supported yet"),
    "JambaForCausalLM": ({}, "recurrent state isn't supported yet"),
    "FalconMambaForCausalLM": ({}, "recurrent state isn't supported yet"),
    "NemotronHForCausalLM": ({}, "recurrent state isn't supported yet"),
    "MambaForCausalLM": ({}, "recurrent state isn't supported yet"),
    "Lfm2ForCausalLM": ({"layer_types": ["conv", "conv", "full_attention"]}, "recurrent state isn't supported yet"),
    "Phi3ForCausalLM": (
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
            },
        },
        "rope_type is 'longrope': rotations would depend on other requests",
    ),
    "MiMoV2FlashForCausalLM": (
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "head_dim": 16},
        "layers differ in attention's num_kv_heads",
    ),
    "NoSuchForCausalLM": ({}, "neither Splitserve nor transformers .* has a causal language model of that name"),
}  # fmt: skip


@pytest.mark.parametrize("architecture", REFUSALS)
def test_what_would_be_wrong_is_refused(architecture: str, tmp_path: Path) -> None:
    import transformers

    sizes, message = REFUSALS[architecture]
    fields = {"architectures": [architecture]}
    if hasattr(transformers, architecture):
        config_class = getattr(transformers, architecture).config_class
        tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
        fields |= config_class(**{**SIZES, **tokens, **sizes}).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**fields, "architectures": [architecture]}, default=str))
    with pytest.raises(CheckpointError, match=message):
        load_model_config(tmp_path, "transformers")


@pytest.mark.parametrize("architecture", CHANGED)
def test_what_newer_versions_of_transformers_changed_is_refused_or_right(architecture: str, tmp_path: Path) -> None:
    path, prompts = write_transformers_model(tmp_path / "model", architecture), PROMPTS[:5]
    try:
        load_model_config(path, "transformers")
    except CheckpointError as error:
        assert re.search("it computes attention by itself|can't be looked at", str(error))
    else:
        tokens = CoreWorker(path, kv_bytes=8 << 20, backend="transformers").run(prompts, MAX_TOKENS)
        references = transformers_greedy(path, prompts, MAX_TOKENS)
        assert all(reference.agrees(own) for reference, own in zip(references, tokens, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": 10**9}, "n_layer is 1000000000"),
        ({"quantization_config": {"quant_method": "fp8"}}, "only unquantised weights"),
        ({"n_head": 5}, "transformers refuses it|can't be looked at"),
    ],
)
def test_bad_configs_are_refused(gpt2: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    raw = json.loads((gpt2 / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(CheckpointError, match=message):
        load_model_config(tmp_path)


def test_the_lists_for_readers_are_those_of_the_tests() -> None:
    assert set(TESTED) == set(EVERY) - set(NATIVE) and len(TESTED) >= 40
    assert set(NATIVE) == set(FAMILIES)
    assert set(REFUSED) <= set(REFUSALS)
