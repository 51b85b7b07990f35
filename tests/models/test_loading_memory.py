"""Host memory that loading takes beside the weights: parameters come one after another, whatever the files hold."""

from pathlib import Path

import pytest

from loading_memory import measure, write_model

MIB = 1 << 20
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "vocab_size": 2000,
    "moe_intermediate_size": 128,
    "num_experts": 32,
}
LAYER_BYTES = 32 * 3 * 512 * 128 * 4  # of the experts, in float32
NUM_WEIGHT_BYTES = 6 * LAYER_BYTES
MOST_BYTES = 3 * LAYER_BYTES  # beside the weights: experts one by one, stacked, and joined; what the code itself takes


@pytest.mark.parametrize(("backend", "device"), [("transformers", "meta"), ("native", "cpu")])
def test_loading_holds_a_bounded_part_of_the_model(backend: str, device: str, checkpoint: Path) -> None:
    """The device "meta" stands for one that isn't the host: all that arrives there is gone from host memory."""
    assert MOST_BYTES < 0.6 * NUM_WEIGHT_BYTES
    found = measure(checkpoint, backend, device=device, dtype="float32")
    assert found["extra"] < MOST_BYTES, {name: value // MIB for name, value in found.items()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "experts"
    write_model(path, "Qwen3MoeForCausalLM", {**SIZES, "num_experts_per_tok": 4}, 8 * MIB)
    assert len(list(path.glob("*.safetensors"))) > 6
    return path
