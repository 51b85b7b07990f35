"""From a checkpoint directory to a :class:`DecoderModel`: names and shapes are checked before anything is loaded.

Load needs no second copy of the model. On CPU weights are read one layer at a time from the memory-mapped files, fused,
converted and packed; for a GPU several threads read them ahead through small pinned buffers (:mod:`.reading`). A tied
embedding on CPU stays a view of the file, in the checkpoint's own dtype: the packed LM head holds the only copy in
memory, and workers of one machine share the file's pages. So a served checkpoint's files must not be modified in place;
replace them by renaming, as ``splitserve demo-model`` does.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from splitserve.errors import CheckpointError
from splitserve.kernels.api import Kernels, Linear, NormedLinear, ResidualLinear
from splitserve.kernels.fp8_linear import Pack as PackFp8
from splitserve.kernels.fp8_linear import select_fp8
from splitserve.kernels.registry import select_kernels
from splitserve.models.checkpoint import TensorRecord, read_records
from splitserve.models.config import ModelConfig
from splitserve.models.decoder import DecoderModel, LayerWeights, ModelWeights
from splitserve.models.fp8_scales import FP8, ScaleReader
from splitserve.models.kv_scales import UNSCALED, KVScales, read_kv_scales, scaled_fp8_rows, scaled_rows
from splitserve.models.parallel import Alone, Collectives, RowParallelLinear, VocabParallelHead
from splitserve.models.reading import MAX_THREADS, STORED_DTYPES, DummyReader, MappedReader, StagedReader, WeightReader
from splitserve.models.shard import (
    Parts,
    WeightParts,
    expected_shapes,
    head_rows,
    is_projection,
    local_config,
    scale_shapes,
)

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all) while weights load."""

# Buffers that are computed today, scales of activations and of KV
_IGNORED_ENDINGS = (".rotary_emb.inv_freq", ".input_scale", ".k_scale", ".v_scale")
_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _no_progress(_done: int, _total: int) -> None:
    pass


def resolve_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype to compute in. "auto" is the checkpoint's, but on a CPU without fast arithmetic in it, float32."""
    dtype = _TORCH_DTYPES[config.dtype if name == "auto" else name]
    if device.type == "cpu" and name == "auto":
        fast = dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()
        return dtype if fast else torch.float32
    return dtype


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
    """Loads the checkpoint at ``path``, or makes random weights of its shape (``load_format`` "dummy").

    With ``group``, this is the part of a rank: its model does what all ranks' models do together. ``kv_dtype``
    float8_e4m3fn: for KV memory in that, by the checkpoint's scales of keys and values; None: as ``dtype``.

    Raises :class:`CheckpointError` for a missing, misshapen or unexpected tensor, naming it and both shapes, and for
    files that can't be read.
    """
    group = group or Alone()
    if kernels is None:
        kernels = select_kernels(device, dtype, head_dim=config.head_dim)
    records = None if load_format == "dummy" else read_records(Path(path))
    reader = _make_reader(records, config, dtype, device, is_part=group.shard.size > 1)
    kv_scales = [UNSCALED] * config.num_layers
    if records is not None and kv_dtype == torch.float8_e4m3fn:
        kv_scales = read_kv_scales(records, config.num_layers)
    pack_fp8, description = select_fp8(
        device, dtype, pack_linear=kernels.pack_linear, rms_norm=kernels.rms_norm, silu_mul=kernels.silu_mul
    )
    if config.fp8 is not None:
        logger.info("%s", description)
    with torch.inference_mode(), closing(reader):
        builder = _Builder(reader, config, kernels, pack_fp8, group=group, kv_scales=kv_scales)
        weights = builder.build(progress or _no_progress)
    return DecoderModel(
        local_config(config, group.shard.size), weights, kernels, dtype=dtype, device=device, group=group
    )


def _make_reader(
    records: Mapping[str, TensorRecord] | None,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_part: bool,
) -> WeightReader:
    """``records`` None: random weights. ``is_part``: of a rank, which reads nothing else of the files."""
    if records is None:
        return DummyReader(expected_shapes(config), dtype, device, config.fp8)
    _check_records(records, config)
    scales = None if config.fp8 is None else ScaleReader(records, config.fp8.block)
    if device.type == "cpu" and not is_part:
        return MappedReader(records, dtype, scales)
    return StagedReader(records, dtype, device, scales, num_threads=MAX_THREADS if device.type == "cuda" else 1)


def _check_records(records: Mapping[str, TensorRecord], config: ModelConfig) -> None:
    expected = expected_shapes(config)
    in_fp8 = [name for name in expected if name in records and records[name].dtype == FP8]
    if config.fp8 is not None:
        for name in filter(is_projection, in_fp8):
            expected |= scale_shapes(config, name)
    missing = [name for name in expected if name not in records]
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_few(missing)}; is config.json of another model?")
    # A tied head may be stored all the same, and old Llama files carry a buffer that is computed today.
    ignored = {"lm_head.weight"}
    unexpected = [name for name in sorted(records) if name not in expected and name not in ignored]
    unexpected = [name for name in unexpected if not name.endswith(_IGNORED_ENDINGS)]
    if unexpected:
        raise CheckpointError(f"the checkpoint has tensors that its config.json doesn't explain: {_few(unexpected)}")
    for name, shape in expected.items():
        record = records[name]
        if record.shape != shape and not (shape == () and record.shape == (1,)):
            raise CheckpointError(
                f"tensor {name} in {record.file.name} has shape {list(record.shape)}; config.json needs {list(shape)}"
            )
        if record.dtype not in STORED_DTYPES:
            raise CheckpointError(
                f"tensor {name} is stored as {record.dtype}; supported are {', '.join(STORED_DTYPES)}"
            )
        if record.dtype == FP8 and (config.fp8 is None or not is_projection(name)):
            raise CheckpointError(
                f"tensor {name} is stored as {FP8}: only the projections of layers may be, and with a "
                'quantization_config of the method "fp8" in config.json'
            )


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


