"""Launches that wait for loads by groups of layers: on a GPU, and their steps without one."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from host_runner import HostRunner
from splitserve.kernels.registry import OPERATIONS, select_kernels
from splitserve.kvconnector.cuda.host_store import CudaHostStore
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.layout.numa_memory import HostMemory, node_of_device
from splitserve.kvconnector.tiers.host import load_gates
from splitserve.kvconnector.tiers.load_gates import LayerGroup, LoadGates
from splitserve.models.config import load_model_config
from splitserve.models.decoder import DecoderModel
from splitserve.models.demo import checkpoint as demo
from splitserve.models.runner.cuda import CudaRunner
from splitserve.models.runner.graph_sizes import MAX_MIXED_CHUNKS, MixedSize, mixed_sizes
from splitserve.models.runner.graphs import MixedGraph
from splitserve.models.weights.loader import load_model
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.step import SampleSpec, ScheduledChunk, StepPlan
from waiting import PATIENCE_SECONDS

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.on_gpu]
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
WITHOUT_GPU = pytest.mark.skipif(ON_GPU, reason="under Triton's interpreter; other tests are for GPUs")
NUM_LAYERS, BLOCK_SIZE, NUM_BLOCKS = 8, 16, 32
HEAD_DIM = 64 if ON_GPU else 16
SHAPE = demo.DemoShape(64, NUM_LAYERS, 4, 2, HEAD_DIM, 96, 600, 512, 1e4, True, "float32", "llama")
GREEDY = SampleSpec(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0, position=1)
COPY_ID = 7


def test_gates_are_for_large_blocks_of_one_gpu() -> None:
    large = LayoutRecord("m", "w", "bfloat16", 64, 32, 8, 128)
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    gates = load_gates(large, gpu)
    assert gates is not None and gates.first_layers == [0, 8, 16, 24, 28, 30, 31]
    shared = LayoutRecord("m", "w", "bfloat16", 64, 32, 8, 128, tensor_parallel_size=2)
    small = LayoutRecord("m", "w", "bfloat16", 16, 32, 2, 128)
    assert [load_gates(*case) for case in ((large, cpu), (shared, gpu), (small, gpu))] == [None] * 3


# ---- launches, without a device's stream ----


class FakeGraph:
    """Records what is done with it in ``log``."""

    log: list[tuple[str, Any]]

    def __init__(self) -> None:
        self.number = len([one for one in self.log if one[0] == "begin"])

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.log.append(("begin", self.number))

    def capture_end(self) -> None:
        self.log.append(("end", self.number))

    def replay(self) -> None:
        self.log.append(("replay", self.number))


class QueuedLoad:
    """:class:`Gates` of a load that is queued, but for those of its groups that are over."""

    def __init__(self, over: tuple[int, ...] = ()) -> None:
        self.first_layers = LoadGates(NUM_LAYERS).first_layers
        self.over = over

    def event(self, copy_id: int, first_layer: int) -> Any:
        assert copy_id == COPY_ID and first_layer in self.first_layers
        return None if first_layer in self.over else first_layer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(demo.SHAPES, "layers", SHAPE)
        return demo.write_demo_model(tmp_path_factory.mktemp("checkpoints") / "layers", shape="layers")


@pytest.fixture
def host_runner(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> HostRunner:
    """Its graphs and its stream write into ``FakeGraph.log``."""
    pytest.importorskip("triton")
    from splitserve.kernels.triton import operations as triton_ops
    from splitserve.kernels.triton.attention.paged import TritonPagedAttention
    from splitserve.kernels.triton.attention.qkv import prepare_qkv

    log: list[tuple[str, Any]] = []
    FakeGraph.log = log
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    kernels = replace(
        select_kernels(DEVICE, torch.float32, dict.fromkeys(OPERATIONS, "reference")),
        begin_step=triton_ops.begin_step,
        prepare_qkv=prepare_qkv,
        make_attention=TritonPagedAttention,
    )
    config = load_model_config(checkpoint)
    model = load_model(checkpoint, config, dtype=torch.float32, device=DEVICE, kernels=kernels)
    model._rotary.table = torch.stack(model._rotary(torch.arange(config.max_position_embeddings)), 1)
    runner = HostRunner(model, torch.zeros((4, NUM_LAYERS, 2, 2, BLOCK_SIZE, HEAD_DIM)))
    runner._gates, runner._pool = QueuedLoad(), None  # type: ignore[assignment]
    runner._stream = SimpleNamespace(wait_event=lambda event: log.append(("wait", event)))  # type: ignore[assignment]
    runner._graphs, runner._mixed_graphs = {}, {}
    return runner


def tail(num_tokens: int, gates: tuple[int, ...]) -> ScheduledChunk:
    return ScheduledChunk([5] * num_tokens, BLOCK_SIZE, [1, 2], GREEDY, gates=gates)


def capture(runner: HostRunner, size: MixedSize, logits: torch.Tensor) -> MixedGraph:
    (plan,) = runner.cache.attention.make_mixed_plans(*size, MAX_MIXED_CHUNKS, runner._max_blocks)
    return runner._capture_mixed_size(size, plan, logits)


@WITHOUT_GPU
def test_graphs_are_cut_where_groups_begin(host_runner: HostRunner) -> None:
    log, first_layers = FakeGraph.log, LoadGates(NUM_LAYERS).first_layers
    logits = torch.empty(4, SHAPE.vocab_size)
    size = MixedSize(0, 8)
    with torch.inference_mode():
        host_runner._mixed_graphs[size] = [capture(host_runner, size, logits)]
        assert log == [step for number in range(5) for step in (("begin", number), ("end", number))]
        log.clear()
        host_runner._logits([tail(3, ())], None)
        assert log == [("replay", number) for number in range(5)]
        log.clear()
        host_runner._logits([tail(3, (COPY_ID,))], None)
        assert log == [step for n, first in enumerate(first_layers) for step in (("wait", first), ("replay", n))]
        log.clear()
        host_runner._gates = QueuedLoad(over=(0, 2))  # type: ignore[assignment]
        host_runner._logits([tail(3, (COPY_ID,))], None)
        assert log[:3] == [("replay", 0), ("replay", 1), ("wait", 4)]
        log.clear()
        whole = capture(host_runner, MixedSize(1, 4), torch.empty(5, SHAPE.vocab_size))
        assert list(whole.parts) == [0], "no step that decodes waits"


@WITHOUT_GPU
def test_eager_steps_wait_before_each_group(host_runner: HostRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    log = FakeGraph.log
    attend = host_runner.cache.attention.run
    monkeypatch.setattr(
        host_runner.cache.attention, "run", lambda *args: (log.append(("layer", None)), attend(*args))[1]
    )
    with torch.inference_mode():
        host_runner._logits([tail(3, (COPY_ID,))], None)
    layers = [("layer", None)]
    waits = [("wait", first) for first in (0, 2, 4, 6, 7)]
    assert log == [
        waits[0],
        *2 * layers,
        waits[1],
        *2 * layers,
        waits[2],
        *2 * layers,
        waits[3],
        *layers,
        waits[4],
        *layers,
    ]
    log.clear()
    with torch.inference_mode():
        host_runner._logits([tail(3, ())], None)
    assert log == NUM_LAYERS * layers


# ---- on a GPU ----


class SlowStore(CudaHostStore):
    """Before each group of layers the stream of loads rests."""

    cycles = 0

    def _queue_layers(self, group: LayerGroup, block_ids: Any, slots: Any) -> None:
        if self.cycles:
            with torch.cuda.stream(self._up):
                torch.cuda._sleep(self.cycles)
        super()._queue_layers(group, block_ids, slots)


class OnGpu:
    """A model, its blocks and a host tier. The first blocks hold a prefix of 192 tokens, and so do the first slots."""

    PREFIX_BLOCKS = 12

    def __init__(self, checkpoint: Path, backend: str, *, graphs: bool) -> None:
        dtype = torch.bfloat16
        config = load_model_config(checkpoint)
        kernels = select_kernels(DEVICE, dtype, {"make_attention": backend} if backend else {}, config.head_dim)
        self.model: DecoderModel = load_model(checkpoint, config, dtype=dtype, device=DEVICE, kernels=kernels)
        layout = LayoutRecord("m", "w", "bfloat16", BLOCK_SIZE, NUM_LAYERS, 2, HEAD_DIM)
        self.memory = KVMemory(layout, NUM_BLOCKS, DEVICE)
        self.gates = LoadGates(NUM_LAYERS)
        host = HostMemory(16 * self.memory.block_bytes, node_of_device(DEVICE))
        self.store = SlowStore(self.memory, host, self.gates)
        self.store.way = "engine"
        self.runner = CudaRunner(self.model, self.memory.blocks, max_num_seqs=8, max_model_len=512, gates=self.gates)
        if graphs:
            self.runner.capture([8])
            self.runner.capture_mixed(mixed_sizes(8, 64, 128))
        self.prefix = [(7 * index + 3) % 600 for index in range(self.PREFIX_BLOCKS * BLOCK_SIZE)]
        self.blocks = torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(3)).add(1).tolist()
        self.slots = list(range(2, 2 + self.PREFIX_BLOCKS))

    def step(self, num_tokens: int, gates: tuple[int, ...] = ()) -> StepPlan:
        """The tokens after the prefix."""
        tokens = [(11 * index + 5) % 600 for index in range(num_tokens)]
        return StepPlan([ScheduledChunk(tokens, len(self.prefix), self.blocks, GREEDY, gates=gates)])

    def compute_prefix(self) -> None:
        chunk = ScheduledChunk(self.prefix, 0, self.blocks[: self.PREFIX_BLOCKS], None)
        self.runner.run(StepPlan([chunk]))
        self.store.store(self.blocks[: self.PREFIX_BLOCKS], self.slots, [b""] * self.PREFIX_BLOCKS)

    def damage(self) -> None:
        """Numbers like those of a prompt's KV are everywhere."""
        torch.cuda.synchronize()
        self.memory.blocks.copy_(torch.randn(self.memory.blocks.shape, device=DEVICE))
        torch.cuda.synchronize()

    def written(self, num_tokens: int) -> Tensor:
        """KV of the tokens after the prefix, [blocks, layers, heads, 2, B, D], without what was there before."""
        torch.cuda.synchronize()
        blocks = self.memory.blocks[self.blocks[self.PREFIX_BLOCKS : self.PREFIX_BLOCKS - (-num_tokens // BLOCK_SIZE)]]
        return blocks.clone().movedim(4, 1).flatten(0, 1)[:num_tokens]

    def run_gated(self, num_tokens: int) -> list[int | None]:
        """The step is launched while each group of layers has yet to be copied."""
        near_end = threading.Event()
        arguments = COPY_ID, self.blocks[: self.PREFIX_BLOCKS], self.slots, near_end.set
        self.store.cycles = 100_000_000  # some 50 ms
        loading = threading.Thread(target=self.store.load_gated, args=arguments)
        loading.start()
        try:
            assert near_end.wait(PATIENCE_SECONDS)
            pending = self.runner.launch(self.step(num_tokens, (COPY_ID,)))
            assert loading.is_alive(), "the copies were over before the step was launched"
            output = pending.wait()
        finally:
            self.store.cycles = 0
            loading.join()
        return list(output.token_ids)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", ""])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_a_step_that_waits_on_the_device_gives_the_right_token(checkpoint: Path, graphs: bool, backend: str) -> None:
    """One token replays a graph of decode, few those of prefill alone, many run kernel by kernel."""
    on_gpu = OnGpu(checkpoint, backend, graphs=graphs)
    head = on_gpu.blocks[: on_gpu.PREFIX_BLOCKS]
    for num_tokens in (1, 9, 65, 130):
        on_gpu.compute_prefix()
        computed = list(on_gpu.runner.run(on_gpu.step(num_tokens)).token_ids)
        expected = on_gpu.written(num_tokens)
        prefix = on_gpu.memory.blocks[head].clone()

        on_gpu.damage()
        on_gpu.store.load(head, on_gpu.slots, [b""] * len(head))
        assert list(on_gpu.runner.run(on_gpu.step(num_tokens)).token_ids) == computed
        assert torch.equal(on_gpu.written(num_tokens), expected), "the same kernels give the same bits"

        on_gpu.damage()
        assert on_gpu.run_gated(num_tokens) == computed
        assert torch.equal(on_gpu.memory.blocks[head], prefix), "all layers of all blocks are here"
        assert torch.equal(on_gpu.written(num_tokens), expected)
    on_gpu.store.close()


@pytest.mark.gpu
@pytest.mark.parametrize("missing", LoadGates(NUM_LAYERS).first_layers)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_a_missing_wait_would_be_seen(
    checkpoint: Path, graphs: bool, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the test above says nothing. The last layer's attention doesn't reach any KV, but the token."""
    on_gpu = OnGpu(checkpoint, "triton", graphs=graphs)
    on_gpu.compute_prefix()
    on_gpu.runner.run(on_gpu.step(9))
    expected = on_gpu.written(9)
    logits: list[Tensor] = []
    sampler = on_gpu.runner.sampler
    sample = sampler._sample
    monkeypatch.setattr(sampler, "_sample", lambda *args: (logits.append(args[0].clone()), sample(*args))[1])
    on_gpu.runner.run(on_gpu.step(9))
    original = LoadGates.event

    def event(self: LoadGates, copy_id: int, first_layer: int) -> Any:
        found = original(self, copy_id, first_layer)
        return None if first_layer >= missing else found

    monkeypatch.setattr(LoadGates, "event", event)
    on_gpu.damage()
    on_gpu.run_gated(9)
    same_kv, same_logits = torch.equal(on_gpu.written(9), expected), torch.equal(*logits)
    assert not same_logits and (not same_kv or missing == NUM_LAYERS - 1)
    on_gpu.store.close()
