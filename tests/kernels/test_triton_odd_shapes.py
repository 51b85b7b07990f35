"""Triton's kernels against the reference at the sizes of real heads, one token, sizes about the kernels' own tiles.

Attention is in test_attention_backends.py and test_triton_chunks.py, gather and scatter in test_kernels_gather.py,
usual shapes in test_kernels_triton.py.
"""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

from splitserve.kernels.api import AttentionShape
from splitserve.kernels.raw_qkv import RawQkv
from splitserve.kernels.reference import operations as reference
from splitserve.kernels.reference import sampling
from splitserve.kernels.sampling import SamplingBatch
from splitserve.kernels.triton import operations as triton_ops
from splitserve.kernels.triton import sampling as triton_sampling
from splitserve.kernels.triton.attention.qkv import prepare_qkv

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.on_gpu]

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# The interpreter rounds casts to bfloat16 towards zero.
DTYPES = [torch.float32, torch.bfloat16 if DEVICE.type == "cuda" else torch.float16]
HEADS = [(2, 2, 64), (4, 1, 80), (7, 1, 128)]  # (query heads, kv heads, head_dim): groups of 1, 4, 7


def rand(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 64, 80, 127, 1024, 1025])
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    weight = rand(size, dtype=dtype, seed=1)
    for rows in (1, 3):
        x = rand(rows, size, dtype=dtype)
        assert_close(triton_ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 80, 1023, 1025])
def test_gated_activations(size: int, dtype: torch.dtype) -> None:
    for rows in (1, 3):
        gate_up = 4 * rand(rows, 2 * size, dtype=dtype)
        assert_close(triton_ops.silu_mul(gate_up.clone()), reference.silu_mul(gate_up.clone()))
        assert_close(triton_ops.gelu_mul(gate_up), reference.gelu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_prepare_qkv(sizes: tuple[int, int, int], with_norm: bool, dtype: torch.dtype) -> None:
    """One token; then three, at a block's first and last slots."""
    heads, kv_heads, head_dim = sizes
    shape = AttentionShape(heads, kv_heads, head_dim, 4, 2, dtype, DEVICE)
    norm = rand(heads + kv_heads, head_dim, dtype=dtype, seed=2) if with_norm else None
    for blocks, offsets in (([0], [0]), ([2, 1, 1], [3, 0, 3])):
        qkv = rand(1, len(blocks), heads + 2 * kv_heads, head_dim, dtype=dtype, seed=1)
        angles = rand(len(blocks), head_dim // 2, dtype=torch.float32, seed=3)
        cos = torch.cat((angles.cos(), angles.cos()), 1).to(dtype)
        sin = torch.cat((-angles.sin(), angles.sin()), 1).to(dtype)
        slots = shape.slots(torch.tensor(blocks, device=DEVICE), torch.tensor(offsets, device=DEVICE))
        caches = [rand(3, 2, kv_heads, 2, 4, head_dim, dtype=dtype, seed=4) for _ in range(2)]
        query, expected = (
            prepare(RawQkv(qkv.clone(), norm, 1e-6, (cos, sin), slots), cache[:, 1])
            for prepare, cache in zip((prepare_qkv, reference.prepare_qkv), caches, strict=True)
        )
        assert_close(query, expected.contiguous())
        assert_close(*caches)
        assert torch.equal(caches[0][:, 0], caches[1][:, 0]), "another layer was written"


@pytest.mark.parametrize("vocab_size", [1, 2047, 2048, 4097])
def test_draws(vocab_size: int) -> None:
    """Vocabularies about the sizes that one program looks at; ties, which the lower id wins."""
    rows = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 3, 1.0), (1.3, 0, 0.8)]
    heats, top_ks, top_ps = zip(*rows, strict=True)
    batch = SamplingBatch(heats, top_ks, top_ps, [5] * 4, [0, 0, 1, 2], [7, 8, 9, 10])
    logits = 3 * rand(4, vocab_size, dtype=DTYPES[1])
    assert torch.equal(triton_sampling.sample(logits, batch), sampling.sample(logits, batch))
    flat = torch.zeros_like(logits)
    assert torch.equal(triton_sampling.sample(flat, batch), sampling.sample(flat, batch))
