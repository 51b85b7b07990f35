"""Demo checkpoints: reproducible, loadable by transformers, and with text that neither ends nor repeats at once."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from splitserve.errors import ConfigError
from splitserve.models.config import load_model_config
from splitserve.models.demo import SHAPES, demo_tensor, write_demo_model
from splitserve.models.layers.weight import Role, Weight

pytestmark = pytest.mark.usefixtures("one_thread")


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def test_the_same_seed_gives_the_same_bytes_in_another_process(tiny_qwen3: Path, tmp_path: Path) -> None:
    program = f"from splitserve.models.demo import write_demo_model; write_demo_model({str(tmp_path / 'again')!r})"
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=100)
    assert digests(tmp_path / "again") == digests(tiny_qwen3)


def test_another_seed_gives_other_weights(tiny_qwen3: Path, tmp_path: Path) -> None:
    other = digests(write_demo_model(tmp_path, seed=1))
    assert other["model.safetensors"] != digests(tiny_qwen3)["model.safetensors"]


def test_rewriting_replaces_shards_and_index(tmp_path: Path) -> None:
    write_demo_model(tmp_path, max_shard_bytes=1_000_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, framework="pt") as opened:
            assert name in opened.keys()  # noqa: SIM118
    write_demo_model(tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert not list(tmp_path.glob("*.partial")) and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", ["tiny_qwen3", "tiny_llama"])
def test_transformers_loads_it_and_its_text_wanders(request: pytest.FixtureRequest, name: str) -> None:
    import transformers

    path = request.getfixturevalue(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    ids = tokenizer("The river waits for")["input_ids"]
    output = model.generate(torch.tensor([ids]), max_new_tokens=64, do_sample=False)[0, len(ids) :].tolist()
    assert len(output) == 64, "an end-of-sequence token came too soon"
    assert len(set(output)) > 16
    assert max(output) < len(tokenizer)


@pytest.mark.parametrize("name", ["tiny_qwen3", "tiny_llama"])
def test_the_tokenizer_round_trips_and_has_a_chat_template(request: pytest.FixtureRequest, name: str) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(request.getfixturevalue(name))
    text = "Hello, wörld!\n\tdef f(x): return x ** 2  # 数字 123456 🙂"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    prose = "the engineer measures the whole story before sunrise"
    assert len(tokenizer(prose)["input_ids"]) < len(prose) / 3
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert "Be brief." in prompt and "assistant" in prompt
    assert tokenizer.eos_token_id in load_model_config(request.getfixturevalue(name)).eos_token_ids
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 2


def test_the_default_takes_a_few_megabytes(tiny_qwen3: Path) -> None:
    assert sum(path.stat().st_size for path in tiny_qwen3.iterdir()) < 8_000_000


def test_true_shapes_have_their_true_number_of_parameters() -> None:
    expected = {"qwen3-0.6b": 596_049_920, "llama-3.2-1b": 1_235_814_400, "llama-3.1-8b": 8_030_261_248}
    for name, count in expected.items():
        sizes = SHAPES[name]
        query, key = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        layer = sizes.hidden_size * (2 * query + 2 * key + 3 * sizes.intermediate_size + 2)
        layer += 2 * sizes.head_dim if sizes.architecture == "qwen3" else 0
        tables = 1 if sizes.tie_word_embeddings else 2
        total = sizes.num_layers * layer + sizes.hidden_size * (tables * sizes.vocab_size + 1)
        assert total == count, name


def test_a_tensor_depends_on_seed_and_name_alone() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    weight = Weight(name, (64, 33), Role.PROJECTION)
    tensor = demo_tensor(weight, 10, 5)
    assert torch.equal(tensor, demo_tensor(weight, 10, 5))
    assert not torch.equal(tensor, demo_tensor(weight, 10, 6))
    assert not torch.equal(tensor, demo_tensor(replace(weight, name=name.replace("0", "1")), 10, 5))
    assert abs(float(tensor.mean())) < 0.05 and 0.2 < float(tensor.std()) < 0.35


def test_bfloat16_and_unknown_choices(tmp_path: Path) -> None:
    assert load_model_config(write_demo_model(tmp_path, dtype="bfloat16")).dtype == "bfloat16"
    with pytest.raises(ConfigError, match="choose one of tiny"):
        write_demo_model(tmp_path, shape="huge")
    with pytest.raises(ConfigError, match="choose qwen3 or llama"):
        write_demo_model(tmp_path, architecture="gpt")
    with pytest.raises(ConfigError, match="of the qwen3 family"):
        write_demo_model(tmp_path, shape="qwen3-0.6b", architecture="llama")
    with pytest.raises(ConfigError, match="choose one of auto"):
        write_demo_model(tmp_path, dtype="int8")
    with pytest.raises(ConfigError, match="max_shard_bytes"):
        write_demo_model(tmp_path, max_shard_bytes=0)
