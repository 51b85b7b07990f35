"""Loads a checkpoint directory as a :class:`DecoderModel`: names and shapes are checked before anything is loaded.

Loading needs no second copy of the model. On CPU weights are read one layer at a time from the memory-mapped files,
fused, converted and packed; for a GPU several threads read them ahead through small pinned buffers (:mod:`.reading`). A
tied embedding on CPU stays a view of the file, in the checkpoint's own dtype: the packed LM head holds the only copy in
memory, and workers of one machine share the file's pages. So a served checkpoint's files must not be modified in place;
replace them by renaming, as ``splitserve demo-model`` does.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from splitserve.kernels.api import Kernels, Linear, NormedLinear, ResidualLinear
from splitserve.kernels.experts.spec import GatedActivation
from splitserve.kernels.experts.weights import Experts, ExpertWeights
from splitserve.kernels.fp8.linear import Pack as PackFp8
from splitserve.kernels.fp8.linear import fp8_unavailable_reason, select_fp8
from splitserve.kernels.fp8.weight import GROUP
from splitserve.kernels.registry import select_kernels
from splitserve.models.config import ModelConfig
from splitserve.models.declared import declare
from splitserve.models.decoder import DecoderModel
from splitserve.models.layers.decoder import Decoder, Progress
from splitserve.models.layers.layer import Order
from splitserve.models.layers.weight import Stack, Weight, stack_parts
from splitserve.models.parallel.ranks import Alone, Collectives, RowParallelLinear, VocabParallelHead
from splitserve.models.weights.checkpoint import TensorRecord
from splitserve.models.weights.fp8_scales import ScaleReader
from splitserve.models.weights.fused_experts import dequantised_blocks, dequantised_experts
from splitserve.models.weights.kv_scales import KVScales, read_kv_scales, scaled_fp8_rows, scaled_rows
from splitserve.models.weights.model_records import model_records
from splitserve.models.weights.reading import (
    MAX_THREADS,
    DummyReader,
    MappedReader,
    StagedReader,
    WeightReader,
)
from splitserve.models.weights.shard import Parts, Shard, head_rows, local_config

logger = logging.getLogger(__name__)

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype to compute in. "auto" is the checkpoint's, but on a CPU without fast arithmetic in it, float32."""
    dtype = _TORCH_DTYPES[config.dtype if name == "auto" else name]
    if device.type == "cpu" and name == "auto":
        fast = dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()
        return dtype if fast else torch.float32
    return dtype


def dtype_name(name: str, config: ModelConfig, device: str) -> str:
    """Return the name of :func:`resolve_dtype`'s result, for a device by its name."""
    return str(resolve_dtype(name, config, torch.device(device))).removeprefix("torch.")


def load_model(
    path: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    kernels: Kernels | None = None,
    progress: Progress | None = None,
    group: Collectives | None = None,
    kv_dtype: torch.dtype | None = None,
) -> DecoderModel:
    """Load the checkpoint at ``path``, or make random weights of its shape (``load_format`` "dummy").

    With ``group``, load the part of one rank; its model runs steps together with those of the other ranks. ``kv_dtype``
    float8_e4m3fn: for KV memory of that type, with the checkpoint's scales of keys and values; None: as ``dtype``.

    Raises :class:`CheckpointError` for a missing, misshapen or unexpected tensor, naming it and both shapes, and for
    files that can't be read.
    """
    group = group or Alone()
    if kernels is None:
        kernels = select_kernels(device, dtype, head_dim=config.head_dim, has_sinks=config.sinks)
    decoder = declare(config)
    records = None if load_format == "dummy" else model_records(Path(path), config, decoder)
    reader = _make_reader(records, config, decoder, dtype, device, is_part=group.shard.size > 1)
    pack_fp8, description = select_fp8(
        device, dtype, pack_linear=kernels.pack_linear, rms_norm=kernels.rms_norm, silu_mul=kernels.silu_mul
    )
    if config.fp8 is not None:
        logger.info("%s", description)
    kv_records = records if records is not None and kv_dtype == torch.float8_e4m3fn else {}
    with torch.inference_mode(), closing(reader):
        reader.announce([stack_parts(stack, group.shard) for stack in decoder.stacks()])
        source = _Source(
            reader,
            kernels,
            pack_fp8,
            group=group,
            kv_records=kv_records,
            dtype=dtype,
            packs_experts=kernels.backends.get("pack_experts") == "triton",
            keeps_fp8_experts=kernels.backends.get("pack_experts") == "triton"
            and fp8_unavailable_reason(device, dtype) is None,
        )
        decoder.load(source, progress)
    return DecoderModel(
        local_config(config, group.shard.size), decoder, kernels, dtype=dtype, device=device, group=group
    )


