"""A model of transformers' code as runners use it: scored prompts, drawn tokens on the device, bad files."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from splitserve.common.errors import CheckpointError
from splitserve.models.config import load_model_config
from splitserve.models.runner.cuda import CudaRunner
from splitserve.models.runner.runner import ModelRunner
from splitserve.models.transformers_backend import model as backend_model
from splitserve.models.transformers_backend.loading import load_transformers_model
from splitserve.protocol.step import SampleSpec, ScheduledChunk, ScoredTokens, StepPlan
from transformers_models import make_model

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
BLOCK_SIZE = 16
PROMPT = random.Random(3).choices(range(300, 1500), k=37)
NUM_TOP = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("transformers") / "exaone"
    make_model("Exaone4ForCausalLM").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> torch.Tensor:
    """Logits [len(PROMPT), vocab] of transformers' own attention."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


def make_runner(path: Path, device: torch.device = CPU) -> ModelRunner:
    model = load_transformers_model(path, load_model_config(path), dtype=torch.float32, device=device)
    memory = torch.full((8, *model.config.block_shape(BLOCK_SIZE)), torch.nan, device=device)
    if device.type == "cuda":
        return CudaRunner(model, memory, max_num_seqs=4, max_model_len=100)
    return ModelRunner(model, memory)


@pytest.mark.parametrize("at_once", [128, 5])
def test_scored_prompts_have_the_log_probabilities_of_transformers(
    checkpoint: Path, expected: torch.Tensor, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Score a chunk that draws nothing, then one that draws, in pieces of any size."""
    monkeypatch.setattr(backend_model, "SCORED_ROWS_AT_ONCE", at_once)
    runner = make_runner(checkpoint)
    scores = torch.log_softmax(expected, 1)
    for start, end in ((0, 20), (20, len(PROMPT))):
        spec = SampleSpec(0.0, 0, 1.0, 0, 0, end) if end == len(PROMPT) else None
        scored = ScoredTokens(NUM_TOP, 0, PROMPT[start + 1 : end + 1])
        output = runner.run(StepPlan([ScheduledChunk(PROMPT[start:end], start, range(3), spec, scored=scored)]))
        found = output.scores[0]
        assert found.num_positions == len(scored.token_ids)
        for row, token, (values, _) in zip(scores[start:], scored.token_ids, found.rows(), strict=False):
            assert values[0] == pytest.approx(float(row[token]), abs=1e-3)
            assert values[1:] == pytest.approx(row.topk(NUM_TOP).values.tolist(), abs=1e-3)
        if spec is not None:
            assert output.token_ids == [int(expected[-1].argmax())]


@pytest.mark.on_gpu
def test_steps_are_those_of_transformers_on_any_device(checkpoint: Path, expected: torch.Tensor) -> None:
    runner = make_runner(checkpoint, DEVICE)
    plain = SampleSpec(0.0, 0, 1.0, 0, 0, 21)
    first = ScheduledChunk(PROMPT[:21], 0, range(3), plain)
    other = ScheduledChunk(PROMPT, 0, range(3, 6), SampleSpec(0.0, 0, 1.0, 0, 0, len(PROMPT)))
    assert runner.run(StepPlan([first, other])).token_ids == [int(expected[20].argmax()), int(expected[-1].argmax())]


def test_tokens_drawn_on_the_device_are_looked_up_there(checkpoint: Path) -> None:
    runner = make_runner(checkpoint)
    inputs = torch.tensor([[5, 0, 7], [0, 17, 2], [-1, 1, -1], [1, 2, 3]])
    rows = runner.model.begin_step(inputs, torch.tensor([11, 12]), runner.cache.shapes)
    slots = runner.cache.shapes[0].slots(inputs[3], inputs[1] % BLOCK_SIZE)
    known = runner.model.tokens(torch.tensor([5, 12, 7]), inputs[1], slots.unsqueeze(0))
    assert isinstance(rows, backend_model.PlacedRows) and isinstance(known, backend_model.PlacedRows)
    for field in ("hidden", "positions", "slots"):
        assert torch.equal(getattr(rows, field), getattr(known, field)), field


@pytest.mark.parametrize("change", ["missing", "surplus", "misshapen", "damaged"])
def test_bad_files_are_refused_by_name(checkpoint: Path, tmp_path: Path, change: str) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "surplus":
        tensors["model.layers.1.self_attn.extra"] = torch.zeros(3)
        name = "model.layers.1.self_attn.extra"
    elif change == "misshapen":
        tensors[name] = tensors[name][:5].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if change == "damaged":
        file = tmp_path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        name = "model.safetensors is truncated"
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(CheckpointError, match=name):
        load_transformers_model(tmp_path, load_model_config(tmp_path), dtype=torch.float32, device=CPU)


def test_random_weights_need_no_files(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(json.loads((checkpoint / "config.json").read_text())))
    config = load_model_config(tmp_path)
    model = load_transformers_model(tmp_path, config, dtype=torch.float32, device=CPU, load_format="dummy")
    assert model.config.num_layers == 3
