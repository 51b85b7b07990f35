"""Decode attention divides contexts of any lengths into items of about the same size, and joins them again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_cases import paged_case, plain_attention
from splitserve.kernels.api import AttentionShape, PagedBatch
from splitserve.kernels.paged import flat_tables
from splitserve.kernels.triton.attention.paged import TritonPagedAttention
from splitserve.kernels.triton.attention.plans import decode_items, num_alike, num_decode_items
from splitserve.kernels.tuning import parameters as tuning
from splitserve.kernels.tuning.decode_launch import MAX_PARTS, DecodeLaunch

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.on_gpu]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TILE = 16
BLOCK_SIZE = 16


def batch_of(contexts: list[int], *, repeats: int = 0) -> PagedBatch:
    """Return a batch whose last sequence is repeated, as padding rows repeat it."""
    tables = [list(range(-(-context // BLOCK_SIZE))) for context in contexts]
    contexts, tables = contexts + contexts[-1:] * repeats, tables + tables[-1:] * repeats
    return PagedBatch([1] * len(contexts), contexts, tables)


@given(
    contexts=st.lists(st.integers(1, 300) | st.integers(1, 5000), min_size=1, max_size=20),
    repeats=st.integers(0, 5),
    num_parts=st.sampled_from([1, 2, 3, 8, MAX_PARTS]),
    window=st.none() | st.integers(1, 400),
)
def test_items_cover_each_context_once(contexts: list[int], repeats: int, num_parts: int, window: int | None) -> None:
    batch = batch_of(contexts, repeats=repeats)
    size, tables = len(batch.query_lens), flat_tables(batch, BLOCK_SIZE)
    assert num_alike(batch, size) == repeats + 1
    items = decode_items(tables, size, repeats + 1, DecodeLaunch(num_parts, TILE), window)
    assert len(items) == num_decode_items(size, num_parts)
    used = [[int(number) for number in item] for item in items if item[3]]
    assert not items[len(used) :].any()
    begins = [max(0, context - window) // TILE if window else 0 for context in contexts]
    lengths = [-(-(end - first * TILE) // TILE) for _, _, first, end, *_ in used]  # in tiles
    share = max(1.0, sum(lengths) / (size * num_parts))
    for sequence, (context, begin) in enumerate(zip(contexts, begins, strict=True)):
        own = [at for at, item in enumerate(used) if item[0] == sequence]
        assert own == list(range(own[0], own[-1] + 1))
        assert used[own[0]][2] == begin and used[own[-1]][3] == context
        assert all(used[at][3] == used[at + 1][2] * TILE for at in own[:-1])
        rows = repeats + 1 if sequence == len(contexts) - 1 else 1
        for at in own:
            assert used[at][1] == tables.indptr[sequence] and used[at][4:] == [own[0], len(own), context, rows]
            assert lengths[at] < 2 * share or len(own) == MAX_PARTS
        assert max(lengths[at] for at in own) - min(lengths[at] for at in own) <= 1
    means = [sum(lengths[at : at + item[5]]) / item[5] for at, item in enumerate(used) if item[4] == at]
    assert means == sorted(means, reverse=True)


@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (800, True)])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_long_context_among_short_ones(num_parts: int, window: int | None, has_sinks: bool) -> None:
    """The long one has more parts than are joined at a time."""
    shape = AttentionShape(6, 2, 24, BLOCK_SIZE, 2, torch.float32, DEVICE, window=window, has_sinks=has_sinks)
    lengths = [(1, 3), (1, 40), (1, 900), *[(1, 17)] * (25 if num_parts == 1 else 8)]
    sinks = torch.linspace(-2.0, 2.0, 6, device=DEVICE) if has_sinks else None
    query, kv_layer, batch = paged_case(shape, lengths)
    with tuning.forced("attention_decode", {"num_parts": num_parts, "tile": TILE}):
        attention = TritonPagedAttention(shape)
        plan = attention.make_decode_plan(len(lengths), 60)
    plan.update(batch)
    decode = plan.fixed.decode
    assert decode is not None and decode.items[:, 5].max() > {1: 4, 3: 16}[num_parts]
    out = attention.run(query, kv_layer, plan, sinks)
    expected = plain_attention(query.cpu(), kv_layer.cpu(), batch, None if sinks is None else sinks.cpu(), window)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("last", [30, 400])
def test_padding_rows_get_the_result_of_the_sequence_that_they_repeat(last: int) -> None:
    shape = AttentionShape(4, 2, 16, BLOCK_SIZE, 2, torch.float32, DEVICE)
    query, kv_layer, batch = paged_case(shape, [(1, 20), (1, 90), (1, last)])
    query = torch.cat((query, query[-1:], query[-1:]))
    tables = [*batch.block_tables, batch.block_tables[-1], batch.block_tables[-1]]
    padded = PagedBatch([1] * 5, [*batch.context_lens, last, last], tables)
    with tuning.forced("attention_decode", {"num_parts": 2, "tile": TILE}):
        attention = TritonPagedAttention(shape)
        plan = attention.make_decode_plan(5, 26)
    plan.update(padded)
    out = attention.run(query, kv_layer, plan)
    expected = plain_attention(query.cpu(), kv_layer.cpu(), padded, None)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(out[2], out[3]) and torch.equal(out[2], out[4])


@pytest.mark.parametrize(
    "is_captured", [False, pytest.param(True, marks=pytest.mark.skipif(DEVICE.type == "cpu", reason="CUDA graphs"))]
)
def test_padding_rows_of_a_step_with_a_prompt(is_captured: bool) -> None:
    """They come between the sequences that decode and the prompt."""
    shape = AttentionShape(4, 2, 16, BLOCK_SIZE, 2, torch.float32, DEVICE, window=50)
    query, kv_layer, batch = paged_case(shape, [(1, 20), (1, 90), (20, 30)])
    tables = [batch.block_tables[0], *[batch.block_tables[1]] * 3, batch.block_tables[2]]
    padded = PagedBatch([1, 1, 1, 1, 20], [20, 90, 90, 90, 30], tables)
    query = torch.cat((query[:2], query[1:2], query[1:2], query[2:]))
    attention = TritonPagedAttention(shape)
    plan = attention.make_mixed_plans(4, 32, 2, 8)[0]
    plan.update(padded)
    out = attention.run(query, kv_layer, plan)
    if is_captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention.run(query, kv_layer, plan)
        graph.replay()
    expected = plain_attention(query.cpu(), kv_layer.cpu(), padded, None, 50)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(out[1], out[2]) and torch.equal(out[1], out[3])


def test_plans_of_an_attention_share_memory_for_parts() -> None:
    """The largest comes first, as graphs are captured; each is right after the others."""
    shape = AttentionShape(4, 2, 16, BLOCK_SIZE, 2, torch.float32, DEVICE)
    with tuning.forced("attention_decode", {"num_parts": 3, "tile": TILE}):
        attention = TritonPagedAttention(shape)
        plans = {size: attention.make_decode_plan(size, 20) for size in (4, 2, 1)}
    workspaces = [plan.fixed.decode.workspace for plan in plans.values() if plan.fixed.decode is not None]
    assert (
        len({each.partial.data_ptr() for each in workspaces})
        == len({each.tickets.data_ptr() for each in workspaces})
        == 1
    )
    assert [each.num_items for each in workspaces] == [16, 8, 4]
    for size, plan in [*plans.items(), *reversed(plans.items())]:
        query, kv_layer, batch = paged_case(shape, [(1, 30), (1, 300), (1, 7), (1, 90)][:size])
        plan.update(batch)
        expected = plain_attention(query.cpu(), kv_layer.cpu(), batch)
        torch.testing.assert_close(attention.run(query, kv_layer, plan).double().cpu(), expected, rtol=1e-4, atol=1e-5)


def test_the_same_table_with_another_context_is_another_sequence() -> None:
    table = [0, 1, 2]
    assert num_alike(PagedBatch([1] * 3, [40, 40, 40], [table] * 3), 3) == 3
    assert num_alike(PagedBatch([1] * 3, [40, 39, 40], [table] * 3), 3) == 1
    assert num_alike(PagedBatch([1] * 3, [40, 40, 40], [table, table, list(table)]), 3) == 1
