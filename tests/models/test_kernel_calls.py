"""Operations of :mod:`splitserve.kernels` that a step calls, in their order: what a GPU runs, and CUDA graphs record.

Families are written without fusion, so that this is the place where fused operations and their order are spelt out.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from splitserve.kernels.api import AttentionPlan, AttentionShape, PagedBatch
from splitserve.kernels.raw_qkv import RawQkv
from splitserve.kernels.reference import operations as reference
from splitserve.kernels.reference.attention import ReferencePagedAttention
from splitserve.kernels.reference.linear import PlainLinear
from splitserve.kernels.registry import OPERATIONS, select_kernels
from splitserve.kernels.windows import LayerAttention, LayeredAttention
from splitserve.models.config import load_model_config
from splitserve.models.decoder import DecoderModel, ForwardBatch
from splitserve.models.parallel.ranks import Alone
from splitserve.models.weights.loader import load_model
from splitserve.models.weights.shard import Shard

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
BLOCK_SIZE = 16
NUM_LAYERS = 4
NUM_TOKENS = 5  # of two sequences, of 2 and 3 tokens


class Recorder:
    """Kernels, and another rank, that note what is called, with the names of weights in the checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        self.calls: list[str] = []
        self._names: dict[bytes, str] = {}
        for name, tensor in load_file(checkpoint / "model.safetensors").items():
            short = name.removeprefix("model.").removesuffix(".weight").replace("layers.", "")
            self._names[_start(tensor)] = short.replace("self_attn.", "").replace("mlp.", "")
        chosen = select_kernels(CPU, torch.float32, dict.fromkeys(OPERATIONS, "reference"))
        self.kernels = replace(
            chosen,
            begin_step=self._noting("begin_step", chosen.begin_step),
            prepare_qkv=self._prepare_qkv,
            pack_linear=lambda weight: RecordedLinear(self, weight),
            make_attention=lambda shape: RecordedAttention(self, shape),
        )

    def name_of(self, weight: Tensor) -> str:
        """Return its name in the checkpoint; several weights packed as one have the name of the first."""
        return self._names[_start(weight)]

    def _noting(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            return operation(*arguments)

        return call

    def _prepare_qkv(self, raw: RawQkv, kv_layer: Tensor) -> Tensor:
        self.calls.append("prepare_qkv" if raw.norm is None else "prepare_qkv with norms of heads")
        return reference.prepare_qkv(raw, kv_layer)


def _start(weight: Tensor) -> bytes:
    """The numbers at its start, which rank 0 of several has as well: they are random."""
    row = weight if weight.dim() == 1 else weight[0]
    return row[:8].contiguous().numpy().tobytes()


class RecordedLinear(PlainLinear):
    def __init__(self, recorder: Recorder, weight: Tensor) -> None:
        super().__init__(weight, rms_norm=reference.rms_norm, silu_mul=reference.silu_mul)
        self._recorder = recorder
        self._name = recorder.name_of(weight)

    def _note(self, method: str, x: Tensor, norm: Tensor | None, normed: Tensor | None = None) -> None:
        behind = "" if norm is None else f", {self._recorder.name_of(norm)}"
        self._recorder.calls.append(
            f"{self._name}.{method}({x.shape[0]}{behind}{'' if normed is None else ', normalised before'})"
        )

    def add_to(
        self, residual: Tensor, x: Tensor, norm: Tensor | None = None, eps: float = 0.0, *, bias: Tensor | None = None
    ) -> Tensor | None:
        self._note("add_to", x, norm)
        return super().add_to(residual, x, norm, eps, bias=bias)

    def parts(self, x: Tensor) -> Tensor:
        self._note("parts", x, None)
        return self(x).unsqueeze(0)

    def after_norm(self, x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None) -> Tensor:
        self._note("after_norm", x, norm, normed)
        return super().after_norm(x, norm, eps, normed)

    def parts_after_norm(self, x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None) -> Tensor:
        self._note("parts_after_norm", x, norm, normed)
        return super().after_norm(x, norm, eps, normed).unsqueeze(0)

    def gated_after_norm(self, x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None) -> Tensor:
        self._note("gated_after_norm", x, norm, normed)
        return reference.silu_mul(super().after_norm(x, norm, eps, normed))


class RecordedAttention(ReferencePagedAttention):
    def __init__(self, recorder: Recorder, shape: AttentionShape) -> None:
        super().__init__(shape)
        self._recorder = recorder

    def run(self, query: Tensor, kv_layer: Tensor, plan: AttentionPlan, sinks: Tensor | None = None) -> Tensor:
        self._recorder.calls.append(f"attention({query.shape[0]})")
        return super().run(query, kv_layer, plan, sinks)


class RecordedRank(Alone):
    """Rank 0 of two, without the other; ``normalises``: as all-reduces on GPUs do."""

    shard = Shard(0, 2)

    def __init__(self, recorder: Recorder, *, normalises: bool) -> None:
        self._recorder = recorder
        self._normalises = normalises

    def add_reduced(
        self, residual: Tensor, parts: Tensor, norm: Tensor | None = None, eps: float = 0.0
    ) -> Tensor | None:
        behind = "" if norm is None else f", {self._recorder.name_of(norm)}"
        self._recorder.calls.append(f"add_reduced({residual.shape[0]}{behind})")
        residual.add_(parts.sum(0))
        return reference.rms_norm(residual, norm, eps) if norm is not None and self._normalises else None

    def gather_columns(self, part: Tensor) -> Tensor:
        self._recorder.calls.append(f"gather_columns({part.shape[0]})")
        return torch.cat((part, part), 1)

    def meet(self) -> None:
        self._recorder.calls.append("meet")


def calls_of_a_step(
    path: Path, rows: list[int] | None, *, is_rank: bool = False, normalises: bool = False
) -> list[str]:
    """As the runner for GPUs runs steps: ``rows`` None as for graphs of decode."""
    recorder = Recorder(path)
    group = RecordedRank(recorder, normalises=normalises) if is_rank else None
    config = load_model_config(path)
    model = load_model(path, config, dtype=torch.float32, device=CPU, kernels=recorder.kernels, group=group)
    local = model.config
    shape = AttentionShape(
        local.num_heads, local.num_kv_heads, local.head_dim, BLOCK_SIZE, NUM_LAYERS, torch.float32, CPU
    )
    layers = [LayerAttention()] * NUM_LAYERS
    attention = LayeredAttention([shape], layers, recorder.kernels.make_attention)
    cache = torch.zeros(2, NUM_LAYERS, local.num_kv_heads, 2, BLOCK_SIZE, local.head_dim)
    logits = run_step(model, attention, cache, shape, rows, recorder)
    assert (logits is None) == (rows == [])
    if logits is not None:
        assert logits.shape == (NUM_TOKENS if rows is None else len(rows), config.vocab_size)
    return recorder.calls


@torch.inference_mode()
def run_step(
    model: DecoderModel,
    attention: LayeredAttention,
    cache: Tensor,
    shape: AttentionShape,
    rows: list[int] | None,
    recorder: Recorder,
) -> Tensor | None:
    rotary = model._rotary
    rotary.table = torch.stack(rotary(torch.arange(BLOCK_SIZE)), 1)  # on a GPU it is there from the start
    inputs = torch.tensor([[5, 6, 7, 8, 9], [0, 1, 0, 1, 2], [-1] * 5, [0, 0, 1, 1, 1]])
    tokens = model.begin_step(inputs, torch.zeros(2, dtype=torch.int64), [shape])
    plan = attention.plan([PagedBatch([2, 3], [2, 3], [[0], [1]])])
    batch = ForwardBatch(tokens, None if rows is None else torch.tensor(rows, dtype=torch.int64), plan)
    layers = [cache[:, layer] for layer in range(NUM_LAYERS)]
    return model.forward(batch, layers, attention, lambda layer: recorder.calls.append(f"before_layer {layer}"))


def expected_calls(num_rows: int, prepare_qkv: str) -> list[str]:
    """One rank: for each layer four products, ``prepare_qkv`` and attention; after the last one rows are chosen."""
    calls, last, t = ["begin_step"], NUM_LAYERS - 1, NUM_TOKENS
    for layer in range(NUM_LAYERS):
        r = num_rows if layer == last else t
        next_norm = "norm" if layer == last else f"{layer + 1}.input_layernorm"
        calls += [
            f"before_layer {layer}",
            f"{layer}.q_proj.parts_after_norm({t}, {layer}.input_layernorm)",
            prepare_qkv,
            f"attention({t})",
            f"{layer}.o_proj.add_to({r}, {layer}.post_attention_layernorm)",
            f"{layer}.gate_proj.gated_after_norm({r}, {layer}.post_attention_layernorm)",
            f"{layer}.down_proj.add_to({r}, {next_norm})",
        ]
    return [*calls, f"embed_tokens.after_norm({num_rows}, norm)"]


@pytest.mark.parametrize("rows", [None, [1, 4], [4]])
def test_one_rank(tiny_qwen3: Path, tiny_llama: Path, rows: list[int] | None) -> None:
    num_rows = NUM_TOKENS if rows is None else len(rows)
    assert calls_of_a_step(tiny_llama, rows) == expected_calls(num_rows, "prepare_qkv")
    assert calls_of_a_step(tiny_qwen3, rows) == expected_calls(num_rows, "prepare_qkv with norms of heads")


def test_a_step_that_draws_nothing_ends_with_the_last_layers_kv(tiny_llama: Path) -> None:
    calls = expected_calls(NUM_TOKENS, "prepare_qkv")
    assert calls_of_a_step(tiny_llama, []) == calls[: calls.index("before_layer 3") + 3]
    assert calls_of_a_step(tiny_llama, [], is_rank=True)[-2:] == ["prepare_qkv", "meet"]


def expected_calls_of_a_rank(num_rows: int, *, normalises: bool) -> list[str]:
    """A rank of several: sums go through the all-reduce, which normalises for the product that follows where it may."""
    calls, last, t = ["begin_step"], NUM_LAYERS - 1, NUM_TOKENS

    def norm(name: str, num_rows: int) -> str:
        return f"({num_rows}, {name}{', normalised before' if normalises and num_rows > 1 else ''})"

    for layer in range(NUM_LAYERS):
        r = num_rows if layer == last else t
        after_attention = f"{layer}.post_attention_layernorm"
        next_norm = "norm" if layer == last else f"{layer + 1}.input_layernorm"
        first = f"({t}, 0.input_layernorm)" if layer == 0 else norm(f"{layer}.input_layernorm", t)
        calls += [
            f"before_layer {layer}",
            f"{layer}.q_proj.parts_after_norm{first}",
            "prepare_qkv",
            f"attention({t})",
            f"{layer}.o_proj.parts({r})",
            f"add_reduced({r}, {after_attention})" if r > 1 else "add_reduced(1)",
            f"{layer}.gate_proj.gated_after_norm{norm(after_attention, r)}",
            f"{layer}.down_proj.parts({r})",
            f"add_reduced({r}, {next_norm})" if r > 1 else "add_reduced(1)",
        ]
    head = norm("norm", num_rows)
    return [*calls, f"embed_tokens.after_norm{head}", f"gather_columns({num_rows})"]


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("rows", [None, [1, 4], [4]])
def test_a_rank_of_two(tiny_llama: Path, rows: list[int] | None, normalises: bool) -> None:
    num_rows = NUM_TOKENS if rows is None else len(rows)
    calls = calls_of_a_step(tiny_llama, rows, is_rank=True, normalises=normalises)
    assert calls == expected_calls_of_a_rank(num_rows, normalises=normalises)
