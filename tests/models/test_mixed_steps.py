"""Mixed steps filled up to the size of a CUDA graph give the logits and the KV of plain ones."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attention_cases import rms
from host_runner import HostRunner
from splitserve.kernels.registry import OPERATIONS, select_kernels
from splitserve.models.config import load_model_config
from splitserve.models.demo import checkpoint as demo
from splitserve.models.runner import cuda
from splitserve.models.runner.cache import paged_batch
from splitserve.models.runner.cuda import CudaRunner
from splitserve.models.runner.graph_sizes import MixedSize, least_tokens, longer_tokens, mixed_sizes
from splitserve.models.runner.graphs import MixedGraph
from splitserve.models.runner.runner import ModelRunner
from splitserve.models.weights.loader import load_model
from splitserve.protocol.placement.chunk_bounds import longer_by, sized_tokens
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.step import SampleSpec, ScheduledChunk, StepPlan

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.on_gpu]

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
BLOCK_SIZE = 16
SHAPE = demo.DemoShape(64, 2, 4, 2, 16, 96, 600, 512, 1e4, True, "float32", "llama")
GREEDY = SampleSpec(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0, position=1)


def chunk(start: int, count: int, blocks: list[int], *, draws: bool = True) -> ScheduledChunk:
    tokens = [(7 * (start + index) + blocks[0]) % 600 for index in range(count)]
    return ScheduledChunk(tokens, start, blocks, GREEDY if draws else None)


PROMPTS = [chunk(0, 21, [1, 2]), chunk(0, 16, [3, 9]), chunk(0, 40, [4, 5, 6])]
STEPS = [
    [chunk(21, 1, [1, 2]), chunk(16, 1, [3, 9]), chunk(0, 20, [7, 8], draws=False)],
    [chunk(22, 1, [1, 2]), chunk(17, 1, [3, 9]), chunk(40, 1, [4, 5, 6]), chunk(20, 3, [7, 8]), chunk(0, 2, [10])],
    [chunk(41, 1, [4, 5, 6]), chunk(2, 11, [10], draws=False)],
    [chunk(13, 3, [10]), chunk(0, 9, [11], draws=False)],
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(demo.SHAPES, "small", SHAPE)
        return demo.write_demo_model(tmp_path_factory.mktemp("checkpoints") / "small", shape="small")


@pytest.mark.skipif(ON_GPU, reason="under Triton's interpreter; the next test is for GPUs")
def test_filled_up_steps(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from splitserve.kernels.triton import operations as triton_ops
    from splitserve.kernels.triton.attention.paged import TritonPagedAttention
    from splitserve.kernels.triton.attention.qkv import prepare_qkv

    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    plain = select_kernels(DEVICE, torch.float32, dict.fromkeys(OPERATIONS, "reference"))
    kernels = replace(
        plain,
        begin_step=triton_ops.begin_step,
        prepare_qkv=prepare_qkv,
        make_attention=partial(TritonPagedAttention),
    )
    config = load_model_config(checkpoint)
    models = [
        load_model(checkpoint, config, dtype=torch.float32, device=DEVICE, kernels=one) for one in (plain, kernels)
    ]
    models[1]._rotary.table = torch.stack(models[1]._rotary(torch.arange(config.max_position_embeddings)), 1)
    kv_caches = [torch.zeros((12, 2, 2, 2, BLOCK_SIZE, 16)) for _ in models]
    eager, filled = ModelRunner(models[0], kv_caches[0]), HostRunner(models[1], kv_caches[1])
    eager.run(StepPlan(PROMPTS))
    kv_caches[1].copy_(kv_caches[0])
    for step, size in zip(STEPS, [MixedSize(2, 20), MixedSize(8, 64), MixedSize(4, 70), MixedSize(0, 15)], strict=True):
        with torch.inference_mode():
            expected = models[0].forward(eager._batch(step), eager.cache.kv_layers, eager.cache.attention)
        torch.testing.assert_close(filled.filled_up(step, size), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(kv_caches[1], kv_caches[0], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_graphs_of_mixed_steps_give_the_tokens_of_eager_ones(checkpoint: Path, dtype: torch.dtype) -> None:
    config = load_model_config(checkpoint)
    kernels = select_kernels(DEVICE, dtype, {"make_attention": "triton"}, config.head_dim)
    model = load_model(checkpoint, config, dtype=dtype, device=DEVICE, kernels=kernels)
    runners = [
        CudaRunner(
            model,
            torch.zeros((12, 2, 2, 2, BLOCK_SIZE, 16), dtype=dtype, device=DEVICE),
            max_num_seqs=8,
            max_model_len=512,
        )
        for _ in range(2)
    ]
    runners[1].capture([8])
    runners[1].capture_mixed(mixed_sizes(8, 64, 128))
    for step in [PROMPTS, *STEPS]:
        eager, graph = (runner.run(StepPlan(step)) for runner in runners)
        assert eager == graph
        torch.testing.assert_close(runners[1].cache.groups[0][1:], runners[0].cache.groups[0][1:], rtol=2e-2, atol=5e-2)


@pytest.mark.gpu
def test_graphs_of_both_forms_compute_what_eager_steps_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flashinfer")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FlashAttention 3 is for compute capability 9.0")
    shape = demo.DemoShape(256, 2, 32, 8, 128, 96, 600, 2048, 1e4, True, "float32", "llama")
    monkeypatch.setitem(demo.SHAPES, "many heads", shape)
    checkpoint = demo.write_demo_model(tmp_path / "model", shape="many heads")
    config, dtype = load_model_config(checkpoint), torch.bfloat16
    kernels = select_kernels(DEVICE, dtype, {"make_attention": "hybrid"}, config.head_dim)
    model = load_model(checkpoint, config, dtype=dtype, device=DEVICE, kernels=kernels)
    memory = [torch.zeros((200, 2, 8, 2, BLOCK_SIZE, 128), dtype=dtype, device=DEVICE) for _ in range(2)]
    eager, graphs = (CudaRunner(model, each, max_num_seqs=8, max_model_len=2048) for each in memory)
    graphs.capture([8])
    graphs.capture_mixed([MixedSize(0, 512), MixedSize(8, 320)])
    used: list[str] = []
    replay = graphs._replay_mixed

    def record(graph: MixedGraph, *step: Any) -> torch.Tensor:
        used.extend(type(plan).__name__ for plan in graph.plan.plans.values())
        return replay(graph, *step)

    monkeypatch.setattr(graphs, "_replay_mixed", record)
    long, other, third = list(range(1, 120)), list(range(120, 130)), list(range(130, 160))
    steps = [
        ([chunk(start, 512, long, draws=False)], form)
        for start, form in ((0, "TritonMixedPlan"), (512, "TritonMixedPlan"), (1024, "HybridMixedPlan"))
    ]
    steps += [
        ([chunk(0, 40, other)], "TritonMixedPlan"),
        ([chunk(40, 1, other), chunk(1536, 300, long, draws=False)], "HybridMixedPlan"),
        ([chunk(41, 1, other), chunk(0, 300, third, draws=False)], "TritonMixedPlan"),
    ]
    for step, form in steps:
        for runner in (eager, graphs):
            runner.run(StepPlan(step))
        assert used.pop() == form and not used
        first, second = (each[1:, 1].double() for each in memory)  # the second layer's: they depend on attention
        errors = (second - first).square().mean((1, 2, 4)).sqrt()  # of each token
        assert errors.max() <= 0.25 * rms(first)


def test_a_longer_prefill_is_replayed_where_that_is_quicker() -> None:
    assert least_tokens(1024, launch_seconds=0.030, launched_seconds=0.031, replay_seconds=0.012) == 1
    # The device is slower than the host: a replay saves the gaps, which pay for little padding
    assert least_tokens(1000, launch_seconds=0.012, launched_seconds=0.025, replay_seconds=0.024) == 960
    assert least_tokens(1000, launch_seconds=0.012, launched_seconds=0.023, replay_seconds=0.024) > 1000


class Device:
    """A clock, and a device's stream on which steps take ``seconds``; the host is done after ``host_seconds``."""

    def __init__(self) -> None:
        self.now = self.ends_at = 0.0

    def run(self, host_seconds: float, seconds: float) -> None:
        self.now += host_seconds
        self.ends_at = self.now - host_seconds + seconds

    def synchronize(self) -> None:
        self.now = max(self.now, self.ends_at)


