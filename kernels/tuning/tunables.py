"""Operations that ``splitserve tune`` can tune: how one takes part.

An operation asks :func:`splitserve.kernels.tuning.parameters.tuned` for its launch parameters by its name, a shape key
and rows. To be tuned it also has a :class:`Tunable`, made by ``make_tunable(operation)`` of the module that
``_TUNABLES`` below names, which

- says which shapes a model needs (:meth:`Tunable.shape_keys`),
- builds random inputs for one of them and a number of rows (:meth:`Tunable.case`), and
- for such a :class:`TunableCase` names candidate parameters, makes the calls to be timed, and gives the reference's
  answer, against which each candidate is checked before it's timed.

Candidates run through the operation itself: the tuner has :func:`splitserve.kernels.tuning.parameters.forced` its
parameters while :meth:`TunableCase.calls` runs and while the calls do. :mod:`splitserve.kernels.tuning.decode_tunable`
is an example.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from splitserve.kernels.tuning.parameters import Params

_TUNABLES = {
    "attention_decode": "tuning.decode_tunable",
    "linear_norm": "tuning.linear_tunable",
    "linear_gated": "tuning.linear_tunable",
    "linear_add": "tuning.linear_tunable",
    "linear_plain": "tuning.linear_tunable",
}
OPERATIONS = tuple(_TUNABLES)

_COLD_CACHES = 4  # inputs that calls take in turn are this many times the level-2 cache together
_MAX_COPIES = 64
_CPU_CACHE_BYTES = 1 << 20  # on a CPU only tests tune


class DecoderSizes(Protocol):
    """What a tunable reads of a model; :class:`splitserve.models.config.ModelConfig` has it."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class TuneTarget:
    """What to tune for. ``model`` has the sizes of one rank; ``is_shard`` if there are several: then a sum over them
    follows the products that else add to the residual. ``block_size``: tokens per KV block. ``is_for_compiling``:
    inputs need only be large enough for the kernels to compile as they will for others of that shape; many processes
    make them at once."""

    model: DecoderSizes
    dtype: torch.dtype
    device: torch.device
    block_size: int
    is_for_compiling: bool = False
    is_shard: bool = False


class TunableCase(Protocol):
    """One shape at one number of rows, with its random inputs, of which there are enough copies to be cold."""

    @property
    def num_bytes(self) -> int:
        """What a call must read and write at least, on average: weights, KV, activations."""
        ...

    def candidates(self, best: Params) -> Sequence[Params]:
        """Parameters worth trying, all of them given in each, when ``best`` is the fastest so far; first that is {},
        the operation's own default. Asked again with each new best, until it names nothing that wasn't tried: it may
        give all it can think of at once, or search."""
        ...

    def calls(self) -> Sequence[Callable[[], Tensor]]:
        """Calls on different inputs, to be timed in turn. The parameters that apply now are theirs, and stay forced
        while they run."""
        ...

    def expected(self) -> Tensor:
        """The reference backend's answer to the first of the calls, of its shape and dtype."""
        ...


class Tunable(Protocol):
    def shape_keys(self, target: TuneTarget) -> Sequence[str]:
        """The shapes that ``target`` needs, as the operation itself looks them up (``tuning.shape_key``)."""
        ...

    def case(self, target: TuneTarget, key: str, rows: int) -> TunableCase | None:
        """Inputs for one of :meth:`shape_keys`; None if ``rows`` of it don't fit this device."""
        ...


def load_tunable(operation: str) -> Tunable:
    """The tunable of one of :data:`OPERATIONS`; imports what it needs (Triton)."""
    module = importlib.import_module(f"splitserve.kernels.{_TUNABLES[operation]}")
    tunable: Tunable = module.make_tunable(operation)
    return tunable


def num_copies(num_bytes: int, device: torch.device) -> int:
    """How many copies of inputs of ``num_bytes`` calls should take in turn, so that each finds them cold."""
    cache = _CPU_CACHE_BYTES
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(_MAX_COPIES, -(-_COLD_CACHES * cache // max(1, num_bytes))))
