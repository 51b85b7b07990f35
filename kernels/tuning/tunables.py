"""Operations that ``splitserve tune`` can tune, and the interface by which they take part.

An operation gets its launch parameters from :func:`splitserve.kernels.tuning.parameters.tuned` by its name, a shape key
and rows. To be tuned it also needs a :class:`Tunable`, made by ``make_tunable(operation)`` of the module that
``_TUNABLES`` below names, which

- returns the shapes that a model needs (:meth:`Tunable.shape_keys`),
- builds random inputs for one of them and a number of rows (:meth:`Tunable.case`), and
- for such a :class:`TunableCase` returns candidate parameters, the calls to be timed, and the reference's result,
  against which each candidate is checked before it is timed.

Candidates run through the operation itself: :func:`splitserve.kernels.tuning.parameters.forced` applies the candidate's
parameters while :meth:`TunableCase.calls` runs and while the calls do. :mod:`splitserve.kernels.tuning.decode_tunable`
is an example.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from splitserve.kernels.experts.spec import RouterSpec
from splitserve.kernels.latent.shape import LatentShape
from splitserve.kernels.tuning.parameters import Params

_TUNABLES = {
    "attention_decode": "tuning.decode_tunable",
    "experts": "experts.tunable",
    "linear_norm": "tuning.linear_tunable",
    "linear_gated": "tuning.linear_tunable",
    "linear_add": "tuning.linear_tunable",
    "linear_plain": "tuning.linear_tunable",
}
OPERATIONS = tuple(_TUNABLES)

_COLD_CACHES = 4  # all inputs used in turn are together this many times the size of the level-2 cache
_MAX_COPIES = 64
_CPU_CACHE_BYTES = 1 << 20  # only tests tune on a CPU


class ExpertSizes(Protocol):
    """Sizes of a model's experts; :class:`splitserve.models.experts.ExpertsSpec` has them."""

    @property
    def router(self) -> RouterSpec: ...
    @property
    def inner_size(self) -> int: ...
    @property
    def is_mxfp4(self) -> bool: ...
    @property
    def shared_size(self) -> int: ...
    @property
    def shared_gate(self) -> bool: ...


class Fp8Sizes(Protocol):
    """The numbers that share a scale of weights in FP8; :class:`splitserve.models.config.Fp8Format` has them."""

    @property
    def block(self) -> tuple[int, int] | None: ...


class DecoderSizes(Protocol):
    """Sizes of a model that a tunable reads; :class:`splitserve.models.config.ModelConfig` has them."""

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
    @property
    def experts(self) -> ExpertSizes | None: ...
    @property
    def activation(self) -> str: ...
    @property
    def mlp_gate(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def fp8(self) -> Fp8Sizes | None: ...
    @property
    def latent(self) -> LatentShape | None: ...


@dataclass(frozen=True, slots=True)
class TuneTarget:
    """Model, device and purpose of tuning."""

    model: DecoderSizes  # of one rank
    dtype: torch.dtype
    device: torch.device
    block_size: int  # tokens per KV block
    # Inputs need only be large enough for the kernels to compile as for other inputs of that shape; many processes
    # make them at once.
    is_for_compiling: bool = False
    is_shard: bool = False  # there are several ranks: a sum over them follows products that else add to the residual


class TunableCase(Protocol):
    """One shape at one number of rows, with enough copies of its random inputs that each call finds them uncached."""

    @property
    def tolerance(self) -> float | None:
        """The most that a right result differs from the reference's; None: roundings of its dtype alone."""
        ...

    @property
    def num_bytes(self) -> int:
        """Average number of bytes that a call must at least read and write: weights, KV, activations."""
        ...

    def candidates(self, best: Params) -> Sequence[Params]:
        """Return parameters worth trying, each complete, given the fastest so far.

        ``best`` is {} at first: the operation's own default. The method is called again with each new best until it
        returns nothing untried: it may return all candidates at once, or search.
        """
        ...

    def calls(self) -> Sequence[Callable[[], Tensor]]:
        """Return calls on different inputs, to be timed in turn. They use the parameters that apply now, which stay
        forced while they run."""
        ...

    def expected(self) -> Tensor:
        """Return the reference backend's result of the first call, with its shape and dtype."""
        ...


class Tunable(Protocol):
    def shape_keys(self, target: TuneTarget) -> Sequence[str]:
        """Return the shapes that ``target`` needs, in the form that the operation looks up (``tuning.shape_key``)."""
        ...

    def case(self, target: TuneTarget, key: str, rows: int) -> TunableCase | None:
        """Return inputs for one of :meth:`shape_keys`; None if ``rows`` of it don't fit this device."""
        ...


def load_tunable(operation: str) -> Tunable:
    """Return the tunable of one of :data:`OPERATIONS`; imports its requirements (Triton)."""
    module = importlib.import_module(f"splitserve.kernels.{_TUNABLES[operation]}")
    tunable: Tunable = module.make_tunable(operation)
    return tunable


def num_copies(num_bytes: int, device: torch.device) -> int:
    """Return how many copies of inputs of ``num_bytes`` calls should use in turn, so that each call finds them
    uncached."""
    cache = _CPU_CACHE_BYTES
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(_MAX_COPIES, -(-_COLD_CACHES * cache // max(1, num_bytes))))
