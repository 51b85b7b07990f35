"""A decoder of transformers' code over our KV memory: what runners call, in place of one of our families."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from splitserve.kernels.api import AttentionShape, Kernels, TokenRows
from splitserve.kernels.raw_qkv import RawQkv
from splitserve.kernels.reference.operations import known_tokens
from splitserve.kernels.windows import FixedLayerPlans, LayeredAttention, LayerPlans, slots_of_groups
from splitserve.models.config import ModelConfig
from splitserve.models.decoder import ForwardBatch
from splitserve.models.layers.decoder import SCORED_ROWS_AT_ONCE
from splitserve.models.layers.step import BeforeLayer, NothingToSample, ScoredRows
from splitserve.models.transformers_backend.interface import AttentionCall, attending


@dataclass(frozen=True, slots=True)
class PlacedRows(TokenRows):
    """Inputs of a forward pass; ``hidden`` has the token ids, int64 [T]. ``positions``: int64 [T]."""

    positions: Tensor = None  # type: ignore[assignment]  # fields before it have defaults


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Attention of one step: keys and values go to KV memory, and queries attend to that."""

    kernels: Kernels
    scale: float  # of scores, in the attention's shape
    head_dim: int
    rows: TokenRows
    kv_layers: Sequence[Tensor]
    attention: LayeredAttention
    plan: LayerPlans | FixedLayerPlans
    before_layer: BeforeLayer | None

    def __call__(self, call: AttentionCall) -> Tensor:
        """Write the keys and values of a layer's tokens, then attend."""
        if self.before_layer is not None:
            self.before_layer(call.layer)
        scale = call.given.get("scaling")
        factor = (call.query.shape[3] ** -0.5 if scale is None else float(scale)) / self.scale
        query = call.query if factor == 1.0 else call.query * factor
        heads = [self._heads(part) for part in (query, call.key, call.value)]
        group = self.attention.group(call.layer)
        parts = torch.cat(heads, 1).unsqueeze(0)  # [1, T, H + 2 * G, D]
        raw = RawQkv(parts, None, 0.0, self.rows.rotation, self.rows.slots[group])
        kv_layer, sinks = self.kv_layers[call.layer], call.given.get("s_aux")
        query = self.kernels.prepare_qkv(raw, kv_layer)
        context = self.attention.run(query, kv_layer, self.plan, call.layer, None if sinks is None else sinks.float())
        return context[..., : call.value.shape[3]].unsqueeze(0)

    def _heads(self, part: Tensor) -> Tensor:
        """Return [T, heads, head_dim] of a call's [1, heads, T, dim], filled up with zeros: they change no score."""
        heads = part[0].transpose(0, 1)
        missing = self.head_dim - heads.shape[2]
        return F.pad(heads, (0, missing)) if missing else heads


class _Backbone:
    """The module that makes the last layer's output. What follows it, the head, gets the wanted rows of that alone."""

    def __init__(self, model: torch.nn.Module, name: str) -> None:
        module = model.get_submodule(name)
        self._forward = module.forward
        self._output: Any = None
        self._rows: Tensor | slice = slice(None)
        self._is_given = False
        module.forward = self._run

    def take(self, rows: Tensor | slice, *, again: bool = False) -> None:
        """Decide on the rows that the next pass returns. ``again``: of the output of the last pass."""
        self._rows, self._is_given = rows, again

    def drop(self) -> None:
        """Forget the last output."""
        self._output = None

    def _run(self, *arguments: Any, **given: Any) -> Any:
        if not self._is_given:
            self._output = self._forward(*arguments, **given)
        if isinstance(self._rows, Tensor) and not self._rows.shape[0]:
            raise NothingToSample
        if isinstance(self._output, tuple):
            return (self._output[0][:, self._rows], *self._output[1:])
        output = copy.copy(self._output)
        output["last_hidden_state"] = self._output["last_hidden_state"][:, self._rows]
        return output


class TransformersModel:
    """A loaded model of transformers, with the interface of :class:`splitserve.models.decoder.DecoderModel`.

    ``module``: made with the attention implementation :data:`.interface.PAGED`, on ``device`` and of ``dtype``.
    """

    def __init__(
        self, config: ModelConfig, module: Any, kernels: Kernels, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert config.transformers is not None and config.attention_scale is not None
        self.config = config
        self.kernels = kernels
        self.dtype = dtype
        self.device = device
        self._scale = config.attention_scale
        self._module = module.eval().requires_grad_(False)
        self._backbone = _Backbone(module, config.transformers.backbone)

    @property
    def is_lead(self) -> bool:
        """Return True: there is one rank."""
        return True

    def tokens(self, token_ids: Tensor, positions: Tensor, slots: Tensor) -> TokenRows:
        """Return the rows of ids and positions (int64 [T]) that the host knows; ``slots`` int64 [N, T, G]."""
        ones = torch.ones((token_ids.shape[0], self.config.head_dim), dtype=self.dtype, device=self.device)
        return PlacedRows(token_ids, (ones, torch.zeros_like(ones)), slots, positions=positions)

    def begin_step(self, inputs: Tensor, drawn: Tensor, shapes: Sequence[AttentionShape]) -> TokenRows:
        """Return the rows of a step on a GPU: see :class:`splitserve.kernels.api.BeginStep`."""
        slots = slots_of_groups(shapes, inputs[3:], inputs[1])
        return self.tokens(known_tokens(inputs, drawn), inputs[1], slots)

    def forward(
        self,
        batch: ForwardBatch,
        kv_layers: Sequence[Tensor],
        attention: LayeredAttention,
        before_layer: BeforeLayer | None = None,
    ) -> Tensor | None:
        """See :meth:`splitserve.models.decoder.DecoderModel.forward`."""
        rows = batch.tokens
        assert isinstance(rows, PlacedRows)
        step = PagedStep(
            self.kernels,
            self._scale,
            self.config.head_dim,
            rows,
            kv_layers,
            attention,
            batch.attention_plan,
            before_layer,
        )
        wanted = slice(None) if batch.sample_rows is None else batch.sample_rows
        try:
            with attending(step):
                if batch.scored is None:
                    return self._logits(rows, wanted)
                return self._scored_logits(rows, wanted, batch.scored)
        except NothingToSample:
            return None
        finally:
            self._backbone.drop()

    def _logits(self, rows: PlacedRows, wanted: Tensor | slice, *, again: bool = False) -> Tensor:
        """Return logits [R, vocab] of the ``wanted`` rows. Raises :class:`NothingToSample` if there are none."""
        self._backbone.take(wanted, again=again)
        output = self._module(
            input_ids=rows.hidden.unsqueeze(0), position_ids=rows.positions.unsqueeze(0), use_cache=False
        )
        logits: Tensor = output.logits[0]
        return logits

    def _scored_logits(self, rows: PlacedRows, wanted: Tensor | slice, scored: ScoredRows) -> Tensor:
        """Return the logits of rows to draw from; the logits of scored rows are computed and taken in pieces."""
        assert isinstance(wanted, Tensor)
        pieces = torch.split(wanted[scored.num_drawing :], SCORED_ROWS_AT_ONCE)
        for number, piece in enumerate(pieces):
            scored.take(self._logits(rows, piece, again=number > 0))
        return self._logits(rows, wanted[: scored.num_drawing], again=bool(pieces))