def _make_reader(
    records: Mapping[str, TensorRecord] | None,
    config: ModelConfig,
    decoder: Decoder,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_part: bool,
) -> WeightReader:
    """Return a reader of ``records``; None: random weights. ``is_part``: one rank's is all it reads."""
    if records is None:
        return DummyReader({weight.name: weight for weight in decoder.weights()}, dtype, device, config.fp8)
    scales = None if config.fp8 is None else ScaleReader(records, config.fp8.block)
    if device.type == "cpu" and not is_part:
        return MappedReader(records, dtype, scales)
    return StagedReader(records, dtype, device, scales, num_threads=MAX_THREADS if device.type == "cuda" else 1)


class _Source:
    """One rank's weights, from a reader. See :class:`splitserve.models.layers.layer.WeightSource`."""

    def __init__(
        self,
        reader: WeightReader,
        kernels: Kernels,
        pack_fp8: PackFp8,
        *,
        group: Collectives,
        kv_records: Mapping[str, TensorRecord],
        dtype: torch.dtype,
        packs_experts: bool,
        keeps_fp8_experts: bool,
    ) -> None:
        """``kv_records``: the checkpoint, where KV memory is in FP8 and scales of keys and values are to be used.
        ``packs_experts``, ``keeps_fp8_experts``: the experts' kernels take weights in MXFP4, in FP8."""
        self._reader = reader
        self._kernels = kernels
        self._pack_fp8 = pack_fp8
        self._group = group
        self._kv_records = kv_records
        self._dtype = dtype
        self._packs_experts = packs_experts
        self._keeps_fp8_experts = keeps_fp8_experts

    @property
    def kernels(self) -> Kernels:
        return self._kernels

    @property
    def shard(self) -> Shard:
        return self._group.shard

    @property
    def group(self) -> Collectives:
        return self._group

    def vector(self, weights: Stack, factors: Sequence[float] = (), orders: Sequence[Order] = ()) -> Tensor:
        parts = self._parts(weights)
        vector = scaled_rows(read := self._reader.read(parts), _scaled_parts(read, parts, factors))
        return _ordered(vector, _row_order(vector, parts, orders))

    def repeated(self, vectors: Sequence[tuple[Weight, int, float]], offset: float = 0.0) -> Tensor:
        rows = [(self._reader.read(self._parts((weight,))) + offset) * factor for weight, _, factor in vectors]
        return torch.cat([row.expand(count, -1) for row, (_, count, _) in zip(rows, vectors, strict=True)])

    def linear(self, weights: Stack, factors: Sequence[float] = (), orders: Sequence[Order] = ()) -> Linear:
        parts = self._parts(weights)
        if self._reader.is_fp8(parts):
            quantised = self._reader.read_fp8(parts)
            scaled = scaled_fp8_rows(quantised, _scaled_parts(quantised.weight, parts, factors))
            order = _row_order(scaled.weight, parts, orders)
            return self._pack_fp8(
                replace(scaled, weight=_ordered(scaled.weight, order), scales=_ordered(scaled.scales, order))
            )
        weight = scaled_rows(read := self._reader.read(parts), _scaled_parts(read, parts, factors))
        return self._kernels.pack_linear(_ordered(weight, _row_order(weight, parts, orders)))

    def matrix(self, weight: Weight) -> Tensor:
        parts = self._parts((weight,))
        if self._reader.is_fp8(parts):
            return self._reader.read_fp8(parts).dequantised(self._dtype)
        return self._reader.read(parts, own=True)

    def summed(self, weight: Weight, factor: float = 1.0) -> ResidualLinear:
        local = self.linear((weight,), (factor,))
        return local if self.shard.size == 1 else RowParallelLinear(local, self._group)

    def embedding_and_head(self, embedding: Weight, head: Weight) -> tuple[Tensor, NormedLinear]:
        reader, table_parts, head_parts = self._reader, self._parts((embedding,)), self._parts((head,))
        if embedding.name != head.name:
            return reader.read(table_parts, own=True), self._head(reader.read(head_parts), head)
        if isinstance(reader, MappedReader):
            lm_head = self._head(reader.read(head_parts), head)
            return reader.mapped(embedding.name), lm_head
        table, rows = reader.read(table_parts), head_parts[0].rows
        return table, self._head(table if rows is None else table[rows.start : rows.stop], head)

    def kv_scales(self, key_names: Sequence[str], value_names: Sequence[str]) -> KVScales:
        return read_kv_scales(self._kv_records, key_names, value_names)

    def experts(
        self,
        gate_up: Stack,
        down: Stack,
        activation: GatedActivation,
        biases: tuple[Stack, Stack] | None = None,
        scales: tuple[Stack, Stack] | None = None,
    ) -> Experts:
        first = next(index for index, weight in enumerate(down) if weight.is_on(self.shard))
        count = sum(weight.is_on(self.shard) for weight in down)
        own_scales = scales or (None, None)
        gate_up_weight, gate_up_scales = self._stacked(gate_up, own_scales[0], count)
        down_weight, down_scales = self._stacked(down, own_scales[1], count)
        gate_up_bias = down_bias = None
        if biases is not None:
            gate_up_bias, down_bias = (self._reader.read(self._parts(stack)).view(count, -1) for stack in biases)
            if self.shard.rank and not self.shard.has_whole_experts:
                down_bias = torch.zeros_like(down_bias)
        weights = ExpertWeights(
            gate_up_weight,
            down_weight,
            activation,
            first,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            gate_up_scales=gate_up_scales,
            down_scales=down_scales,
        )
        return self._kernels.pack_experts(weights)

    def _stacked(self, stack: Stack, scales: Stack | None, count: int) -> tuple[Tensor, Tensor | None]:
        """Return ``count`` experts' matrices as one [count, rows, columns], and its scales, if it has any.

        ``scales``: those of matrices in MXFP4."""
        parts = self._parts(stack)
        if scales is not None:
            blocks = _by_expert(self._reader.read(parts), count)
            exponents = _by_expert(self._reader.read(self._parts(scales)), count)
            if self._packs_experts:
                return blocks, exponents
            return dequantised_blocks(blocks, exponents, self._dtype), None
        if not self._reader.is_fp8(parts):
            return _by_expert(self._reader.read(parts), count), None
        stored = self._reader.read_fp8(parts)
        has_whole_groups = stored.group == GROUP and not stored.skipped and stored.weight.shape[1] % GROUP == 0
        if self._keeps_fp8_experts and has_whole_groups:
            return _by_expert(stored.weight, count), _by_expert(stored.scales, count)
        return dequantised_experts(stored, count, self._dtype), None

    def _head(self, rows: Tensor, head: Weight) -> NormedLinear:
        """``rows``: this rank's, as stored."""
        missing = head_rows(head.shape[0], self.shard.size) - rows.shape[0]
        local = self._kernels.pack_linear(F.pad(rows, (0, 0, 0, missing)) if missing else rows)
        return local if self.shard.size == 1 else VocabParallelHead(local, self._group, head.shape[0])

    def _parts(self, weights: Stack) -> Parts:
        return stack_parts(weights, self.shard)


