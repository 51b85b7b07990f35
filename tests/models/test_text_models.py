"""Checkpoints with other parts, vision for one, whose text model alone is served, with the tokens of transformers."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from family_runs import greedy, make_runner
from splitserve.common.errors import CheckpointError
from splitserve.models.catalogue import architectures
from splitserve.models.config import load_model_config
from splitserve.models.families.registry import TEXT_BY_TYPE
from splitserve.orchestration.doctor.model import look_at_model

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 500
PROMPT = random.Random(0).choices(range(VOCAB_SIZE), k=40)
NUM_NEW_TOKENS = 12
TEXT = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "sliding_window": 17,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
VISION |= {"image_size": 28, "patch_size": 14}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
TEXTS: dict[tuple[str, str], dict[str, Any]] = {
    ("Mistral3", "mistral"): {},
    ("Mistral3", "ministral3"): {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5}},
    ("Cohere2Vision", "cohere2"): {"layer_types": ["sliding_attention", "full_attention"]},
}


def make_model(name: str, kind: str) -> Any:
    """Build transformers' model of both parts, with a text model of type ``kind``."""
    import transformers

    vision = {"model_type": "pixtral" if name == "Mistral3" else "siglip_vision_model", **VISION}
    text = {"model_type": kind, **TEXT, **TEXTS[name, kind]}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


def test_each_is_tested() -> None:
    tested = {(f"{name}ForConditionalGeneration", kind) for name, kind in TEXTS}
    assert tested == {(name, kind) for name, by_type in TEXT_BY_TYPE.items() for kind in by_type}
    listed = {each.name: each.note for each in architectures()}
    note = "The text model alone, as MistralForCausalLM or Ministral3ForCausalLM."
    assert listed["Mistral3ForConditionalGeneration"] == note


@pytest.mark.parametrize(("name", "kind"), TEXTS)
def test_tokens_are_those_of_transformers(name: str, kind: str, tmp_path: Path) -> None:
    model = make_model(name, kind)
    model.save_pretrained(tmp_path)
    prompt = torch.tensor([PROMPT])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NUM_NEW_TOKENS, do_sample=False
    )
    served = load_model_config(tmp_path)
    assert (served.architecture, served.text_of) == (kind, f"{name}ForConditionalGeneration")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert not look_at_model(str(tmp_path)).problems
    assert greedy(make_runner(tmp_path), PROMPT, 32, NUM_NEW_TOKENS) == output[0, len(PROMPT) :].tolist()


def test_a_head_that_the_whole_wrongly_calls_tied_is_used(tmp_path: Path) -> None:
    model = make_model("Mistral3", "mistral")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0).clone())
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["tie_word_embeddings"] and not raw["text_config"]["tie_word_embeddings"]
    with torch.no_grad():
        logits = type(model).from_pretrained(tmp_path)(torch.tensor([PROMPT])).logits
    assert not load_model_config(tmp_path).tie_word_embeddings
    assert greedy(make_runner(tmp_path), PROMPT, 32, 1) == [int(logits[0, -1].argmax())]


def test_the_wholes_end_tokens_come_before_the_texts(tmp_path: Path) -> None:
    text = {"model_type": "mistral", **TEXT, "bos_token_id": 1, "eos_token_id": 2}
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "eos_token_id": [2, 106], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = load_model_config(tmp_path)
    assert (config.eos_token_ids, config.bos_token_id) == ((2, 106), 1)
    (tmp_path / "config.json").write_text(json.dumps({**whole, "eos_token_id": None, "bos_token_id": 3}))
    config = load_model_config(tmp_path)
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 3)


def test_a_text_model_of_another_type_is_refused(tmp_path: Path) -> None:
    text = {"model_type": "llama", **TEXT}
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"text_config.model_type is 'llama'; supported are mistral, ministral3"):
        load_model_config(tmp_path)
