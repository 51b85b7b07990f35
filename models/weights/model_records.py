"""The stored tensors of a model, by the names that its family has for them, checked before any is loaded."""

from collections.abc import Mapping
from pathlib import Path

from splitserve.common.errors import CheckpointError
from splitserve.models.config import ModelConfig
from splitserve.models.layers.decoder import HEAD_NAME, Decoder
from splitserve.models.layers.weight import Weight
from splitserve.models.weights.checkpoint import TensorRecord, read_records, text_records, without_layers
from splitserve.models.weights.fp8_scales import FP8
from splitserve.models.weights.fused_experts import expert_records
from splitserve.models.weights.reading import STORED_DTYPES
from splitserve.models.weights.shard import Kept

# Buffers that are computed today, scales of activations and of KV
_IGNORED_ENDINGS = (".rotary_emb.inv_freq", ".input_scale", ".activation_scale", ".k_scale", ".v_scale")


def model_records(directory: Path, config: ModelConfig, decoder: Decoder) -> dict[str, TensorRecord]:
    """Return the tensors in ``directory`` of the model that ``config`` describes and ``decoder`` declares.

    Those of other parts and of speculators are left out; fused tensors are there as their parts. Raises
    :class:`CheckpointError` for a missing, misshapen or unexpected tensor or one of the wrong type, naming it, and for
    files that can't be read.
    """
    records = read_records(directory)
    if config.text_of is not None:
        records = text_records(records)
    records = without_layers(records, config.num_layers, config.num_speculator_layers)
    records = expert_records(records, decoder.weights())
    _check(records, {weight.name: weight for weight in decoder.weights()}, config)
    return records


def _check(records: Mapping[str, TensorRecord], weights: Mapping[str, Weight], config: ModelConfig) -> None:
    """Raise :class:`CheckpointError` for a tensor that is missing, unexpected, misshapen or of the wrong type."""
    expected = {name: weight.shape for name, weight in weights.items()}
    if config.fp8 is not None:
        for name, weight in weights.items():
            if weight.may_be_fp8 and name in records and records[name].dtype == FP8:
                expected |= weight.scale_shapes(config.fp8, records)
    missing = [name for name in expected if name not in records]
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_few(missing)}; is config.json of another model?")
    # A tied head may be stored all the same, and old Llama files carry a buffer that is computed today.
    unexpected = [name for name in sorted(records) if name not in expected and name != HEAD_NAME]
    unexpected = [name for name in unexpected if not name.endswith(_IGNORED_ENDINGS)]
    if unexpected:
        raise CheckpointError(f"the checkpoint has tensors that its config.json doesn't explain: {_few(unexpected)}")
    for name, shape in expected.items():
        _check_record(records[name], shape, weights.get(name), has_fp8=config.fp8 is not None)


def _check_record(record: TensorRecord, shape: tuple[int, ...], weight: Weight | None, *, has_fp8: bool) -> None:
    if record.shape != shape and not (shape == () and record.shape == (1,)):
        raise CheckpointError(
            f"tensor {record.name} in {record.file.name} has shape {list(record.shape)}; config.json needs "
            f"{list(shape)}"
        )
    is_packed = weight is not None and weight.kept is Kept.BYTES
    supported = ["U8"] if is_packed else [name for name in STORED_DTYPES if name != "U8"]
    if record.dtype not in supported:
        raise CheckpointError(f"tensor {record.name} is stored as {record.dtype}; supported are {', '.join(supported)}")
    may_be_fp8 = weight is not None and weight.may_be_fp8 and has_fp8
    if record.dtype == FP8 and not may_be_fp8:
        raise CheckpointError(
            f"tensor {record.name} is stored as {FP8}: only the projections of layers may be, and with a "
            'quantization_config of the method "fp8" in config.json'
        )


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