def _by_expert(stacked: Tensor, count: int) -> Tensor:
    """Return the matrices [count, rows, columns] of ``stacked`` [count * rows, columns]."""
    return stacked.view(count, -1, stacked.shape[1])


def _scaled_parts(weight: Tensor, parts: Parts, factors: Sequence[float]) -> list[tuple[int, float]]:
    """Return (number of rows, factor) of each part of ``weight``; a part without a range is all of it."""
    counts = [weight.shape[0] if part.rows is None else len(part.rows) for part in parts]
    return list(zip(counts, factors, strict=True)) if factors else []


def _row_order(weight: Tensor, parts: Parts, orders: Sequence[Order]) -> Tensor | None:
    """Return the row of ``weight`` for each row of the ordered one; None: it stays as it is."""
    if not any(orders):
        return None
    rows: list[Tensor] = []
    first = 0
    for part, order in zip(parts, orders, strict=True):
        count = weight.shape[0] if part.rows is None else len(part.rows)
        unit = torch.tensor(order if order is not None else (0,))
        starts = torch.arange(first, first + count, len(unit))
        rows.append((starts.unsqueeze(1) + unit).flatten())
        first += count
    return torch.cat(rows).to(weight.device)


def _ordered(weight: Tensor, rows: Tensor | None) -> Tensor:
    if rows is None:
        return weight
    if weight.dtype == torch.float8_e4m3fn:
        return weight.view(torch.uint8)[rows].view(weight.dtype)
    return weight[rows]
