"""Tensor parallelism inside a step: the collectives of the ranks of one model, and the products that use them.

A decoder runs on each rank as it does alone. Only two kinds of products use collectives: those whose inputs are split
sum the products of all ranks (:class:`RowParallelLinear`), and the LM head, whose outputs are split, gathers them
(:class:`VocabParallelHead`). All ranks then have the same logits and draw the same tokens from them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from splitserve.common.errors import SplitserveError
from splitserve.kernels.api import Linear, NormedLinear
from splitserve.kernels.reference.operations import join_parts
from splitserve.models.weights.shard import Shard


class CollectiveError(SplitserveError):
    """The ranks couldn't exchange what they had to: most often because another one has failed, or is gone."""


@contextmanager
def shown_as_ours(what: str) -> Iterator[None]:
    """Turn the errors of torch.distributed into a :class:`CollectiveError`."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"{what}: {error}") from error


class Collectives(Protocol):
    """Operations of all ranks: each calls the same methods in the same order. They raise :class:`CollectiveError`."""

    @property
    def shard(self) -> Shard: ...

    def prepare(self, hidden_size: int, dtype: torch.dtype) -> None:
        """Make ready for :meth:`add_reduced` of rows of ``hidden_size``. May take a second, and allocates."""

    def add_reduced(
        self, residual: Tensor, parts: Tensor, norm: Tensor | None = None, eps: float = 0.0
    ) -> Tensor | None:
        """Add the sum of all ranks' ``parts`` (:meth:`splitserve.kernels.api.Linear.parts`, [S, T, N]) to ``residual``
        [T, N] in place, with the same bits on every rank that had the same residual. Both are contiguous. A rank's
        summand is rounded to the residual's dtype. May overwrite ``parts``.

        Returns the residual RMS-normalised by ``norm`` [N] where that costs next to nothing, on all ranks or on none.
        """

    def gather_columns(self, part: Tensor) -> Tensor:
        """Return all ranks' ``part`` [R, N] side by side, [R, size * N], on every rank; valid until the next call."""

    def meet(self) -> None:
        """Wait for all ranks: later operations, on a GPU those later in the stream, run after all ranks got here."""

    def lowest(self, number: int) -> int:
        """The smallest of all ranks' ``number``. Waits for all of them."""

    def close(self) -> None:
        """Needn't wait for the others."""


class Alone:
    """The collectives of a model that one rank has to itself. See :class:`Collectives`."""

    shard = Shard()

    def prepare(self, hidden_size: int, dtype: torch.dtype) -> None: ...

    def add_reduced(self, residual: Tensor, parts: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> None:  # noqa: ARG002
        residual.add_(join_parts(parts, residual.dtype))

    def gather_columns(self, part: Tensor) -> Tensor:
        return part

    def meet(self) -> None: ...

    def lowest(self, number: int) -> int:
        return number

    def close(self) -> None: ...


class RowParallelLinear:
    """A product whose inputs are split over the ranks. See :class:`splitserve.kernels.api.ResidualLinear`."""

    def __init__(self, local: Linear, group: Collectives) -> None:
        self._local = local
        self._group = group

    def add_to(
        self, residual: Tensor, x: Tensor, norm: Tensor | None = None, eps: float = 0.0, *, bias: Tensor | None = None
    ) -> Tensor | None:
        if bias is not None:
            residual.add_(bias)
        if x.shape[0] == 1:
            norm = None  # the product that follows does better by itself: it scales its sum
        return self._group.add_reduced(residual, self._local.parts(x), norm, eps)


class VocabParallelHead:
    """The LM head, its tokens split over the ranks; all get all logits. See
    :class:`splitserve.kernels.api.NormedLinear`."""

    def __init__(self, local: NormedLinear, group: Collectives, vocab_size: int) -> None:
        self._local = local
        self._group = group
        self._vocab_size = vocab_size

    def after_norm(self, x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None) -> Tensor:
        """The last ranks' rows may be padding (:func:`splitserve.models.weights.shard.head_rows`)."""
        part = self._local.after_norm(x, norm, eps, normed)
        return self._group.gather_columns(part)[:, : self._vocab_size]
