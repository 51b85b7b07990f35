"""Loading: what is wrong with a checkpoint is said before any model exists; versions name content."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from family_runs import tokens_of_two_ranks
from splitserve.common.errors import CheckpointError
from splitserve.kernels.registry import select_kernels
from splitserve.models.config import load_model_config, weights_version
from splitserve.models.decoder import DecoderModel
from splitserve.models.demo.checkpoint import write_demo_model
from splitserve.models.runner.runner import ModelRunner
from splitserve.models.weights.loader import load_model, resolve_dtype
from splitserve.protocol.step import SampleSpec, ScheduledChunk, StepPlan

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
Q_PROJ = "model.layers.2.self_attn.q_proj.weight"


def load(path: Path, **options: object) -> DecoderModel:
    return load_model(path, load_model_config(path), dtype=torch.float32, device=CPU, **options)  # type: ignore[arg-type]


def first_tokens(model: DecoderModel, count: int = 8) -> list[int]:
    config = model.config
    cache = torch.zeros(2, config.num_layers, config.num_kv_heads, 2, 16, config.head_dim, dtype=model.dtype)
    runner = ModelRunner(model, cache)
    tokens = [3, 1, 4]
    while len(tokens) < 3 + count:
        spec = SampleSpec(0.0, 0, 1.0, 0, 0, len(tokens))
        output = runner.run(StepPlan([ScheduledChunk(tokens, 0, [0, 1], spec)]))
        assert output.token_ids[0] is not None
        tokens.append(output.token_ids[0])
    return tokens[3:]


def edited(source: Path, target: Path, edit: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of the checkpoint with its tensors edited."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_a_missing_tensor_is_named(tiny_qwen3: Path, tmp_path: Path) -> None:
    broken = edited(tiny_qwen3, tmp_path / "m", lambda tensors: tensors.pop(Q_PROJ))
    with pytest.raises(CheckpointError, match=Q_PROJ):
        load(broken)


def test_a_misshapen_tensor_is_named_with_both_shapes(tiny_qwen3: Path, tmp_path: Path) -> None:
    broken = edited(tiny_qwen3, tmp_path / "m", lambda tensors: tensors.update({Q_PROJ: torch.zeros(128, 256)}))
    with pytest.raises(CheckpointError, match=r"q_proj.weight.*\[128, 256\].*\[256, 128\]"):
        load(broken)


def test_an_unexpected_tensor_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    extra = "model.layers.0.self_attn.q_proj.bias"
    broken = edited(tiny_llama, tmp_path / "m", lambda tensors: tensors.update({extra: torch.zeros(256)}))
    with pytest.raises(CheckpointError, match=extra):
        load(broken)


def test_a_tensor_of_another_type_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    change = {"model.norm.weight": torch.zeros(128, dtype=torch.int32)}
    with pytest.raises(CheckpointError, match=r"model.norm.weight is stored as I32"):
        load(edited(tiny_llama, tmp_path / "m", lambda tensors: tensors.update(change)))


def test_stored_copies_of_what_is_computed_or_tied_are_ignored(tiny_llama: Path, tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(16)

    assert first_tokens(load(edited(tiny_llama, tmp_path / "m", add))) == first_tokens(load(tiny_llama))


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_truncated_file_is_named(tiny_qwen3: Path, tmp_path: Path, cut: int) -> None:
    shutil.copytree(tiny_qwen3, tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"model.safetensors"):
        load(tmp_path / "m")


def test_a_garbled_header_is_named(tiny_qwen3: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_qwen3, tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:40] = b"\xff" * 32
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model.safetensors"):
        load(tmp_path / "m")


def test_a_checkpoint_without_weights_or_with_a_lost_shard(tiny_qwen3: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_qwen3 / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"no \*.safetensors"):
        load(tmp_path)
    sharded = write_demo_model(tmp_path / "sharded", max_shard_bytes=1_000_000)
    lost = sorted(sharded.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=lost.name):
        load(sharded)
    (sharded / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="index"):
        load(sharded)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_shards_and_a_single_file_are_the_same_model(tmp_path: Path, architecture: str) -> None:
    single = write_demo_model(tmp_path / "single", architecture=architecture)
    sharded = write_demo_model(tmp_path / "sharded", architecture=architecture, max_shard_bytes=700_000)
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert first_tokens(load(single)) == first_tokens(load(sharded))


def test_a_plain_backend_gives_the_same_tokens(tiny_qwen3: Path) -> None:
    plain = select_kernels(CPU, torch.float32, {"pack_linear": "reference"})
    assert first_tokens(load(tiny_qwen3, kernels=plain)) == first_tokens(load(tiny_qwen3))


@pytest.mark.parametrize("says_tied", [False, True])
def test_an_untied_head_is_used(says_tied: bool, tiny_llama: Path, tmp_path: Path) -> None:
    flipped = edited(
        tiny_llama,
        tmp_path / "m",
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].flip(0).clone()}),
    )
    config = json.loads((flipped / "config.json").read_text())
    (flipped / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": says_tied}))
    tied, untied = first_tokens(load(tiny_llama), 1), first_tokens(load(flipped), 1)
    assert untied == [config["vocab_size"] - 1 - tied[0]]
    on_ranks = tokens_of_two_ranks(flipped, [[3, 1, 4]], 1)
    assert on_ranks == {rank: [untied] for rank in range(2)}


def test_a_head_that_differs_from_the_embedding_in_one_row_or_in_its_type_is_its_own(
    tiny_llama: Path, tmp_path: Path
) -> None:
    def change_last_row(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, -1] += 1

    def copy(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def copy_wide(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].double()

    edits = {"row": change_last_row, "copy": copy, "wide": copy_wide}
    configs = {name: load_model_config(edited(tiny_llama, tmp_path / name, edit)) for name, edit in edits.items()}
    assert {name: config.tie_word_embeddings for name, config in configs.items()} == {
        "row": False,
        "copy": True,
        "wide": False,
    }


def test_dummy_weights_need_no_files_and_are_the_same_each_time(tiny_qwen3: Path, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((tiny_qwen3 / name).read_bytes())
    assert first_tokens(load(tmp_path, load_format="dummy")) == first_tokens(load(tmp_path, load_format="dummy"))


def test_progress_counts_up_to_the_end(tiny_qwen3: Path) -> None:
    seen: list[tuple[int, int]] = []
    load(tiny_qwen3, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(step, 5) for step in range(1, 6)]


def test_auto_dtype_is_the_checkpoints_where_the_cpu_is_quick_in_it(tiny_qwen3: Path) -> None:
    config = load_model_config(tiny_qwen3)
    assert resolve_dtype("auto", config, CPU) == torch.float32
    assert resolve_dtype("bfloat16", config, CPU) == torch.bfloat16


def test_weights_version_names_scales_in_the_middle_of_large_files(tmp_path: Path) -> None:
    """Scales of FP8 KV are all that a new calibration changes."""
    versions = []
    for scale in (0.02, 0.25):
        (tmp_path / "config.json").write_text("{}")
        large = {name: torch.zeros(20 << 20, dtype=torch.bfloat16) for name in "az"}
        tensors = {**large, "layer.k_scale": torch.tensor(scale, dtype=torch.bfloat16)}
        save_file(tensors, tmp_path / "model.safetensors")
        versions.append(weights_version(tmp_path))
    assert versions[0] != versions[1]


def test_weights_version_names_content(tiny_qwen3: Path, tmp_path: Path) -> None:
    version = weights_version(tiny_qwen3)
    same = tmp_path / "elsewhere"
    shutil.copytree(tiny_qwen3, same)
    assert weights_version(same) == version
    assert weights_version(same, "dummy") != version

    def nudge(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][5, 5] += 1

    assert weights_version(edited(tiny_qwen3, tmp_path / "nudged", nudge)) != version
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    assert weights_version(same) != version
    with pytest.raises(CheckpointError, match="can't be read"):
        weights_version(tmp_path / "nowhere")
