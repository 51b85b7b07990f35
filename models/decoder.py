"""A loaded decoder of any family and the kernels that it runs on: what runners call.

A step is flat: the tokens of all its sequences in one ``[num_tokens, hidden]``, without padding. Positions, slots, the
attention plan and the rotation's cosines are made once per step and shared by all layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from splitserve.kernels.api import AttentionShape, Kernels, TokenRows
from splitserve.kernels.windows import FixedLayerPlans, LayeredAttention, LayerPlans
from splitserve.models.config import ModelConfig
from splitserve.models.layers.decoder import Decoder
from splitserve.models.layers.residual import Residual
from splitserve.models.layers.rotary import NOT_ROTATED, RotaryEmbedding
from splitserve.models.layers.step import BeforeLayer, NothingToSample, ScoredRows, Step
from splitserve.models.parallel.ranks import Alone, Collectives


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tensors of one step, on the model's device. T tokens, R rows to sample from (R may be 0).

    ``sample_rows``: int64 [R], rows of the flat batch; None stands for all of them. With ``scored`` the rows whose
    logits that takes follow those to sample from.
    """

    tokens: TokenRows
    sample_rows: Tensor | None
    attention_plan: LayerPlans | FixedLayerPlans
    scored: ScoredRows | None = None


class RunnableModel(Protocol):
    """A loaded model as runners use it: one of our families (:class:`DecoderModel`), or one of transformers' code."""

    config: ModelConfig
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device

    @property
    def is_lead(self) -> bool: ...

    def tokens(self, token_ids: Tensor, positions: Tensor, slots: Tensor) -> TokenRows:
        """See :meth:`DecoderModel.tokens`."""
        ...

    def begin_step(self, inputs: Tensor, drawn: Tensor, shapes: Sequence[AttentionShape]) -> TokenRows:
        """See :meth:`DecoderModel.begin_step`."""
        ...

    def forward(
        self,
        batch: ForwardBatch,
        kv_layers: Sequence[Tensor],
        attention: LayeredAttention,
        before_layer: BeforeLayer | None = None,
    ) -> Tensor | None:
        """See :meth:`DecoderModel.forward`."""
        ...


class DecoderModel:
    """The forward pass. Holds the loaded layers and the chosen kernels; no state of any request.

    ``config``: of this rank's part (:func:`splitserve.models.weights.shard.local_config`).
    """

    def __init__(
        self,
        config: ModelConfig,
        decoder: Decoder,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: Collectives | None = None,
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.dtype = dtype
        self.device = device
        self.decoder = decoder
        self._group = group or Alone()
        self._rotary = RotaryEmbedding(config, dtype, device)
        self._others = _other_rotations(config, dtype, device)

    @property
    def is_lead(self) -> bool:
        """Return whether this rank's results count: rank 0's."""
        return self._group.shard.rank == 0

    def tokens(self, token_ids: Tensor, positions: Tensor, slots: Tensor) -> TokenRows:
        """Return the rows of ids and positions (int64 [T]) that the host knows; ``slots`` int64 [N, T, G]."""
        hidden = torch.nn.functional.embedding(token_ids, self.decoder.embedding).to(self.dtype)
        return self._completed(TokenRows(hidden, self._rotary(positions), slots), positions)

    def begin_step(self, inputs: Tensor, drawn: Tensor, shapes: Sequence[AttentionShape]) -> TokenRows:
        """Return the rows of a step on a GPU: see :class:`splitserve.kernels.api.BeginStep`."""
        assert self._rotary.table is not None
        rows = self.kernels.begin_step(inputs, drawn, self.decoder.embedding, self._rotary.table, shapes)
        return self._completed(rows, inputs[1])

    def _completed(self, rows: TokenRows, positions: Tensor) -> TokenRows:
        """Return ``rows`` with what only some families need."""
        config = self.config
        if self._others:
            others = {name: _rotation(rotary, positions) for name, rotary in self._others.items()}
            rows = replace(rows, other_rotations=others)
        if config.query_beta:
            steps = (positions // config.query_period).float()
            factors = 1.0 + config.query_beta * torch.log1p(steps)
            rows = replace(rows, query_factors=factors.to(self.dtype).view(-1, 1, 1))
        return rows

    def forward(
        self,
        batch: ForwardBatch,
        kv_layers: Sequence[Tensor],
        attention: LayeredAttention,
        before_layer: BeforeLayer | None = None,
    ) -> Tensor | None:
        """Write the KV of all tokens and return logits [R, vocab] of ``batch.sample_rows``, None if R is 0.

        ``kv_layers``: per layer the view ``[num_blocks, G, 2, B, D]`` of the KV memory, or ``[num_blocks, B, width]``.
        ``before_layer`` may queue what a layer has to wait for.
        """
        step = Step(
            kernels=self.kernels,
            rotations={"main": batch.tokens.rotation, **batch.tokens.other_rotations},
            query_factors=batch.tokens.query_factors,
            slots=batch.tokens.slots.unbind(),
            rows=batch.sample_rows,
            kv_layers=kv_layers,
            attention=attention,
            plan=batch.attention_plan,
            before_layer=before_layer,
            scored=batch.scored,
        )
        try:
            return self.decoder(Residual(batch.tokens.hidden), step)
        except NothingToSample:
            self._group.meet()  # the step is over when all ranks have their KV
            return None


def _other_rotations(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> dict[str | None, RotaryEmbedding]:
    """Return the rotations of layers that don't have the main ones."""
    others: dict[str | None, RotaryEmbedding] = {}
    if config.sliding_rope is not None:
        others["sliding"] = RotaryEmbedding(config, dtype, device, config.sliding_rope)
    if config.unrotated_layers:
        others[None] = RotaryEmbedding(config, dtype, device, NOT_ROTATED)
    return others


def _rotation(rotary: RotaryEmbedding, positions: Tensor) -> tuple[Tensor, Tensor]:
    if rotary.table is None:
        return rotary(positions)
    cos, sin = rotary.table[positions].unbind(1)
    return cos, sin