def test_the_runner_measures_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    device, runner = Device(), HostRunner.__new__(HostRunner)
    monkeypatch.setattr(cuda.time, "perf_counter", lambda: device.now)
    runner._stream = device  # type: ignore[assignment]
    monkeypatch.setattr(runner, "_trial", lambda num_tokens: num_tokens)
    monkeypatch.setattr(runner, "_eager", lambda _chunks, _gates: device.run(0.012, 0.025))
    monkeypatch.setattr(runner, "_replay_mixed", lambda *_: device.run(0.001, 0.024))
    empty, below = torch.empty(0), [9000, 5000]

    def graph(size: MixedSize, form: int, least_tokens: int) -> MixedGraph:
        plan = SimpleNamespace(suits=lambda batches: batches[0].context_lens[0] < below[form])
        return MixedGraph(size, {}, empty, plan, empty, least_tokens)  # type: ignore[arg-type]

    small, large = MixedSize(0, 512), MixedSize(0, 1000)
    first, second, long = graph(small, 1, 1), graph(small, 0, 1), graph(large, 0, 960)
    assert runner._measured_least_tokens(long) == 960
    runner._mixed_graphs = {small: [first, second], large: [long]}
    runner.cache = SimpleNamespace(batches=lambda chunks: [paged_batch(chunks)])  # type: ignore[assignment]
    used = [runner._mixed_graph([chunk(0, count, [1])]) for count in (2, 512, 513, 959, 960, 1000, 1001)]
    assert used == [first] * 2 + [None] * 2 + [long] * 2 + [None]
    starts = [runner._mixed_graph([chunk(start, 512, [1])]) for start in (4000, 8000, 9000)]
    assert starts == [first, second, None], "the first form that suits the contexts"


