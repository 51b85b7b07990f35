"""Triton's decode attention as a tunable of ``splitserve tune`` (:mod:`splitserve.kernels.tuning.tunables`). Rows are
sequences.

A batch runs with one set of parameters whatever its contexts, so they are tuned over several. Each context is called
often enough that it moves as many bytes as the others; the total time counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import torch
from torch import Tensor

from splitserve.kernels.api import AttentionShape, PagedBatch
from splitserve.kernels.reference.attention import ReferencePagedAttention
from splitserve.kernels.triton.attention.paged import TritonPagedAttention
from splitserve.kernels.tuning.decode_launch import MAX_PARTS, OPERATION, decode_key, decode_launch
from splitserve.kernels.tuning.parameters import Params
from splitserve.kernels.tuning.tunables import TuneTarget, num_copies

CONTEXTS = (512, 1024, 2048, 8192)
_MEMORY_SHARE = 0.5  # share of free memory, for KV
_CPU_MEMORY_BYTES = 64 << 20
_PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, MAX_PARTS)
_MAX_PROGRAMS = 4224  # 32 for each of 132 multiprocessors: more parts only add overhead
_MIN_PROGRAMS = 32
_TILES = (32, 64, 128)
_NUM_WARPS = (2, 4, 8)
_NUM_STAGES = (2, 3, 4)


def make_tunable(operation: str) -> "DecodeTunable":
    assert operation == OPERATION
    return DecodeTunable()


class DecodeTunable:
    """Implements :class:`splitserve.kernels.tuning.tunables.Tunable`. Latent attention has no launch parameters."""

    def __init__(self, contexts: Sequence[int] = CONTEXTS) -> None:
        self._contexts = contexts

    def shape_keys(self, target: TuneTarget) -> list[str]:
        return [] if target.model.latent is not None else [decode_key(_shape(target))]

    def case(self, target: TuneTarget, key: str, rows: int) -> "DecodeCase | None":
        shape = _shape(target)
        assert key == decode_key(shape)
        if target.is_for_compiling:
            return DecodeCase(shape, rows, [1], num_blocks=1)
        free = _CPU_MEMORY_BYTES
        if target.device.type == "cuda":
            free = int(_MEMORY_SHARE * torch.cuda.mem_get_info(target.device)[0])
        block_bytes = shape.rows_per_block * shape.block_size * shape.head_dim * shape.dtype.itemsize
        num_blocks = free // block_bytes
        contexts = [context for context in self._contexts if rows * -(-context // shape.block_size) <= num_blocks]
        if not contexts:
            return None
        wanted = rows * -(-contexts[-1] // shape.block_size) + num_copies(block_bytes, target.device)
        return DecodeCase(shape, rows, contexts, min(num_blocks, wanted))


class DecodeCase:
    """Implements :class:`splitserve.kernels.tuning.tunables.TunableCase`."""

    tolerance = None

    def __init__(self, shape: AttentionShape, rows: int, contexts: Sequence[int], num_blocks: int) -> None:
        """Create inputs. ``contexts`` ascend; if all sequences together need more than ``num_blocks`` blocks, they
        share some."""
        self._shape, self._rows = shape, rows
        self._contexts = [context for context in contexts for _ in range(contexts[-1] // context)]
        sizes = (num_blocks, shape.num_layers, shape.num_kv_heads, 2, shape.block_size, shape.head_dim)
        self._kv = torch.empty(sizes, dtype=shape.dtype, device=shape.device).normal_()
        query_sizes = (rows, shape.num_heads, shape.head_dim)
        self._query = torch.empty(query_sizes, dtype=shape.dtype, device=shape.device).normal_()
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        self._batches = [self._batch(index, order) for index in range(len(self._contexts))]

    def _batch(self, index: int, order: Sequence[int]) -> PagedBatch:
        """Return the batch of a call; each call begins at another point of ``order``."""
        context = self._contexts[index]
        needed = -(-context // self._shape.block_size)
        starts = range(index * self._rows * needed, (index + 1) * self._rows * needed, needed)
        tables = [[order[at % len(order)] for at in range(start, start + needed)] for start in starts]
        return PagedBatch([1] * self._rows, [context] * self._rows, tables)

    @property
    def num_bytes(self) -> int:
        shape = self._shape
        token_bytes = 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
        return self._rows * token_bytes * sum(self._contexts) // len(self._contexts) + 2 * self._query.nbytes

    def candidates(self, best: Params) -> list[Params]:
        """Return all numbers of parts first, then variations of one parameter of the best at a time."""
        programs = self._rows * self._shape.num_kv_heads
        parts = [count for count in _PARTS if _MIN_PROGRAMS <= programs * count <= _MAX_PROGRAMS] or [1]
        if not best:
            launch = decode_launch(self._shape, self._rows)
            return [asdict(replace(launch, num_parts=count)) for count in parts]
        values = {"num_parts": parts, "tile": _TILES, "num_warps": _NUM_WARPS, "num_stages": _NUM_STAGES}
        return [{**best, name: value} for name, choices in values.items() for value in choices]

    def calls(self) -> list[Callable[[], Tensor]]:
        attention = TritonPagedAttention(self._shape)
        return [self._call(attention, index) for index in range(len(self._contexts))]

    def _call(self, attention: TritonPagedAttention, index: int) -> Callable[[], Tensor]:
        batch = self._batches[index]
        plan = attention.make_decode_plan(self._rows, len(batch.block_tables[0]))
        plan.update(batch)
        layer = self._kv[:, index % self._shape.num_layers]
        return lambda: attention.run(self._query, layer, plan)

    def expected(self) -> Tensor:
        reference = ReferencePagedAttention(self._shape)
        return reference.run(self._query, self._kv[:, 0], reference.plan(self._batches[0]))


def _shape(target: TuneTarget) -> AttentionShape:
    model = target.model
    return AttentionShape(
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        target.block_size,
        model.num_layers,
        target.dtype,
        target.device,
    )