class _Builder:
    """Turns what a reader gives into one rank's :class:`ModelWeights`."""

    def __init__(
        self,
        reader: WeightReader,
        config: ModelConfig,
        kernels: Kernels,
        pack_fp8: PackFp8,
        *,
        group: Collectives,
        kv_scales: Sequence[KVScales],
    ) -> None:
        self._reader = reader
        self._config = config
        self._local = local_config(config, group.shard.size)
        self._kernels = kernels
        self._pack_fp8 = pack_fp8
        self._group = group
        self._kv_scales = kv_scales
        self._parts = WeightParts(config, group.shard)
        self._layers = [self._parts.layer(index) for index in range(config.num_layers)]

    def build(self, progress: Progress) -> ModelWeights:
        num_steps = self._config.num_layers + 1
        self._reader.announce(self._all_parts())
        layers = []
        for index, parts in enumerate(self._layers):
            layers.append(self._layer(parts, self._kv_scales[index]))
            progress(index + 1, num_steps)
        embedding, lm_head = self._embedding_and_head()
        final_norm = self._reader.read(self._parts.final_norm)
        progress(num_steps, num_steps)
        return ModelWeights(embedding, tuple(layers), final_norm, lm_head)

    def _all_parts(self) -> list[Parts]:
        """Everything that will be read, in that order."""
        of_layers = [parts for layer in self._layers for parts in layer.values()]
        head = [] if self._config.tie_word_embeddings else [self._parts.head]
        return [*of_layers, self._parts.embedding, *head, self._parts.final_norm]

    def _layer(self, parts: Mapping[str, Parts], kv_scales: KVScales) -> LayerWeights:
        """With the scales of keys and values folded in (:mod:`.kv_scales`)."""
        query, key = kv_scales.key, 1.0 / kv_scales.key
        qk_norm = None
        if self._config.qk_norm:
            query_norm = (self._reader.read(parts["q_norm"]) * query).expand(self._local.num_heads, -1)
            key_norm = (self._reader.read(parts["k_norm"]) * key).expand(self._local.num_kv_heads, -1)
            qk_norm, query, key = torch.cat((query_norm, key_norm)), 1.0, 1.0
        return LayerWeights(
            input_norm=self._reader.read(parts["input_norm"]),
            qkv=self._linear(parts["qkv"], (query, key, 1.0 / kv_scales.value)),
            qk_norm=qk_norm,
            output=self._row_parallel(parts["output"], (kv_scales.value,)),
            post_attention_norm=self._reader.read(parts["post_attention_norm"]),
            gate_up=self._linear(parts["gate_up"]),
            down=self._row_parallel(parts["down"]),
        )

    def _linear(self, parts: Parts, factors: Sequence[float] = ()) -> Linear:
        """``factors``: of each part; none: 1."""
        if self._reader.is_fp8(parts):
            quantised = self._reader.read_fp8(parts)
            return self._pack_fp8(scaled_fp8_rows(quantised, self._rows(quantised.weight, parts, factors)))
        weight = self._reader.read(parts)
        return self._kernels.pack_linear(scaled_rows(weight, self._rows(weight, parts, factors)))

    def _rows(self, weight: Tensor, parts: Parts, factors: Sequence[float]) -> list[tuple[int, float]]:
        """(Number of rows, factor) of each part of ``weight``; one that doesn't say is all of it."""
        counts = [weight.shape[0] if part.rows is None else len(part.rows) for part in parts]
        return list(zip(counts, factors, strict=True)) if factors else []

    def _row_parallel(self, parts: Parts, factors: Sequence[float] = ()) -> ResidualLinear:
        local = self._linear(parts, factors)
        return local if self._group.shard.size == 1 else RowParallelLinear(local, self._group)

    def _embedding_and_head(self) -> tuple[Tensor, NormedLinear]:
        embedding, head, reader = self._parts.embedding, self._parts.head, self._reader
        if not self._config.tie_word_embeddings:
            return reader.read(embedding, own=True), self._head(reader.read(head))
        if isinstance(reader, MappedReader):
            lm_head = self._head(reader.read(head))
            return reader.mapped(embedding[0].name), lm_head
        table = reader.read(embedding)
        rows = head[0].rows
        return table, self._head(table if rows is None else table[rows.start : rows.stop])

    def _head(self, weight: Tensor) -> NormedLinear:
        """``weight``: this rank's rows of the LM head, in the checkpoint."""
        missing = head_rows(self._config.vocab_size, self._group.shard.size) - weight.shape[0]
        local = self._kernels.pack_linear(F.pad(weight, (0, 0, 0, missing)) if missing else weight)
        if self._group.shard.size == 1:
            return local
        return VocabParallelHead(local, self._group, self._config.vocab_size)
