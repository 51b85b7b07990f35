"""A loaded decoder of any family and the kernels that it runs on: what runners call.

A step is flat: the tokens of all its sequences in one ``[num_tokens, hidden]``, without padding. Positions, slots, the
attention plan and the rotation's cosines are made once per step and shared by all layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splitserve.kernels.api import AttentionPlan, AttentionShape, Kernels, PagedAttention, TokenRows
from splitserve.models.config import ModelConfig
from splitserve.models.layers.decoder import Decoder
from splitserve.models.layers.residual import Residual
from splitserve.models.layers.rotary import RotaryEmbedding
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
    attention_plan: AttentionPlan
    scored: ScoredRows | None = None


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

    @property
    def is_lead(self) -> bool:
        """Return whether this rank's results count: rank 0's."""
        return self._group.shard.rank == 0

    def tokens(self, token_ids: Tensor, positions: Tensor, slots: Tensor) -> TokenRows:
        """Return the rows of ids and positions (int64 [T]) that the host knows; ``slots`` int64 [T, G]."""
        hidden = torch.nn.functional.embedding(token_ids, self.decoder.embedding).to(self.dtype)
        return TokenRows(hidden, self._rotary(positions), slots)

    def begin_step(self, inputs: Tensor, drawn: Tensor, shape: AttentionShape) -> TokenRows:
        """Return the rows of a step on a GPU: see :class:`splitserve.kernels.api.BeginStep`."""
        assert self._rotary.table is not None
        return self.kernels.begin_step(inputs, drawn, self.decoder.embedding, self._rotary.table, shape)

    def forward(
        self,
        batch: ForwardBatch,
        kv_layers: Sequence[Tensor],
        attention: PagedAttention,
        before_layer: BeforeLayer | None = None,
    ) -> Tensor | None:
        """Write the KV of all tokens and return logits [R, vocab] of ``batch.sample_rows``, None if R is 0.

        ``kv_layers``: per layer the view ``[num_blocks, G, 2, B, D]`` of the KV memory. ``before_layer`` may queue what
        a layer has to wait for.
        """
        step = Step(
            kernels=self.kernels,
            rotation=batch.tokens.rotation,
            slots=batch.tokens.slots,
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
