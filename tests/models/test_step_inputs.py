"""The numbers that a GPU's step reads, packed on the host, for a cache with two groups; the second keeps a window."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from splitserve.models.runner.cache import paged_batch
from splitserve.models.runner.graph_sizes import MixedSize
from splitserve.models.runner.inputs import StepInputs
from splitserve.protocol.step import ChunkTable, SampleSpec, ScheduledChunk

BLOCK_SIZE = 4
GREEDY = SampleSpec(0.0, 0, 1.0, 0, 0, 1)


def chunk(tokens: list[int], start: int, first_number: int, *, previous: int | None = None) -> ScheduledChunk:
    """A chunk with blocks from 10 on in the first group, and from 20 on in the second, whose table begins with the
    sequence's block ``first_number``."""
    num_blocks = -(-(start + len(tokens)) // BLOCK_SIZE)
    window = ChunkTable(first_number, list(range(20 + first_number, 20 + num_blocks)))
    return ScheduledChunk(tokens, start, list(range(10, 10 + num_blocks)), GREEDY, previous, other_tables=(window,))


DECODES = [chunk([7], 13, 2), chunk([-1], 9, 1, previous=4)]
PROMPT = chunk([1, 2, 3], 6, 1)
# token, position, row of a drawn token, block in each group
ROWS = [(7, 13, -1, 13, 23), (-1, 9, 5, 12, 22), (1, 6, -1, 11, 21), (2, 7, -1, 11, 21), (3, 8, -1, 12, 22)]
UNUSED = (0, 0, -1, -1, -1)


@pytest.fixture
def step_inputs(monkeypatch: pytest.MonkeyPatch) -> StepInputs:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    cache: Any = SimpleNamespace(
        num_groups=2,
        block_size=BLOCK_SIZE,
        batches=lambda chunks: [paged_batch(chunks, group, BLOCK_SIZE) for group in range(2)],
    )
    inputs = StepInputs(cache)
    inputs.row_of_chunk = {4: 5}
    return inputs


class Plan:
    """Keeps the batches that it is filled for."""

    def update(self, batches: Any) -> None:
        self.batches = batches


def test_rows_of_a_step_launched_kernel_by_kernel(step_inputs: StepInputs) -> None:
    out = np.zeros((step_inputs.num_rows, len(ROWS)), dtype=np.int64)
    drawing = step_inputs.flatten([*DECODES, PROMPT], out)
    assert [tuple(row) for row in out.T.tolist()] == ROWS
    assert drawing.tolist() == [0, 1, 4]


def test_rows_of_a_graph_of_decodes(step_inputs: StepInputs) -> None:
    """Two sequences in a graph of four rows."""
    inputs, plan = torch.zeros((step_inputs.num_rows, 4), dtype=torch.int64), Plan()
    step_inputs.fill(inputs, plan, DECODES, 4)  # type: ignore[arg-type]
    assert [tuple(row) for row in inputs.T.tolist()] == [ROWS[0], *[ROWS[1]] * 3]
    first, window = plan.batches
    assert first.context_lens == [14, 10, 10, 10] and window.context_lens == [6, 6, 6, 6]
    assert [list(table) for table in window.block_tables] == [[22, 23], *[[21, 22]] * 3]


def test_rows_of_a_graph_with_a_prompt(step_inputs: StepInputs) -> None:
    """Three rows for sequences that decode, four for a prompt; then the rows that draw."""
    size, plan = MixedSize(3, 4), Plan()
    inputs = torch.full((step_inputs.num_rows * sum(size) + 6,), 99, dtype=torch.int64)
    step_inputs.fill_mixed(inputs, plan, [*DECODES, PROMPT], size)  # type: ignore[arg-type]
    flat = inputs[: step_inputs.num_rows * sum(size)].view(step_inputs.num_rows, -1)
    assert [tuple(row) for row in flat.T.tolist()] == [*ROWS[:2], ROWS[1], *ROWS[2:], UNUSED]
    assert inputs[flat.numel() :].tolist() == [0, 1, 5, 0, 0, 0]
    assert [batch.query_lens for batch in plan.batches] == [[1, 1, 1, 3]] * 2
