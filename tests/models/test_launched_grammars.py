"""Grammars in steps that a GPU is given ahead: their draws wait for the tokens of the step before, on the host."""

from pathlib import Path

import pytest
import torch

from cpu_runner import BLOCK_SIZE
from feature_examples import vocabulary
from splitserve.kernels.registry import select_kernels
from splitserve.models.config import load_model_config
from splitserve.models.runner.cuda import CudaRunner
from splitserve.models.runner.launched import PendingStep, StepBefore
from splitserve.models.weights.loader import load_model
from splitserve.protocol.request import SamplingParams
from splitserve.protocol.sampling_features import Constraint
from splitserve.protocol.step import UNKNOWN_TOKEN, FeatureStart, FeatureUse, SampleSpec, ScheduledChunk, StepPlan

PROMPT = [(37 * number) % 400 for number in range(20)]
GRAMMARS = ['start: ("ab" | "cd" | "e"){40}', "start: /[a-d]{90}/", 'start: ("abcd" | /g+h/){40}', None]
NUM_NEW = 24


class _Event:
    """An event that a test waits for."""

    def __init__(self) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


def test_tokens_of_the_step_before_are_known_once_it_is_over() -> None:
    event = _Event()
    numbers = torch.tensor([7, -1, 9, 1234, 5678])  # three tokens, one of which couldn't be drawn, and scores
    pending = PendingStep(StepPlan([]), numbers, None, event, {}, 0.0)  # type: ignore[arg-type]
    assert StepBefore(pending, {0: 0, 2: 1, 3: 2}).tokens() == {0: 7, 2: 0, 3: 9}
    assert event.waits == 1
    assert StepBefore(None, {}).tokens() == {}


def chunks(outputs: list[list[int]], *, ahead: bool) -> list[ScheduledChunk]:
    """Return a decode chunk of each sequence; ``ahead``: the step before draws its last token."""
    made = []
    for index, (grammar, output) in enumerate(zip(GRAMMARS, outputs, strict=True)):
        position = len(PROMPT) + len(output) + ahead
        use = None
        if grammar is not None:
            params = SamplingParams(max_tokens=99, constraint=Constraint(grammar, (38, 39)))
            use = FeatureUse(index, None if output or ahead else FeatureStart(params, PROMPT, []))
        spec = SampleSpec(0.9, 0, 1.0, index, 0, position, use, 2 if index == 1 else None)
        last = UNKNOWN_TOKEN if ahead else [*PROMPT, *output][-1]
        blocks = list(range(8 * index, 8 * index + position // BLOCK_SIZE + 1))
        made.append(ScheduledChunk([last], position - 1, blocks, spec, index if ahead else None))
    return made


def decoded(runner: CudaRunner, *, ahead: bool) -> list[list[int]]:
    """Return the outputs of sequences, with and without grammars. ``ahead``: launch each step during the one before."""
    prompts = [ScheduledChunk(PROMPT[:-1], 0, [8 * index, 8 * index + 1], None) for index in range(len(GRAMMARS))]
    runner.run(StepPlan(prompts))
    outputs: list[list[int]] = [[] for _ in GRAMMARS]
    pending = runner.launch(StepPlan(chunks(outputs, ahead=False)))
    for _ in range(NUM_NEW - 1):
        following = runner.launch(StepPlan(chunks(outputs, ahead=True))) if ahead else None
        add(outputs, pending)
        pending = following or runner.launch(StepPlan(chunks(outputs, ahead=False)))
    add(outputs, pending)
    return outputs


def add(outputs: list[list[int]], step: PendingStep) -> None:
    for output, draw in zip(outputs, step.wait().draws, strict=True):
        assert draw is not None and not draw.error
        output.append(draw.token_id)


@pytest.mark.gpu
@pytest.mark.parametrize("has_graphs", [False, True])
def test_steps_launched_ahead_draw_the_tokens_of_steps_one_by_one(tiny_qwen3: Path, has_graphs: bool) -> None:
    device, config = torch.device("cuda", 0), load_model_config(tiny_qwen3)
    kernels = select_kernels(device, torch.float32, {"make_attention": "triton"}, config.head_dim)
    model = load_model(tiny_qwen3, config, dtype=torch.float32, device=device, kernels=kernels)
    shape = (8 * len(GRAMMARS), config.num_layers, config.num_kv_heads, 2, BLOCK_SIZE, config.head_dim)
    memory = torch.zeros(shape, device=device)
    runner = CudaRunner(model, memory, max_num_seqs=8, max_model_len=512, model_dir=vocabulary(40))
    if has_graphs:
        runner.capture([4])
    expected = decoded(runner, ahead=False)
    assert all(token < 40 for output in expected[:3] for token in output), "letters of the vocabulary"
    assert decoded(runner, ahead=True) == expected
