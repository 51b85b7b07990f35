"""Every family on a GPU, with steps from CUDA graphs: its greedy tokens in float32 are those of transformers. Prompts'
last chunks are replayed, too, those before them aren't."""

import random
from pathlib import Path

import pytest
import torch

from family_runs import BLOCK_SIZE, NUM_BLOCKS, greedy
from serving import transformers_greedy
from splitserve.models.config import load_model_config
from splitserve.models.runner.cuda import CudaRunner
from splitserve.models.runner.graph_sizes import MixedSize
from splitserve.models.weights.loader import load_model
from transformers_models import NATIVE, write_transformers_model

NUM_NEW_TOKENS = 12
PROMPTS = [random.Random(length).choices(range(2000), k=length) for length in (1, 17, 60)]


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", NATIVE)
def test_tokens_are_those_of_transformers(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_transformers_model(tmp_path, architecture)
    expected = transformers_greedy(tmp_path, PROMPTS, NUM_NEW_TOKENS)
    device, config = torch.device("cuda", 0), load_model_config(tmp_path)
    model = load_model(tmp_path, config, dtype=torch.float32, device=device)
    memory = torch.full((NUM_BLOCKS, *model.config.block_shape(BLOCK_SIZE)), torch.nan, device=device)
    runner = CudaRunner(model, memory, max_num_seqs=4, max_model_len=NUM_BLOCKS * BLOCK_SIZE)
    runner.capture([1, 4])
    runner.capture_mixed([MixedSize(0, 20)])
    replayed: list[MixedSize] = []
    replay = runner._replay_mixed
    monkeypatch.setattr(runner, "_replay_mixed", lambda *step: replayed.append(step[0].size) or replay(*step))
    for prompt, reference in zip(PROMPTS, expected, strict=True):
        tokens = greedy(runner, prompt, 24, NUM_NEW_TOKENS)
        assert reference.agrees(tokens), f"prompt of {len(prompt)}: {tokens} instead of {reference.token_ids}"
    assert replayed == [MixedSize(0, 20)] * sum(len(prompt) > 1 for prompt in PROMPTS)
