"""GPT-OSS from files in MXFP4: tokens are those of transformers, which dequantises them, too; refusals by name."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from family_runs import CPU, greedy, make_runner, tokens_of_two_ranks
from mxfp4_checkpoints import VALUES, pack_experts, packed
from serving import Reference, transformers_greedy
from splitserve.common.errors import CheckpointError, ConfigError
from splitserve.kernels.experts.mxfp4 import dequantised
from splitserve.models.config import load_model_config
from splitserve.models.declared import shard_of
from splitserve.models.step_costs import decode_bytes, token_flops
from splitserve.models.weights.loader import load_model
from window_checkpoints import write_window_model

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT = 16
PROMPTS = [random.Random(length).choices(range(300, 1500), k=length) for length in (5, 33, 70)]
BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"


@pytest.fixture(scope="module")
def packed_model(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_window_model(tmp_path_factory.mktemp("mxfp4") / "gpt-oss", "GptOssForCausalLM", tiny_qwen3)
    pack_experts(path)
    return path


@pytest.fixture(scope="module")
def references(packed_model: Path) -> list[Reference]:
    return transformers_greedy(packed_model, PROMPTS, COUNT)


@pytest.mark.parametrize("budget", [512, 13])
def test_tokens_are_those_of_transformers(packed_model: Path, references: list[Reference], budget: int) -> None:
    runner = make_runner(packed_model)
    for prompt, reference in zip(PROMPTS, references, strict=True):
        assert reference.agrees(greedy(runner, prompt, budget, COUNT))


@pytest.mark.parametrize("has_whole_experts", [False, True])
def test_two_ranks_draw_the_same_tokens(
    packed_model: Path, references: list[Reference], has_whole_experts: bool
) -> None:
    """A rank reads its part of the packed bytes: whole groups of 32, or whole experts."""
    tokens = tokens_of_two_ranks(packed_model, PROMPTS, COUNT, has_whole_experts=has_whole_experts)
    assert tokens[0] == tokens[1]
    assert all(reference.agrees(drawn) for reference, drawn in zip(references, tokens[0], strict=True))


def test_every_number_of_the_format() -> None:
    numbers = torch.cat((VALUES, -VALUES, VALUES.flip(0), -VALUES.flip(0))).expand(3, 32).contiguous()
    scaled = numbers * torch.tensor([[2.0**-20], [1.0], [2.0**20]])
    blocks, scales = packed(scaled)
    assert scales.tolist() == [[107], [127], [147]]
    assert torch.equal(dequantised(blocks.flatten(1), scales, torch.float32), scaled)
    assert torch.equal(dequantised(blocks.flatten(1), scales, torch.bfloat16), scaled.bfloat16())


def test_sizes_count_packed_bytes_and_whole_products(packed_model: Path, tmp_path: Path) -> None:
    """A step reads 4.25 bits for each of an expert's elements, and computes as without the format."""
    packed_config = load_model_config(packed_model)
    raw = json.loads((packed_model / "config.json").read_text())
    del raw["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    plain_config = load_model_config(tmp_path)
    elements = 4 * 4 * 3 * 128 * 64  # layers, experts, matrices
    saved = decode_bytes(plain_config, 1, 1, 2) - decode_bytes(packed_config, 1, 1, 2)
    assert saved == elements * 2 - elements * 17 // 32
    assert token_flops(plain_config) == token_flops(packed_config)


def test_ranks_share_whole_groups(packed_model: Path) -> None:
    config = load_model_config(packed_model)
    assert shard_of(config, 0, 2, "off").has_whole_experts is False
    assert shard_of(config, 0, 4, "auto").has_whole_experts is True
    message = "2 groups of 32 in an expert's intermediate size of 64 can't be shared by 4 .* 1, 2 work"
    with pytest.raises(ConfigError, match=message):
        shard_of(config, 0, 4, "off")


def load(path: Path) -> None:
    load_model(path, load_model_config(path), dtype=torch.float32, device=CPU)


def test_tensors_of_another_format_are_named(packed_model: Path, tmp_path: Path) -> None:
    shutil.copy(packed_model / "config.json", tmp_path)
    tensors = load_file(packed_model / "model.safetensors")
    scales = BLOCKS.replace("blocks", "scales")
    without = {name: tensor for name, tensor in tensors.items() if name != scales}
    for changed, message in (
        (without, r"lacks model\.layers\.1\.mlp\.experts\.0\.down_proj\.scales"),
        ({**tensors, BLOCKS: tensors[BLOCKS].to(torch.int8)}, "down_proj_blocks is stored as I8; supported are U8"),
        ({**tensors, BLOCKS: tensors[BLOCKS].flatten(2)}, "all experts' matrices as one need four dimensions"),
        (
            {**tensors, BLOCKS: tensors[BLOCKS][:, :, :1].contiguous()},
            r"shape \[128, 16\]; config.json needs \[128, 32",
        ),
        ({**tensors, "model.norm.weight": torch.ones(128, dtype=torch.uint8)}, "norm.weight is stored as U8"),
    ):
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path)


def test_other_models_in_the_format_are_refused(packed_model: Path, tiny_qwen3: Path, tmp_path: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "mxfp4"}}
    raw = json.loads((tiny_qwen3 / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **quantised}))
    with pytest.raises(CheckpointError, match=r"'mxfp4'.* isn't supported in this architecture"):
        load_model_config(tmp_path)
    raw = json.loads((packed_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "intermediate_size": 72}))
    with pytest.raises(CheckpointError, match="intermediate_size is 72; MXFP4 needs a multiple of 32"):
        load_model_config(tmp_path)
