"""One step, as layers see it: where its tokens stand, and the KV memory behind attention."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from splitserve.kernels.api import Kernels
    from splitserve.kernels.windows import FixedLayerPlans, LayeredAttention, LayerPlans

BeforeLayer = Callable[[int], None]
"""Called with the number of each layer, before anything reads the layer's KV."""


class NothingToSample(Exception):
    """Raised by the last layer's attention, when its KV is written, where a step draws no token: the step is over."""


class ScoredRows(Protocol):
    """The last rows of a step's rows, whose logits aren't drawn from: they score tokens that are known."""

    num_drawing: int  # rows before them, which are drawn from

    def take(self, logits: "Tensor") -> None:
        """Take the logits [N, vocab] of the next rows; they are valid until this returns."""


@dataclass(frozen=True, slots=True)
class Step:
    """The step that runs. T tokens, R rows to sample from (R may be 0)."""

    kernels: "Kernels"
    rotations: (
        "Mapping[str | None, tuple[Tensor, Tensor]]"  # cos, sin [T, D] (kernels.api.PrepareQkv) by LayerSpec.rope
    )
    query_factors: "Tensor | None"  # [T, 1, 1] of queries, by their positions; None: 1
    slots: "Sequence[Tensor]"  # int64 [T, G] for each group of the cache: where keys and values go
    rows: "Tensor | None"  # int64 [R], rows of the flat batch to sample from; None: all of them
    kv_layers: "Sequence[Tensor]"  # per layer: [num_blocks, G, 2, B, D], or latents [num_blocks, B, width]
    attention: "LayeredAttention"
    plan: "LayerPlans | FixedLayerPlans"
    before_layer: BeforeLayer | None  # may queue what a layer has to wait for
    scored: ScoredRows | None = None  # those among ``rows``; None: all are sampled from

    def enter(self, layer: int) -> None:
        """Announce that what follows reads the KV of ``layer``."""
        if self.before_layer is not None:
            self.before_layer(layer)

    def rotation(self, rope: str | None) -> "tuple[Tensor, Tensor]":
        """Return cos and sin of a layer's rotations."""
        return self.rotations[rope]

    def slots_of(self, layer: int) -> "Tensor":
        """Return where the keys and values of ``layer`` go: int64 [T, G]."""
        return self.slots[self.attention.group(layer)]

    def attend(self, query: "Tensor", layer: int, sinks: "Tensor | None" = None) -> "tuple[Tensor, Tensor | None]":
        """Attend to the KV of ``layer``: ``query`` [T, H, D] -> [T, H * D], None.

        After the last layer's attention all else works row by row: there only the rows to sample from are returned,
        [R, H * D], with their numbers. Raises :class:`NothingToSample` if there are none.
        """
        rows = self._rows_after(layer)
        if self.query_factors is not None:
            query = query * self.query_factors
        context = self.attention.run(query, self.kv_layers[layer], self.plan, layer, sinks).flatten(1)
        return (context if rows is None else context[rows]), rows

    def attend_latent(self, query: "Tensor", expansion: "Tensor", layer: int) -> "tuple[Tensor, Tensor | None]":
        """Attend to the latents of ``layer``: ``query`` [T, H, query_dim] -> [T, H * value_dim], None; after the last
        layer as :meth:`attend` does. ``expansion``: see :class:`splitserve.kernels.api.LatentAttention`."""
        rows = self._rows_after(layer)
        context = self.attention.run_latent(query, expansion, self.kv_layers[layer], self.plan, layer).flatten(1)
        return (context if rows is None else context[rows]), rows

    def _rows_after(self, layer: int) -> "Tensor | None":
        """Return the rows that are kept after the attention of ``layer``; None: all. Raises NothingToSample."""
        rows = self.rows if layer == len(self.kv_layers) - 1 else None
        if rows is not None and rows.shape[0] == 0:
            raise NothingToSample
        return rows
