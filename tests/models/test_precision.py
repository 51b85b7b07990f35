"""Logits of the whole model in narrow dtypes against float32: a backend errs no more than plain PyTorch in that dtype.

On a GPU every attention backend runs, with the kernels that go with it; without one, Triton's kernels under its
interpreter, on a smaller model. Then on a GPU: steps from CUDA graphs give the tokens of eager steps.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attention_cases import rms
from splitserve.kernels.api import Kernels
from splitserve.kernels.registry import OPERATIONS, Target, backends, select_kernels
from splitserve.kernels.sampling import SamplingBatch
from splitserve.kernels.tuning import parameters as tuning
from splitserve.models.config import RopeScaling, load_model_config
from splitserve.models.demo import checkpoint as demo
from splitserve.models.runner.runner import ModelRunner
from splitserve.models.weights.loader import load_model
from splitserve.protocol.step import SampleSpec, ScheduledChunk, StepPlan

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.on_gpu]

ON_GPU = torch.cuda.is_available()
CPU = torch.device("cpu")
DEVICE = torch.device("cuda", 0) if ON_GPU else CPU
BLOCK_SIZE = 16
# Triton's interpreter rounds casts to bfloat16 towards zero.
DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float16]
BACKENDS = list(backends("make_attention", Target(DEVICE, torch.float16)))[:-1] if ON_GPU else ["triton"]
MAX_ERROR_RATIO = 1.5  # to the root mean square error of plain PyTorch in the same dtype
# Heads of 64 and 128, groups of 4 and 3; then, for the interpreter, as little as there can be of both.
SHAPES = {
    "llama": demo.DemoShape(
        256, 3, 8, 2, 64, 512, 2048, 4096, 1e4, True, "float32", "llama", RopeScaling(8.0, 1.0, 4.0, 256)
    ),
    "qwen3": demo.DemoShape(320, 3, 6, 2, 128, 448, 2048, 4096, 1e4, False, "float32", "qwen3"),
}
SMALL = {"hidden_size": 64, "num_layers": 2, "num_kv_heads": 1, "intermediate_size": 96, "vocab_size": 600}
SMALL_SHAPES = {
    "llama": replace(SHAPES["llama"], num_heads=2, **SMALL),
    "qwen3": replace(SHAPES["qwen3"], num_heads=3, **SMALL),
}
# Prompts, and how many tokens of each come in the first step, which is followed by the rest and by three decode steps.
PROMPT_LENGTHS, FIRST_CHUNKS, NUM_DECODES = ([3, 16, 45] if ON_GPU else [3, 17]), [2, 16, 20], 3


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(demo.SHAPES, "small", (SHAPES if ON_GPU else SMALL_SHAPES)[name])
        return demo.write_demo_model(tmp_path_factory.mktemp("checkpoints") / name, shape="small", architecture=name)


def plain_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    return select_kernels(device, dtype, dict.fromkeys(OPERATIONS, "reference"))


def kernels_of(backend: str, dtype: torch.dtype, head_dim: int) -> Kernels:
    """Attention by ``backend``, and the best of everything else; without a GPU all that Triton has."""
    if ON_GPU:
        if reason := backends("make_attention", Target(DEVICE, dtype, head_dim))[backend]:
            pytest.skip(reason)
        return select_kernels(DEVICE, dtype, {"make_attention": backend}, head_dim)
    pytest.importorskip("triton")
    from splitserve.kernels.triton import linear as triton_linear
    from splitserve.kernels.triton import operations as triton_ops
    from splitserve.kernels.triton import sampling as triton_sampling
    from splitserve.kernels.triton.attention.paged import TritonPagedAttention
    from splitserve.kernels.triton.attention.qkv import prepare_qkv
    from splitserve.kernels.triton.norms import TritonNorm

    around = {"rms_norm": triton_ops.rms_norm, "silu_mul": triton_ops.silu_mul}
    return replace(
        plain_kernels(CPU, dtype),
        **around,
        pack_norm=TritonNorm,
        gelu_mul=triton_ops.gelu_mul,
        prepare_qkv=prepare_qkv,
        sample=triton_sampling.sample,
        pack_linear=partial(triton_linear.TritonLinear, **around),
        make_attention=TritonPagedAttention,
    )


MakeRunner = Callable[..., ModelRunner]


class Recorder:
    """Draws as ``kernels`` do, and keeps the logits."""

    def __init__(self, kernels: Kernels) -> None:
        self.logits: list[Tensor] = []
        self._sample = kernels.sample
        self.kernels = replace(kernels, sample=self)

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        self.logits.append(logits.detach().clone())
        return self._sample(logits, batch)


def forced_logits(path: Path, kernels: Kernels, dtype: torch.dtype, device: torch.device, make: MakeRunner) -> Tensor:
    """Logits [N, vocab] of all drawn tokens, in float64: mixed steps of chunks, then decodes, of given tokens."""
    config, recorder = load_model_config(path), Recorder(kernels)
    model = load_model(path, config, dtype=dtype, device=device, kernels=recorder.kernels)
    lengths = [length + NUM_DECODES for length in PROMPT_LENGTHS]
    per_sequence = -(-max(lengths) // BLOCK_SIZE)
    sizes = (2 + len(lengths) * per_sequence, config.num_layers, config.num_kv_heads, 2, BLOCK_SIZE, config.head_dim)
    runner = make(model, torch.full(sizes, math.nan, dtype=dtype, device=device))
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, 600, (length,), generator=generator).tolist() for length in lengths]
    # Sequences take blocks in turn, from the last one on; capturing graphs writes the first.
    tables = [[sizes[0] - 1 - index - len(lengths) * at for at in range(per_sequence)] for index in range(len(lengths))]

    def step(spans: list[tuple[int, int]]) -> None:
        chunks = []
        for sequence, table, (start, end), prompt in zip(tokens, tables, spans, PROMPT_LENGTHS, strict=True):
            spec = SampleSpec(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0, position=end)
            covering = table[: -(-end // BLOCK_SIZE)]
            if start < end:
                chunks.append(ScheduledChunk(sequence[start:end], start, covering, spec if end >= prompt else None))
        if chunks:
            runner.run(StepPlan(chunks))

    firsts = [min(first, length) for first, length in zip(FIRST_CHUNKS, PROMPT_LENGTHS, strict=False)]
    step([(0, first) for first in firsts])
    step(list(zip(firsts, PROMPT_LENGTHS, strict=True)))
    for index in range(NUM_DECODES):
        step([(length + index, length + index + 1) for length in PROMPT_LENGTHS])
    assert len(recorder.logits) >= NUM_DECODES + 1
    return torch.cat(recorder.logits).double().cpu()


@cache
def exact_logits(path: Path) -> Tensor:
    return forced_logits(path, plain_kernels(CPU, torch.float32), torch.float32, CPU, ModelRunner)


@cache
def plain_error(path: Path, dtype: torch.dtype) -> float:
    """Return the error of plain PyTorch in ``dtype`` on the same device."""
    return rms(forced_logits(path, plain_kernels(DEVICE, dtype), dtype, DEVICE, ModelRunner) - exact_logits(path))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits(checkpoint: Path, backend: str, dtype: torch.dtype) -> None:
    kernels = kernels_of(backend, dtype, load_model_config(checkpoint).head_dim)
    with tuning.forced("attention_decode", {} if ON_GPU else {"num_parts": 2}):  # programs take long to interpret
        logits = forced_logits(checkpoint, kernels, dtype, DEVICE, ModelRunner)
    exact, bound = exact_logits(checkpoint), MAX_ERROR_RATIO * plain_error(checkpoint, dtype)
    assert logits.shape == exact.shape
    assert 0 < rms(logits - exact) <= bound < 0.1 * rms(exact)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("graph_size", [len(PROMPT_LENGTHS), len(PROMPT_LENGTHS) + 2])
def test_cuda_graphs_give_the_tokens_of_eager_steps(
    checkpoint: Path, backend: str, dtype: torch.dtype, graph_size: int
) -> None:
    """Also in a graph with rows to spare. Where the two best of float32 are too near for the dtype, either will do."""
    from splitserve.models.runner.cuda import CudaRunner

    def make(model, kv_cache, capture: bool) -> CudaRunner:
        runner = CudaRunner(model, kv_cache, max_num_seqs=graph_size, max_model_len=64)
        if capture:
            runner.capture([graph_size])
        return runner

    kernels = kernels_of(backend, dtype, load_model_config(checkpoint).head_dim)
    eager, replayed = (
        forced_logits(checkpoint, kernels, dtype, DEVICE, partial(make, capture=capture)) for capture in (False, True)
    )
    exact, error = exact_logits(checkpoint), plain_error(checkpoint, dtype)
    assert rms(replayed - exact) <= MAX_ERROR_RATIO * error
    best = exact.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > 6 * error
    assert int(is_clear.sum()) >= 4
    assert torch.equal(eager.argmax(1)[is_clear], replayed.argmax(1)[is_clear])
    assert torch.equal(exact.argmax(1)[is_clear], replayed.argmax(1)[is_clear])
