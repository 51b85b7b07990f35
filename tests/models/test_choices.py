"""Several choices of one prompt in the runner: draws from the same logits, and copies of blocks."""

from pathlib import Path

import pytest
import torch

from cpu_runner import BLOCK_SIZE, make_runner
from splitserve.kernels.registry import select_kernels
from splitserve.models.config import load_model_config
from splitserve.models.runner.cuda import CudaRunner
from splitserve.models.runner.runner import ModelRunner
from splitserve.models.weights.loader import load_model
from splitserve.protocol.request import SamplingParams
from splitserve.protocol.step import (
    UNKNOWN_TOKEN,
    BlockCopy,
    FeatureStart,
    FeatureUse,
    SampleSpec,
    ScheduledChunk,
    StepPlan,
)

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [(37 * number) % 2000 for number in range(2 * BLOCK_SIZE + 5)]
PARAMS = SamplingParams(max_tokens=9, temperature=0.9, seed=5, repetition_penalty=1.3)
BLOCKS = [[7, 3, 9], [7, 3, 4], [7, 3, 11]]
NUM_NEW = 6


def spec(choice: int, position: int, output: list[int], state_id: int, *, begins: bool) -> SampleSpec:
    start = FeatureStart(PARAMS, PROMPT, output) if begins else None
    return SampleSpec(0.9, 0, 1.0, 5, choice, position, FeatureUse(state_id, start), num_top_logprobs=2)


def alone(runner: ModelRunner, choice: int) -> list[int]:
    """Return the tokens of a choice whose prompt is computed for it alone."""
    output: list[int] = []
    for _ in range(NUM_NEW):
        tokens = [*PROMPT, *output]
        drawn = spec(choice, len(tokens), list(output), 1, begins=True)
        (draw,) = runner.run(StepPlan([ScheduledChunk(tokens, 0, [20, 21, 22], drawn)])).draws
        assert draw is not None
        output.append(draw.token_id)
    return output


def together(runner: ModelRunner, *, runs_ahead: bool = False) -> list[list[int]]:
    """Return the tokens of all choices, which share the first two blocks and copy the third.

    ``runs_ahead``: the first choice's second token is drawn by a step that doesn't know the first.
    """
    first = ScheduledChunk(
        PROMPT,
        0,
        BLOCKS[0],
        spec(0, len(PROMPT), [], 1, begins=True),
        others=tuple(spec(choice, len(PROMPT), [], 10 + choice, begins=True) for choice in (1, 2)),
    )
    (draw,) = runner.run(StepPlan([first])).draws
    assert draw is not None and len(draw.others) == 2
    assert all(each.logprobs is not None for each in (draw, *draw.others))
    outputs = [[draw.token_id], *([other.token_id] for other in draw.others)]
    if runs_ahead:
        ahead = ScheduledChunk(
            [UNKNOWN_TOKEN], len(PROMPT), BLOCKS[0], spec(0, len(PROMPT) + 1, [], 1, begins=False), 0
        )
        (following,) = runner.run(StepPlan([ahead])).draws
        assert following is not None
        outputs[0].append(following.token_id)
    while running := [choice for choice in range(3) if len(outputs[choice]) < NUM_NEW]:
        chunks = []
        for choice in running:
            output = outputs[choice]
            position = len(PROMPT) + len(output)
            begins = choice > 0 and len(output) == 1
            copies = (BlockCopy(0, BLOCKS[0][2], BLOCKS[choice][2]),) if begins else ()
            drawn = spec(choice, position, list(output), 1 + choice, begins=begins)
            chunks.append(ScheduledChunk([output[-1]], position - 1, BLOCKS[choice], drawn, copies=copies))
        released = (11, 12) if len(outputs[1]) == 1 else ()
        for choice, drawing in zip(running, runner.run(StepPlan(chunks, released)).draws, strict=True):
            assert drawing is not None and not drawing.others
            outputs[choice].append(drawing.token_id)
    return outputs


def test_choices_draw_what_each_draws_alone(tiny_qwen3: Path) -> None:
    runner = make_runner(tiny_qwen3)
    outputs = together(runner)
    assert outputs == [alone(make_runner(tiny_qwen3), choice) for choice in range(3)]
    assert len({tuple(output) for output in outputs}) == 3
    assert runner.sampler.num_states == 3, "the states of the first draws are given up"


def test_copies_reach_every_group() -> None:
    from splitserve.models.runner.cache import RunnerCache

    groups = (torch.randn(6, 2, 3), torch.randn(4, 1, 5))
    before = [group.clone() for group in groups]
    cache = RunnerCache(groups, (), (), None)  # type: ignore[arg-type]
    copies = (BlockCopy(0, 5, 2), BlockCopy(1, 0, 3))
    cache.copy_blocks([ScheduledChunk([1], 0, [2], None), ScheduledChunk([1], 0, [2], None, copies=copies)])
    for group, old, (source, target) in zip(groups, before, [(5, 2), (0, 3)], strict=True):
        expected = old.clone()
        expected[target] = old[source]
        assert torch.equal(group, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("has_graphs", [False, True])
def test_choices_on_a_gpu(tiny_qwen3: Path, has_graphs: bool) -> None:
    device, config = torch.device("cuda", 0), load_model_config(tiny_qwen3)
    kernels = select_kernels(device, torch.float32, {"make_attention": "triton"}, config.head_dim)
    model = load_model(tiny_qwen3, config, dtype=torch.float32, device=device, kernels=kernels)
    shape = (32, config.num_layers, config.num_kv_heads, 2, BLOCK_SIZE, config.head_dim)
    runner = CudaRunner(model, torch.zeros(shape, device=device), max_num_seqs=8, max_model_len=512)
    if has_graphs:
        runner.capture([4])
    expected = [alone(runner, choice) for choice in range(3)]
    assert together(runner) == expected
    assert together(runner, runs_ahead=True) == expected
