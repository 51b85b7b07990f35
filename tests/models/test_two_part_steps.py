"""The CUDA runner's forward passes apart from their draws: which steps have them, and that they draw the same."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch

from cpu_runner import BLOCK_SIZE
from host_runner import HostRunner
from splitserve.kernels.registry import select_kernels
from splitserve.models.config import load_model_config
from splitserve.models.runner.cuda import CudaRunner
from splitserve.models.runner.launched import LaunchedForward, PendingStep, StepBefore
from splitserve.models.weights.loader import load_model
from splitserve.protocol.request import SamplingParams
from splitserve.protocol.step import (
    UNKNOWN_TOKEN,
    BlockCopy,
    FeatureStart,
    FeatureUse,
    SampleSpec,
    ScheduledChunk,
    ScoredTokens,
    StepPlan,
)

PROMPTS = [[(37 * number + 11 * index) % 400 for number in range(20 + index)] for index in range(5)]
NUM_NEW = 40


def decode(index: int, position: int, token: int | None, previous: int | None = None) -> ScheduledChunk:
    """A chunk of sequence ``index`` whose token is at ``position``; None: chunk ``previous`` of the step before draws
    it. Every other sequence draws at random."""
    spec = SampleSpec(0.9 * (index % 2), 0, 0.95, index, 0, position + 1)
    blocks = list(range(8 * index, 8 * index + position // BLOCK_SIZE + 1))
    return ScheduledChunk([UNKNOWN_TOKEN if token is None else token], position, blocks, spec, previous)


def test_steps_that_may_take_longer_are_launched_as_a_whole(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_model_config(tiny_qwen3)
    device = torch.device("cpu")
    kernels = select_kernels(device, torch.float32, {}, config.head_dim)
    model = load_model(tiny_qwen3, config, dtype=torch.float32, device=device, kernels=kernels)
    shape = (64, config.num_layers, config.num_kv_heads, 2, BLOCK_SIZE, config.head_dim)
    runner = HostRunner(model, torch.zeros(shape))
    runner._graphs = {4: None}  # type: ignore[dict-item]
    plain = decode(0, 9, 5)
    assert plain.sample is not None
    start = FeatureStart(SamplingParams(max_tokens=9, presence_penalty=0.5), [1, 2], [])
    featured = msgspec.structs.replace(plain.sample, features=FeatureUse(0, start))
    change = msgspec.structs.replace
    for chunk in (
        change(plain, sample=featured),
        change(plain, others=(featured,)),
        change(plain, gates=(3,)),
        change(plain, copies=(BlockCopy(0, 1, 2),)),
        change(plain, scored=ScoredTokens(1, 0, [5])),
        change(plain, token_ids=[5, 6]),
        change(plain, sample=None),
    ):
        assert runner.launch_forward(StepPlan([plain, chunk])) is None
    assert runner.launch_forward(StepPlan([plain], released=(7,))) is None
    assert runner.launch_forward(StepPlan([plain] * 5)) is None, "no graph is as large"
    launched = LaunchedForward(runner._launch_draws, StepPlan([]), StepBefore(None, {}), None, None, 0.0)
    monkeypatch.setattr(runner, "_launch_forward", lambda plan: launched)
    assert runner.launch_forward(StepPlan([plain] * 3)) is launched
    runner.rehearse()  # without a step before it there is nothing to do


@pytest.mark.gpu
def test_two_parts_draw_what_whole_launches_draw(tiny_qwen3: Path) -> None:
    device, config = torch.device("cuda", 0), load_model_config(tiny_qwen3)
    kernels = select_kernels(device, torch.float32, {"make_attention": "triton"}, config.head_dim)
    model = load_model(tiny_qwen3, config, dtype=torch.float32, device=device, kernels=kernels)
    shape = (8 * len(PROMPTS), config.num_layers, config.num_kv_heads, 2, BLOCK_SIZE, config.head_dim)
    runner = CudaRunner(model, torch.zeros(shape, device=device), max_num_seqs=8, max_model_len=512)
    runner.capture([2, 8])
    expected = outputs(runner, None)
    with ThreadPoolExecutor(1) as draws:
        assert outputs(runner, draws) == expected


def outputs(runner: CudaRunner, draws: ThreadPoolExecutor | None) -> list[list[int]]:
    """Decode with each step launched during the one before; the first sequences leave in between. ``draws``: the thread
    that launches the draws, while the device is held up; None: steps are launched as a whole."""
    fill = [ScheduledChunk(prompt[:-1], 0, [8 * i, 8 * i + 1, 8 * i + 2], None) for i, prompt in enumerate(PROMPTS)]
    runner.run(StepPlan(fill))

    def launch(plan: StepPlan) -> PendingStep:
        if draws is None:
            return runner.launch(plan)
        with torch.cuda.stream(runner._stream):
            torch.cuda._sleep(1_000_000)  # clock cycles: the rehearsal's copies wait behind the step before
        runner.rehearse()
        forward = runner.launch_forward(plan)
        assert forward is not None
        return draws.submit(forward.launch_draws).result()

    last = list(range(len(PROMPTS)))
    steps = [(last, launch(StepPlan([decode(i, len(PROMPTS[i]) - 1, PROMPTS[i][-1]) for i in last])))]
    for number in range(1, NUM_NEW):
        staying = [i for i in last if number < 20 or i >= 3]
        plan = [decode(i, len(PROMPTS[i]) - 1 + number, None, last.index(i)) for i in staying]
        steps.append((staying, launch(StepPlan(plan))))
        last = staying
    found: list[list[int]] = [[] for _ in PROMPTS]
    for sequences, step in steps:
        for index, draw in zip(sequences, step.wait().draws, strict=True):
            assert draw is not None
            found[index].append(draw.token_id)
    return found
