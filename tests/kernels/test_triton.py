"""Triton kernels against the reference: compiled where there is a GPU, else under Triton's interpreter."""

import math
import random
from dataclasses import asdict

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")  # conftest.py chose its interpreter, if need be, before this import
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

from splitserve.kernels.api import AttentionShape, PagedBatch
from splitserve.kernels.raw_qkv import RawQkv
from splitserve.kernels.reference import operations as reference
from splitserve.kernels.reference import sampling
from splitserve.kernels.reference.attention import ReferencePagedAttention
from splitserve.kernels.sampling import IN_PROMPT, SamplingBatch
from splitserve.kernels.triton import gather as triton_gather
from splitserve.kernels.triton import linear as triton_linear
from splitserve.kernels.triton import operations as triton_ops
from splitserve.kernels.triton import sampling as triton_sampling
from splitserve.kernels.triton.attention.paged import TritonPagedAttention
from splitserve.kernels.triton.attention.qkv import prepare_qkv
from splitserve.kernels.tuning import linear_launch
from splitserve.kernels.tuning import parameters as tuning

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.on_gpu]

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# The interpreter rounds casts to bfloat16 towards zero and mixes up its matrix products.
NARROW = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
DTYPES = [torch.float32, NARROW]


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_begin_step(kv_heads: int, dtype: torch.dtype) -> None:
    """A cache with two groups, of three layers and of one."""
    shapes = [AttentionShape(kv_heads * 2, kv_heads, 12, 5, num_layers, dtype, DEVICE) for num_layers in (3, 1)]
    blocks = [[2, 5, -1, 1], [0, -1, 7, 4]]
    inputs = torch.tensor([[3, 0, 1, 8], [0, 7, 19, 4], [-1, 1, -1, 2], *blocks], device=DEVICE)
    drawn = torch.tensor([4, 6, -1], device=DEVICE)
    embedding, rotations = rand(9, 24), rand(20, 2, 12, dtype=dtype, seed=1)
    actual, expected = (ops.begin_step(inputs, drawn, embedding, rotations, shapes) for ops in (triton_ops, reference))
    assert torch.equal(expected.hidden[:, 0].cpu(), embedding[[3, 6, 1, 0], 0].to(dtype).cpu())
    assert torch.equal(actual.hidden, expected.hidden)
    assert torch.equal(actual.slots, expected.slots)
    for slots, shape, group in zip(expected.slots, shapes, blocks, strict=True):
        offsets = torch.tensor([0, 2, 4, 4], device=DEVICE)
        assert torch.equal(slots, shape.slots(torch.tensor(group, device=DEVICE), offsets))
        assert ((slots < 0).any(1).cpu() == torch.tensor(group).lt(0)).all()
    for one, other in zip(actual.rotation, expected.rotation, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 7), (3, 128), (5, 1030)])
def test_rms_norm(rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = rand(rows, size, dtype=dtype), rand(size, seed=2).to(dtype)
    assert_close(triton_ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 5), (3, 1500)])
