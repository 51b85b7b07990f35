"""From a checkpoint directory to a :class:`DecoderModel`: names and shapes are checked before anything is loaded.

Weights are read one layer at a time from the memory-mapped files, fused, converted and packed, so that load needs no
second copy of the model. A tied embedding on CPU stays a view of the file, in the checkpoint's own dtype: the packed
LM head holds the only copy in memory, and workers of one machine share the file's pages. So a served checkpoint's files
must not be modified in place; replace them by renaming, as ``splitserve demo-model`` does.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from splitserve.errors import CheckpointError
from splitserve.kernels.api import Kernels, Linear
from splitserve.kernels.linear import PlainLinear
from splitserve.kernels.registry import select_kernels
from splitserve.models.checkpoint import TensorRecord, read_records
from splitserve.models.config import ModelConfig
from splitserve.models.decoder import DecoderModel, LayerWeights, ModelWeights

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all) while weights load."""

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED_DTYPES = ("F32", "BF16", "F16")
_DUMMY_STD = 0.02


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
) -> DecoderModel:
    """Loads the checkpoint at ``path``, or makes random weights of its shape (``load_format`` "dummy").

    Raises :class:`CheckpointError` for a missing, misshapen or unexpected tensor, naming it and both shapes, and for
    files that can't be read.
    """
    if kernels is None:
        kernels = select_kernels(device, dtype, head_dim=config.head_dim)
    source: _Source
    if load_format == "dummy":
        source = _DummySource(expected_shapes(config), dtype, device)
    else:
        source = _FileSource(Path(path), expected_shapes(config), device)
    with torch.inference_mode():
        builder = _Builder(source, config, kernels, dtype=dtype, device=device)
        weights = builder.build(progress or _no_progress)
    return DecoderModel(config, weights, kernels, dtype=dtype, device=device)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this configuration must have, by its Hugging Face name."""
    hidden, intermediate, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_heads * head_dim, config.num_kv_heads * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    if config.qk_norm:
        layer |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


class _Source(Protocol):
    def get(self, name: str) -> Tensor: ...

    def remap(self, name: str, tensor: Tensor) -> Tensor:
        """``tensor``, which ``get(name)`` gave, without the pages that were made resident since."""
        ...


class _FileSource:
    """Tensors of the checkpoint's files: on CPU views of the mapped files, else straight on the device."""

    def __init__(self, directory: Path, expected: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        self._device = device
        self._records = read_records(directory)
        _check_records(self._records, expected)
        self._open: dict[Path, Any] = {}

    def get(self, name: str) -> Tensor:
        file = self._records[name].file
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt", device=str(self._device))
            tensor: Tensor = self._open[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: tensor {name} can't be read: {error}") from error
        return tensor

    def remap(self, name: str, tensor: Tensor) -> Tensor:
        self._open.clear()
        fresh = self.get(name)
        assert fresh.shape == tensor.shape
        return fresh


class _DummySource:
    """Random weights of the right shapes, the same for every worker."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        self._shapes = shapes
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def get(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        return torch.empty(shape, dtype=self._dtype, device=self._device).normal_(
            0.0, _DUMMY_STD, generator=self._generator
        )

    def remap(self, name: str, tensor: Tensor) -> Tensor:  # noqa: ARG002
        return tensor


def _check_records(records: Mapping[str, TensorRecord], expected: Mapping[str, tuple[int, ...]]) -> None:
    missing = [name for name in expected if name not in records]
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_few(missing)}; is config.json of another model?")
    # A tied head may be stored all the same, and old Llama files carry a buffer that is computed today.
    ignored = {"lm_head.weight"}
    unexpected = [name for name in sorted(records) if name not in expected and name not in ignored]
    unexpected = [name for name in unexpected if not name.endswith(".rotary_emb.inv_freq")]
    if unexpected:
        raise CheckpointError(f"the checkpoint has tensors that its config.json doesn't explain: {_few(unexpected)}")
    for name, shape in expected.items():
        record = records[name]
        if record.shape != shape:
            raise CheckpointError(
                f"tensor {name} in {record.file.name} has shape {list(record.shape)}; config.json needs {list(shape)}"
            )
        if record.dtype not in _STORED_DTYPES:
            raise CheckpointError(
                f"tensor {name} is stored as {record.dtype}; supported are {', '.join(_STORED_DTYPES)}"
            )


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


class _Builder:
    """Turns a source's tensors into :class:`ModelWeights`."""

    def __init__(
        self, source: _Source, config: ModelConfig, kernels: Kernels, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._source = source
        self._config = config
        self._kernels = kernels
        self._dtype = dtype
        self._device = device

    def build(self, progress: Progress) -> ModelWeights:
        num_steps = self._config.num_layers + 1
        layers = []
        for index in range(self._config.num_layers):
            layers.append(self._layer(f"model.layers.{index}"))
            progress(index + 1, num_steps)
        embedding, lm_head = self._embedding_and_head()
        final_norm = self._vector("model.norm")
        progress(num_steps, num_steps)
        return ModelWeights(embedding, tuple(layers), final_norm, lm_head)

    def _layer(self, prefix: str) -> LayerWeights:
        attention = f"{prefix}.self_attn"
        qk_norm = None
        if self._config.qk_norm:
            query = self._vector(f"{attention}.q_norm").expand(self._config.num_heads, -1)
            key = self._vector(f"{attention}.k_norm").expand(self._config.num_kv_heads, -1)
            qk_norm = torch.cat((query, key))
        return LayerWeights(
            input_norm=self._vector(f"{prefix}.input_layernorm"),
            qkv=self._linear(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            qk_norm=qk_norm,
            output=self._linear(f"{attention}.o_proj"),
            post_attention_norm=self._vector(f"{prefix}.post_attention_layernorm"),
            gate_up=self._linear(f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"),
            down=self._linear(f"{prefix}.mlp.down_proj"),
        )

    def _embedding_and_head(self) -> tuple[Tensor, Linear]:
        name = "model.embed_tokens.weight"
        table = self._source.get(name)
        if not self._config.tie_word_embeddings:
            return table.to(device=self._device, dtype=self._dtype, copy=True), self._linear("lm_head")
        head = table.to(device=self._device, dtype=self._dtype)
        lm_head = self._kernels.pack_linear(head)
        # A plain head shares its memory with the table; beside a packed one the table stays in the mapped file.
        return (head if isinstance(lm_head, PlainLinear) else self._source.remap(name, table).to(self._device)), lm_head

    def _vector(self, name: str) -> Tensor:
        return self._source.get(f"{name}.weight").to(device=self._device, dtype=self._dtype, copy=True)

    def _linear(self, *names: str) -> Linear:
        """One GEMM for the projections ``names``, stacked along their outputs."""
        parts = [self._source.get(f"{name}.weight") for name in names]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._kernels.pack_linear(joined.to(device=self._device, dtype=self._dtype))
