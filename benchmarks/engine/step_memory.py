"""KV memory of ``splitserve bench engine``: blocks of every group of a model's cache, and tables of sequences in it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splitserve.models.cache_groups import LayerGroup, layer_groups
from splitserve.models.config import ModelConfig
from splitserve.models.kv_plan import blocks_for
from splitserve.protocol.step import ChunkTable


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences of a step, all alike: each has ``length`` tokens at the end, the first ``start`` of which are there
    before its first step."""

    count: int
    start: int
    length: int


class StepMemory:
    """Random KV memory for the largest of several cases, as far as they fit ``most_bytes``."""

    def __init__(
        self,
        config: ModelConfig,
        cases: Sequence[Sequences],
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        most_bytes: int,
    ) -> None:
        self.block_size = block_size
        self._groups = layer_groups(config)
        shapes = [(len(group.layers), *config.block_shape(block_size)[1:]) for group in self._groups]
        block_bytes = [torch.Size(shape).numel() * dtype.itemsize for shape in shapes]
        counts = [1] * len(shapes)  # capturing graphs needs a block
        for case in cases:
            wanted = list(map(max, counts, self._needed(case)))
            if sum(count * size for count, size in zip(wanted, block_bytes, strict=True)) <= most_bytes:
                counts = wanted
        self.tensors = tuple(
            random_kv((count, *shape), dtype, device) for count, shape in zip(counts, shapes, strict=True)
        )
        generator = torch.Generator().manual_seed(0)
        self._orders = [torch.randperm(count, generator=generator).tolist() for count in counts]

    @property
    def num_blocks(self) -> list[int]:
        """Blocks of each group."""
        return [len(order) for order in self._orders]

    def has(self, case: Sequences) -> bool:
        """Return whether the case fits."""
        return all(needed <= count for needed, count in zip(self._needed(case), self.num_blocks, strict=True))

    def tables(self, case: Sequences) -> "list[SequenceTables]":
        """Return the tables of each sequence, whose blocks are apart."""
        per_sequence = [self._blocks_of(case, group) for group in self._groups]
        return [
            SequenceTables(
                tuple(
                    order[index * count : (index + 1) * count]
                    for order, count in zip(self._orders, per_sequence, strict=True)
                ),
                tuple(group.window for group in self._groups),
                self.block_size,
            )
            for index in range(case.count)
        ]

    def _needed(self, case: Sequences) -> list[int]:
        return [case.count * self._blocks_of(case, group) for group in self._groups]

    def _blocks_of(self, case: Sequences, group: LayerGroup) -> int:
        """Return the blocks that a sequence uses of a group: of a window those from its first step on."""
        return blocks_for(case.length, self.block_size) - first_number(case.start, group.window, self.block_size)


@dataclass(frozen=True, slots=True)
class SequenceTables:
    """A sequence's blocks in each group. Those of a window are used in turn."""

    blocks: tuple[list[int], ...]
    windows: tuple[int, ...]
    block_size: int

    def upto(self, start: int, end: int) -> tuple[list[int], tuple[ChunkTable, ...]]:
        """Return the tables of a chunk of the tokens ``start`` to ``end - 1``: the first group's, the others'."""
        last = blocks_for(end, self.block_size)
        return self.blocks[0][:last], tuple(
            ChunkTable(first, [blocks[number % len(blocks)] for number in range(first, last)])
            for blocks, window in zip(self.blocks[1:], self.windows[1:], strict=True)
            for first in [first_number(start, window, self.block_size)]
        )


def first_number(start: int, window: int, block_size: int) -> int:
    """Return the first block whose tokens one at ``start`` attends to."""
    return max(0, start + 1 - window) // block_size if window else 0


def random_kv(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make KV memory of random content, block by block."""
    kv_cache = torch.empty(tuple(shape), dtype=dtype, device=device)
    for block in kv_cache:
        block.normal_()
    return kv_cache