def test_gated_activations(tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = rand(tokens, 2 * size, dtype=dtype)
    assert_close(triton_ops.silu_mul(gate_up), reference.silu_mul(gate_up.clone()))
    assert_close(triton_ops.gelu_mul(3 * gate_up), reference.gelu_mul(3 * gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("around", ["nothing", "gate", "residual"])
@pytest.mark.parametrize(
    ("rows", "columns", "inputs", "params"),
    [
        (3, 40, 96, linear_launch.LinearLaunch(16, 16, 32, 1, 4, 2, 64)),
        (17, 64, 130, linear_launch.LinearLaunch(16, 16, 32, 1, 4, 2, 64)),
        (5, 48, 160, linear_launch.LinearLaunch(16, 16, 32, 3, 4, 2, 0)),
        (20, 32, 128, linear_launch.LinearLaunch(32, 32, 64, 2, 4, 2, 0, tma=True)),
        (1, 20, 96, linear_launch.LinearLaunch(1, 8, 64)),
        (1, 32, 128, linear_launch.LinearLaunch(1, 4, 128)),
    ],
)
def test_linear(
    rows: int, columns: int, inputs: int, params: linear_launch.LinearLaunch, around: str, dtype: torch.dtype
) -> None:
    if params.tma and DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU has no bulk copy engine")
    x, norm = rand(rows, inputs, dtype=dtype), rand(inputs, dtype=dtype, seed=1)
    gated, adds = around == "gate", around == "residual"
    weight = (rand(columns * (1 + gated), inputs, seed=2) / inputs**0.5).to(dtype)
    out = rand(rows, columns, dtype=dtype, seed=3)
    for with_norm in (False, True) if params.block_m == 1 else (False,):
        wide = (reference.rms_norm(x, norm, 1e-5) if with_norm else x).float() @ weight.float().T
        wide = reference.silu_mul(wide) if gated else wide
        bias = rand(columns, dtype=dtype, seed=4) if adds else None
        expected = (wide if bias is None else wide + bias.float() + out.float()).to(dtype)
        for _ in range(2):  # tickets are back at zero
            actual = out.clone()
            kept = norm if with_norm else None
            triton_linear.launch(x, weight, actual, params, norm=kept, eps=1e-5, gated=gated, adds=adds, bias=bias)
            assert_close(actual, expected)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_normalised_already_are_taken_as_they_are(dtype: torch.dtype, num_rows: int) -> None:
    """By another norm than RMS, too."""

    def fails(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        raise AssertionError

    x, norm, weight = (
        rand(num_rows, 64, dtype=dtype),
        rand(64, dtype=dtype, seed=1),
        rand(32, 64, dtype=dtype, seed=2) / 8,
    )
    normed = torch.nn.functional.layer_norm(x.float(), (64,), norm.float()).to(dtype)
    packed = triton_linear.TritonLinear(weight, rms_norm=fails, silu_mul=triton_ops.silu_mul)
    wide = normed.float() @ weight.float().T
    assert_close(packed.after_norm(x, norm, 1e-5, normed), wide.to(dtype))
    assert_close(packed.gated_after_norm(x, norm, 1e-5, normed), reference.silu_mul(wide).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_parts_of_a_product_add_up_to_the_bits_of_the_joined_one(has_bias: bool, tma: bool, dtype: torch.dtype) -> None:
    if tma and DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU has no bulk copy engine")
    x, norm, weight = rand(5, 192, dtype=dtype), rand(192, dtype=dtype, seed=1), rand(48, 192, dtype=dtype, seed=2) / 8
    next_norm, residual = rand(48, dtype=dtype, seed=3), rand(5, 48, dtype=dtype, seed=4)
    bias = rand(48, dtype=dtype, seed=5) if has_bias else None
    results = []
    for joined in (True, False):
        params = asdict(linear_launch.LinearLaunch(16, 16, 32, 3, 4, 2, 0, tma, joined))
        with (
            tuning.forced("linear_plain", params),
            tuning.forced("linear_norm", params),
            tuning.forced("linear_add", params),
        ):
            linear = triton_linear.TritonLinear(weight, rms_norm=triton_ops.rms_norm, silu_mul=triton_ops.silu_mul)
            apart = [linear.parts(x), linear.parts_after_norm(x, norm, 1e-5)]
            assert [len(parts) for parts in apart] == ([1, 1] if joined else [3, 3])
            assert linear(x).shape == linear.after_norm(x, norm, 1e-5).shape == (5, 48)
            total = residual.clone()
            normed = linear.add_to(total, x, next_norm, 1e-5, bias=bias)
            assert (normed is None) == joined
            normed = triton_ops.rms_norm(total, next_norm, 1e-5) if normed is None else normed
            results.append([*(reference.join_parts(parts, dtype) for parts in apart), total, normed])
    for joined_result, result in zip(*results, strict=True):
        assert torch.equal(joined_result, result)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prepare_qkv_adds_up_parts(dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim, block_size = 6, 2, 16, 4
    parts, norm = rand(3, 5, heads + 2 * kv_heads, head_dim), rand(heads + kv_heads, head_dim, dtype=dtype, seed=2)
    rotation = rand(5, head_dim, dtype=dtype, seed=3), rand(5, head_dim, dtype=dtype, seed=4)
    shape = AttentionShape(heads, kv_heads, head_dim, block_size, 1, dtype, DEVICE)
    slots = shape.slots(torch.tensor([1, 0, 1, 2, 2], device=DEVICE), torch.tensor([3, 0, 1, 2, 3], device=DEVICE))
    caches, queries = [], []
    for qkv in (parts, (parts[0] + parts[1] + parts[2]).to(dtype).unsqueeze(0)):
        cache = torch.zeros(3, kv_heads, 2, block_size, head_dim, dtype=dtype, device=DEVICE)
        queries.append(prepare_qkv(RawQkv(qkv, norm, 1e-6, rotation, slots), cache))
        caches.append(cache)
    assert torch.equal(*queries) and torch.equal(*caches)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 6), (6, 2, 24), (8, 4, 32), (9, 3, 16)])
def test_prepare_qkv(heads: int, kv_heads: int, head_dim: int, with_norm: bool, dtype: torch.dtype) -> None:
    """Without norms there are biases."""
    num_tokens, layers, block_size = 5, 3, 4
    cache = rand(6, layers, kv_heads, 2, block_size, head_dim, dtype=dtype)
    expected_cache = cache.clone()
    qkv = rand(1, num_tokens, heads + 2 * kv_heads, head_dim, dtype=dtype, seed=1)
    norm = rand(heads + kv_heads, head_dim, dtype=dtype, seed=2) if with_norm else None
    angles = rand(num_tokens, head_dim // 2, seed=3)
    cos = torch.cat((angles.cos(), angles.cos()), 1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), 1).to(dtype)
    shape = AttentionShape(heads, kv_heads, head_dim, block_size, layers, dtype, DEVICE)
    slots = shape.slots(torch.tensor([5, 0, 5, 2, 2], device=DEVICE), torch.tensor([3, 0, 1, 2, 3], device=DEVICE))
    layer, expected_layer = cache[:, 1], expected_cache[:, 1]
    bias = None if with_norm else rand((heads + 2 * kv_heads) * head_dim, dtype=dtype, seed=4)
    raw = RawQkv(qkv, norm, 1e-6, (cos, sin), slots, bias)
    query, expected = prepare_qkv(raw, layer), reference.prepare_qkv(raw, expected_layer)
    assert_close(query, expected.contiguous())
    assert_close(cache, expected_cache)


def paged_case(shape: AttentionShape, lengths: list[tuple[int, int]]) -> tuple[Tensor, Tensor, PagedBatch]:
    """``lengths`` are (query, context); blocks are scattered; what no sequence wrote is NaN."""
    size = shape.block_size
    needed = [-(-context // size) for _, context in lengths]
    ids = random.Random(0).sample(range(sum(needed) + 3), sum(needed))
    cache = torch.full((sum(needed) + 3, shape.num_layers, shape.num_kv_heads, 2, size, shape.head_dim), math.nan)
    tables = []
    for (_, context), count in zip(lengths, needed, strict=True):
        table, ids = ids[:count], ids[count:]
        tables.append(table)
        content = torch.randn(count * size, shape.num_kv_heads, 2, shape.head_dim)
        content[context:] = math.nan
        cache[table, 1] = content.view(count, size, *content.shape[1:]).permute(0, 2, 3, 1, 4)
    query = rand(sum(length for length, _ in lengths), shape.num_heads, shape.head_dim, dtype=shape.dtype)
    batch = PagedBatch([length for length, _ in lengths], [context for _, context in lengths], tables)
    return query, cache.to(shape.dtype).to(DEVICE)[:, 1], batch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"), [(2, 2, 16, 16), (6, 2, 24, 5), (4, 1, 32, 64)]
)
def test_attention(heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    shape = AttentionShape(heads, kv_heads, head_dim, block_size, 2, dtype, DEVICE)
    oracle, backend = ReferencePagedAttention(shape), TritonPagedAttention(shape)
    for lengths in ([(1, 1), (1, 70), (3, 3), (66, 80), (1, 9)], [(1, 65)]):
        query, layer, batch = paged_case(shape, lengths)
        assert_close(backend.run(query, layer, backend.plan(batch)), oracle.run(query, layer, oracle.plan(batch)))


@pytest.mark.parametrize(("window", "soft_cap"), [(None, 1.5), (1, None), (16, None), (70, 1.5), (200, None)])
def test_attention_to_a_window_with_a_soft_cap(window: int | None, soft_cap: float | None) -> None:
    shape = AttentionShape(6, 2, 24, 5, 2, torch.float32, DEVICE, scale=0.7, soft_cap=soft_cap, window=window)
    oracle, backend = ReferencePagedAttention(shape), TritonPagedAttention(shape)
    query, layer, batch = paged_case(shape, [(1, 1), (1, 270), (3, 3), (66, 280), (40, 40), (1, 16), (1, 17)])
    assert_close(backend.run(query, layer, backend.plan(batch)), oracle.run(query, layer, oracle.plan(batch)))


@pytest.mark.parametrize("lengths", [(16, 1200), (40, 1500), (130, 1300)])
def test_parts_of_a_long_context_before_all_windows_weigh_nothing(lengths: tuple[int, int]) -> None:
    shape = AttentionShape(2, 1, 16, 32, 2, torch.float32, DEVICE, window=64)
    oracle, backend = ReferencePagedAttention(shape), TritonPagedAttention(shape)
    query, layer, batch = paged_case(shape, [lengths])
    assert_close(backend.run(query, layer, backend.plan(batch)), oracle.run(query, layer, oracle.plan(batch)))


def test_a_decode_plan_is_filled_again_and_keeps_its_tensors() -> None:
    shape = AttentionShape(4, 2, 16, 16, 2, torch.float32, DEVICE)
    oracle, backend = ReferencePagedAttention(shape), TritonPagedAttention(shape)
    plan = backend.make_decode_plan(2, 5)
    decode = plan.fixed.decode
    assert decode is not None
    kept = decode.indices.data_ptr()
    for lengths in ([(1, 70), (1, 2)], [(1, 5), (1, 64)]):
        query, layer, batch = paged_case(shape, lengths)
        plan.update(batch)
        assert_close(backend.run(query, layer, plan), oracle.run(query, layer, oracle.plan(batch)))
    assert decode.indices.data_ptr() == kept


def test_decode_parts_are_joined_alike_by_whoever_is_last() -> None:
    """Contexts of all parts, of some and of one; whatever a step leaves doesn't count in the next."""
    shape = AttentionShape(6, 2, 24, 16, 2, NARROW, DEVICE)
    oracle, backend = ReferencePagedAttention(shape), TritonPagedAttention(shape)
    with tuning.forced("attention_decode", {"num_parts": 6}):
        plan = backend.make_decode_plan(4, 30)
    decode = plan.fixed.decode
    assert decode is not None and decode.workspace.launch.num_parts == 6
    for contexts in ((400, 384, 100, 1), (1, 65, 64, 385)):
        query, layer, batch = paged_case(shape, [(1, context) for context in contexts])
        plan.update(batch)
        first = backend.run(query, layer, plan)
        assert_close(first, oracle.run(query, layer, oracle.plan(batch)))
        for _ in range(100 if DEVICE.type == "cuda" else 1):
            decode.workspace.partial.fill_(math.nan)
            assert torch.equal(backend.run(query, layer, plan), first)
            assert not decode.workspace.tickets.any()


def test_gathered_tokens() -> None:
    cache = rand(7, 3, 2, 2, 5, 24)
    tiles = torch.tensor([[6, 0, 3], [0, 5, 10], [5, 5, 2]], dtype=torch.int32, device=DEVICE)
    keys, values = triton_gather.gather_tokens(cache[:, 1], tiles, 12)
    for index, gathered in enumerate((keys, values)):
        expected = cache[[6, 0, 3], 1, :, index].permute(0, 2, 1, 3).flatten(0, 1)[:12]
        assert torch.equal(gathered, expected)


def sampling_batch(rows: list[tuple[float, int, float]]) -> SamplingBatch:
    heats, top_ks, top_ps = zip(*rows, strict=True)
    count = len(rows)
    return SamplingBatch(heats, top_ks, top_ps, [2**63 + 7 * i for i in range(count)], [i % 2 for i in range(count)], [
        3 + i for i in range(count)
    ])  # fmt: skip


@pytest.mark.parametrize(("vocab_size", "dtype"), [(50, NARROW), (2049, torch.float32)])
def test_draws_are_those_of_the_reference(vocab_size: int, dtype: torch.dtype) -> None:
    rows = [
        (0.0, 0, 1.0),
        (1.0, 0, 1.0),
        (0.7, 5, 1.0),
        (1.5, 0, 0.9),
        (0.9, 40, 0.5),
        (2.0, 10**6, 0.99),
        (1.0, 1, 0.1),
    ]
    logits = 3 * rand(len(rows), vocab_size, dtype=dtype)
    for batch in (sampling_batch(rows), sampling_batch(rows[:1] * 7), sampling_batch(rows[:2] * 3 + rows[:1])):
        assert torch.equal(triton_sampling.sample(logits, batch), sampling.sample(logits, batch))


@pytest.mark.parametrize(("vocab_size", "num_top"), [(3, 5), (300, 0), (4096, 20), (9001, 33)])
def test_scores_are_those_of_the_reference(vocab_size: int, num_top: int) -> None:
    """Logits that a mask has taken out, and the likeliest tokens all in one part of the vocabulary."""
    logits = 3 * rand(4, vocab_size)
    logits[1, 5000:] = -math.inf
    logits[2, -40:] += 20
    token_ids = torch.tensor([0, 1, vocab_size - 1, vocab_size // 2], device=DEVICE)
    values, ids = triton_sampling.score_tokens(logits, token_ids, num_top)
    expected, expected_ids = sampling.score_tokens(logits, token_ids, num_top)
    assert values.shape == expected.shape and torch.allclose(values, expected, atol=1e-4)
    assert ids.dtype == torch.int64 and torch.equal(ids, expected_ids)


def test_scores_of_equal_logits_begin_with_the_lowest_tokens() -> None:
    logits = torch.zeros((2, 5000), dtype=NARROW, device=DEVICE)
    logits[1, 4500:] = 1.0
    values, ids = triton_sampling.score_tokens(logits, torch.tensor([7, 7], device=DEVICE), 3)
    assert ids.tolist() == [[0, 1, 2], [4500, 4501, 4502]]
    assert torch.allclose(values[0].cpu(), torch.full((4,), -math.log(5000)))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_scores_of_rows_that_are_not_finite_are_nan() -> None:
    logits = rand(4, 5000)
    logits[0, 4999], logits[1, 7], logits[2] = math.nan, math.inf, -math.inf
    values, _ = triton_sampling.score_tokens(logits, torch.ones(4, dtype=torch.int64, device=DEVICE), 2)
    assert values[:3, 0].isnan().all() and values[3].isfinite().all()


@pytest.mark.parametrize("vocab_size", [31, 2048, 5001])
def test_masks_touch_forbidden_logits_alone(vocab_size: int) -> None:
    wide = rand(5, vocab_size + 3)
    rows, words = torch.tensor([3, 0, 4], device=DEVICE), -(-vocab_size // 32)
    bits = torch.randint(-(2**31), 2**31 - 1, (3, words), generator=torch.Generator().manual_seed(1)).int().to(DEVICE)
    bits[1] = 0
    expected, found = wide.clone(), wide.clone()
    sampling.mask_logits(expected[:, :vocab_size], rows, bits)
    triton_sampling.mask_logits(found[:, :vocab_size], rows, bits)
    assert torch.equal(found, expected)
    assert torch.equal(found[:, vocab_size:], wide[:, vocab_size:]), "a part wrote beyond its row"


@pytest.mark.parametrize("vocab_size", [31, 2048, 5001])
def test_penalties_are_those_of_the_reference_bit_for_bit(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(2)
    wide = rand(5, vocab_size + 3)
    rows, slots = (torch.tensor(numbers, device=DEVICE) for numbers in ([3, 0, 4], [1, 5, 2]))
    occurrences = torch.randint(0, 4, (6, vocab_size), generator=generator, dtype=torch.int32)
    occurrences += IN_PROMPT * torch.randint(0, 2, (6, vocab_size), generator=generator, dtype=torch.int32)
    occurrences[2] = 0
    penalties = torch.tensor([[1.3, 0.7, -0.31], [0.7, -1.1, 1.9], [1.3, 1.0, 1.0]])
    expected, found = wide.cpu().clone(), wide.clone()
    sampling.penalise_logits(expected[:, :vocab_size], rows.cpu(), slots.cpu(), occurrences, penalties)
    triton_sampling.penalise_logits(found[:, :vocab_size], rows, slots, occurrences.to(DEVICE), penalties.to(DEVICE))
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(found[[1, 2, 4]], wide[[1, 2, 4]]), "a row without occurrences, or of no draw, was changed"
    assert not torch.equal(found[3, :vocab_size], wide[3, :vocab_size])


def test_rows_that_are_not_finite_are_marked() -> None:
    logits = rand(4, 300)
    logits[0, 299], logits[1, 7], logits[2] = math.nan, math.inf, -math.inf
    drawn = triton_sampling.sample(logits, sampling_batch([(0.0, 0, 1.0)] * 4))
    assert drawn.tolist() == [-1, -1, -1, int(logits[3].argmax())]