@given(st.integers(1, 640), st.integers(1, 2048), st.floats(1e-4, 0.2), st.integers(0, 100_000))
def test_sized_steps_have_graphs(fixed: int, most: int, objective: float, start: int) -> None:
    """The scheduler asks for the sizes that are captured, up to the longest of these."""
    model = StepModel(4e-3, 1.5e-5, 3.1e-8, 2.4e-5, 1.3e-9, 1000)
    tokens = sized_tokens(model, 5e-3, start, objective, (fixed, max(fixed, most)))
    longer = longer_tokens(fixed, most)
    assert tokens <= fixed or tokens in longer or tokens > max(longer, default=fixed)
    assert tokens - fixed <= 0 or (tokens - fixed) % longer_by(fixed) == 0


def test_sizes_cover_the_limits() -> None:
    assert [size for size in mixed_sizes(8, 1024, 2048) if size.is_long] == [MixedSize(0, 1024), MixedSize(0, 2048)]
    beside = [MixedSize(d, t) for d in (8, 16, 32, 64) for t in (80, 160, 240, 320)]
    assert mixed_sizes(64, 320, 2048) == [MixedSize(0, t) for t in (64, 128, 256, 512, 1024, 2048)] + beside
    assert max(mixed_sizes(48, 512, 100)) == MixedSize(48, 512)
    longer = set(mixed_sizes(128, 320, 2048, 1000)) - set(mixed_sizes(128, 320, 2048))
    assert longer == {MixedSize(decodes, tokens) for decodes in (16, 64, 128) for tokens in (448, 576, 704, 832, 960)}
    assert max(size.num_tokens for size in mixed_sizes(128, 320, 100, 8192)) == 1088
    assert mixed_sizes(1, 3, 100) == [MixedSize(0, 64), MixedSize(0, 100), *(MixedSize(1, t) for t in (1, 2, 3))]
