"""The base of all layers: parts of a decoder that are declared from a configuration first, and loaded later.

A layer declares its weights when it is made, which needs neither torch nor files. ``load`` gives it tensors; after that
it can be called. A layer made of others has them as attributes, and declares and loads nothing itself.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from splitserve.kernels.experts.spec import GatedActivation
from splitserve.models.layers.weight import Stack, Weight
from splitserve.models.weights.shard import Shard

if TYPE_CHECKING:  # the command line reads declarations, and starts without torch
    from torch import Tensor

    from splitserve.kernels.api import Kernels, Linear, NormedLinear, ResidualLinear
    from splitserve.kernels.experts.weights import Experts
    from splitserve.models.parallel.ranks import Collectives
    from splitserve.models.weights.kv_scales import KVScales


Order: TypeAlias = tuple[int, ...] | None
"""An order of the rows within each unit of ``len(order)`` rows, a head for one; None: as stored."""


class WeightSource(Protocol):
    """The loader, as layers see it: gives one rank's part of weights on the model's device, in the model's dtype."""

    @property
    def shard(self) -> Shard: ...

    @property
    def kernels(self) -> "Kernels": ...

    @property
    def group(self) -> "Collectives": ...

    def vector(self, weights: Stack, factors: Sequence[float] = (), orders: Sequence[Order] = ()) -> "Tensor":
        """Return vectors one after the other, each times its factor (none given: 1), its elements in its order."""
        ...

    def repeated(self, vectors: Sequence[tuple[Weight, int, float]], offset: float = 0.0) -> "Tensor":
        """Return (vector [N], count, factor): ``count`` rows of each vector plus ``offset``, times its factor, [sum of
        counts, N]."""
        ...

    def linear(self, weights: Stack, factors: Sequence[float] = (), orders: Sequence[Order] = ()) -> "Linear":
        """Return a product with matrices stacked along their rows, each times its factor (none given: 1), its rows in
        its order."""
        ...

    def matrix(self, weight: Weight) -> "Tensor":
        """Return a matrix itself in the model's dtype, dequantised if it is stored in FP8."""
        ...

    def summed(self, weight: Weight, factor: float = 1.0) -> "ResidualLinear":
        """Return a product whose inputs are split over the ranks: what is added is the sum of all ranks' products."""
        ...

    def experts(
        self,
        gate_up: Stack,
        down: Stack,
        activation: GatedActivation,
        biases: tuple[Stack, Stack] | None = None,
        scales: tuple[Stack, Stack] | None = None,
    ) -> "Experts":
        """Return the rank's experts: ``down`` has a matrix of each expert, ``gate_up`` one or two (gate, then up);
        ``biases`` likewise, and ``scales`` where the matrices are in MXFP4."""
        ...

    def embedding_and_head(self, embedding: Weight, head: Weight) -> "tuple[Tensor, NormedLinear]":
        """Return the embedding's table [vocab, hidden] and the LM head; both may be the same stored tensor."""
        ...

    def kv_scales(self, key_names: Sequence[str], value_names: Sequence[str]) -> "KVScales":
        """Return a layer's scales of keys and values; each has the first of the names that the checkpoint has."""
        ...


class Layer:
    """Part of a decoder. Subclasses of several parts have these as attributes; others override all three methods."""

    def parts(self) -> "Iterator[Layer]":
        """Yield the layers that this one is made of."""
        for value in vars(self).values():
            if isinstance(value, Layer):
                yield value
            elif isinstance(value, list):
                yield from (entry for entry in value if isinstance(entry, Layer))

    def stacks(self) -> Iterator[Stack]:
        """Yield what is loaded, in units that are loaded as one."""
        for part in self.parts():
            yield from part.stacks()

    def weights(self) -> Iterator[Weight]:
        """Yield all declared weights."""
        for stack in self.stacks():
            yield from stack

    def load(self, source: WeightSource) -> None:
        """Take this rank's tensors from ``source``."""
        for part in self.parts():
            part.load(source)

    @property
    def kv_elements(self) -> int:
        """Elements of one token's keys and values, over all layers inside and all ranks."""
        return sum(part.kv_elements for part in self.parts())
