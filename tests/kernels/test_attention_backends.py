"""Every backend of paged attention against the definition, over odd shapes: on a GPU all of them, else the reference
and, under its interpreter, Triton's."""

import math

import pytest
import torch
from torch import Tensor

from attention_cases import Lengths, attention_shape, edge_lengths, paged_case, plain_attention, rms
from splitserve.kernels.api import AttentionShape, PagedAttention, PagedBatch
from splitserve.kernels.reference.attention import ReferencePagedAttention
from splitserve.kernels.registry import Target, backends, select_kernels
from splitserve.kernels.tuning import parameters as tuning

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.on_gpu]

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# Without a GPU: those that run on CPU, and Triton's under its interpreter.
BACKENDS = [
    name
    for name, reason in backends("make_attention", Target(DEVICE, torch.float32)).items()
    if ON_GPU or reason is None or name == "triton"
]
# (heads, kv heads, head_dim, block size): groups of 1, 4 and 7, dimensions that are no power of two
SHAPES = [(2, 2, 64, 16), (4, 1, 80, 4), (7, 1, 128, 8)]
GPU_SHAPES = [(8, 8, 64, 16), (32, 8, 128, 64), (14, 2, 128, 64), (28, 4, 128, 16), (8, 2, 80, 64), (32, 8, 128, 5)]
# Triton's interpreter rounds casts to bfloat16 towards zero.
DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def make_backend(name: str, shape: AttentionShape) -> PagedAttention:
    if name == "triton" and not ON_GPU:
        pytest.importorskip("triton")
        from splitserve.kernels.triton.attention.paged import TritonPagedAttention

        return TritonPagedAttention(shape)
    if reason := backends("make_attention", Target(DEVICE, shape.dtype, shape.head_dim))[name]:
        pytest.skip(reason)
    return select_kernels(DEVICE, shape.dtype, {"make_attention": name}, shape.head_dim).make_attention(shape)


def assert_right(attention: PagedAttention, shape: AttentionShape, lengths: Lengths) -> None:
    query, layer, batch = paged_case(shape, lengths)
    assert_close(attention.run(query, layer, attention.plan(batch)), query, layer, batch, shape)


def assert_close(actual: Tensor, query: Tensor, layer: Tensor, batch: PagedBatch, shape: AttentionShape) -> None:
    """Close to the definition, and about as close as plain PyTorch in the same dtype comes to it."""
    expected = plain_attention(query, layer, batch)
    assert actual.dtype == shape.dtype and actual.shape == query.shape
    tolerance = TOLERANCE[shape.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    reference = ReferencePagedAttention(shape)
    plain = reference.run(query, layer, reference.plan(batch))
    assert rms(actual - expected) <= 2 * rms(plain - expected) + 1e-6 * rms(expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", GPU_SHAPES if ON_GPU else SHAPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_odd_shapes(backend: str, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    shape = attention_shape(*sizes, dtype, DEVICE)
    attention = make_backend(backend, shape)
    with tuning.forced("attention_decode", {"num_parts": 3} if not ON_GPU else {}):  # programs take long to interpret
        for lengths in edge_lengths(shape.block_size):
            assert_right(attention, shape, lengths)


@pytest.mark.parametrize("dtype", DTYPES[:1] if ON_GPU else DTYPES[1:], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_contexts_at_the_edges_of_tiles(backend: str, dtype: torch.dtype) -> None:
    """Kernels look at 64 or 128 tokens in one go."""
    shape = attention_shape(2, 1, 64, 16, dtype, DEVICE)
    attention = make_backend(backend, shape)
    with tuning.forced("attention_decode", {"num_parts": 1} if not ON_GPU else {}):
        for lengths in ([(1, 63), (1, 64), (1, 65), (1, 129)], [(63, 63), (64, 65), (65, 65), (2, 130)]):
            assert_right(attention, shape, lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_long_mixed_batches(backend: str, dtype: torch.dtype) -> None:
    shape = attention_shape(32, 8, 128, 64, dtype, DEVICE)
    attention = make_backend(backend, shape)
    decodes = [(1, context) for context in (1, 64, 65, 1000, 1024, 3000, 4097)]
    for lengths in (decodes, [*decodes, (300, 300), (128, 1500), (1, 2049), (513, 1025)]):
        assert_right(attention, shape, lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("batch_size", [1, 3, 64])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_a_captured_decode_step_follows_its_plan(backend: str, batch_size: int) -> None:
    """One graph, replayed for several batches: what it answers is what those ask, whatever the plan held before."""
    shape = attention_shape(32, 8, 128, 64, torch.bfloat16, DEVICE)
    attention = make_backend(backend, shape)
    plan = attention.make_decode_plan(batch_size, 40)
    longest = 2500 if batch_size < 8 else 300
    contexts = [[1 + (37 * step + 911 * row) % longest for row in range(batch_size)] for step in range(4)]
    contexts.append([64] * batch_size)
    cases = [paged_case(shape, [(1, context) for context in each], seed) for seed, each in enumerate(contexts)]
    memory = torch.empty(
        max(layer.shape[0] for _, layer, _ in cases), 2, 8, 2, 64, 128, dtype=shape.dtype, device=DEVICE
    )
    query, layer = torch.empty_like(cases[0][0]), memory[:, 1]
    stream, graph, out = torch.cuda.Stream(), torch.cuda.CUDAGraph(), None
    stream.wait_stream(torch.cuda.current_stream())
    for case_query, case_layer, batch in cases:
        with torch.cuda.stream(stream):
            query.copy_(case_query)
            layer.fill_(math.nan)
            layer[: case_layer.shape[0]].copy_(case_layer)
            plan.update(batch)
            if out is None:
                attention.run(query, layer, plan)
                with torch.cuda.graph(graph, stream=stream):
                    out = attention.run(query, layer, plan)
            graph.replay()
        stream.synchronize()
        assert_close(out, case_query, case_layer, batch, shape)
