"""The interface of sampling features.

A feature is an object per runner. What it keeps for a sequence stands in a slot, and is a pure function of the request
and its output ids: made by :meth:`Feature.begin` from ids that are known, carried on by :meth:`Feature.advance` with
tokens that only the device knows so far. Nothing in ``apply`` and ``advance`` may wait for the device.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitserve.kernels.reference import sampling as reference
from splitserve.kernels.sampling import MaskLogits, PenaliseLogits
from splitserve.protocol.request import SamplingParams
from splitserve.protocol.step import FeatureStart

BANNED = -1e18
"""The logit of a token that may not be drawn: finite, so that contradictory bans fail no step."""
BAN = -1e9
"""Added to the logit of a token that is drawn only where all others are :data:`BANNED`."""

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


class Draw(NamedTuple):
    """One draw: its row in the step's logits, and its sequence's slot."""

    row: int
    slot: int
    params: SamplingParams
    num_prompt_tokens: int
    position: int  # of the token to be drawn, in the whole sequence

    @property
    def num_output_tokens(self) -> int:
        """Output tokens before this draw."""
        return self.position - self.num_prompt_tokens


class Rows:
    """The draws of a step that want one feature. Their tensors are made on the device when a feature first asks."""

    def __init__(self, draws: Sequence[Draw], device: torch.device) -> None:
        self.draws = draws
        self.device = device
        self.errors: dict[int, str] = {}  # by row of the logits: why its request can't draw a token and fails

    @cached_property
    def _numbers(self) -> Tensor:
        return to_device(
            torch.tensor([[draw.row for draw in self.draws], [draw.slot for draw in self.draws]]), self.device
        )

    @property
    def rows(self) -> Tensor:
        """The rows of the logits, int64 [n]."""
        return self._numbers[0]

    @property
    def slots(self) -> Tensor:
        """The sequences' slots, int64 [n]."""
        return self._numbers[1]

    def tokens(self, drawn: Tensor) -> Tensor:
        """Return those of the step's drawn tokens, int64 [R], that these draws drew -> int64 [n]; 0 of a failed one."""
        return drawn[self.rows].clamp(min=0)

    def column(self, value: Callable[[Draw], float]) -> Tensor:
        """Return a value of each draw -> float32 [n, 1]."""
        return to_device(torch.tensor([[value(draw)] for draw in self.draws], dtype=torch.float32), self.device)


class LogitKernels(NamedTuple):
    """Operations that change logits in place, for features."""

    mask_logits: MaskLogits = reference.mask_logits
    penalise_logits: PenaliseLogits = reference.penalise_logits


def entries(rows: Rows, token_ids: Sequence[Int64Array]) -> tuple[Tensor, Tensor]:
    """Return indices of single logits, ``token_ids`` of each draw -> rows and ids, int64 [N] each."""
    lengths = [len(ids) for ids in token_ids]
    packed = np.stack((np.repeat([draw.row for draw in rows.draws], lengths), np.concatenate(token_ids)))
    indices = to_device(torch.from_numpy(packed), rows.device)
    return indices[0], indices[1]


class Feature:
    """A feature without state, which a new feature inherits from. ``vocab_size``: columns of the logits."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device

    def open(self, model_dir: Path | None, kernels: LogitKernels) -> None:
        """Note where the checkpoint's files are, if there are any, and kernels, for a feature that needs them. Called
        once, before all else."""

    def begin(self, slot: int, start: FeatureStart) -> None:
        """Make the slot's state from a request and its ids; what the slot held before is void."""

    def note_token(self, slot: int, token_id: int) -> None:
        """Carry the state on with the token before the next draw, for a feature that needs it on the host. Called once
        the step that draws the token is over: the step of the next draw has been launched by then."""

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """Change, in place, the rows ``rows.rows`` of the raw logits, float32 [R, vocab]. A feature on a CPU may use
        NumPy: an operation of torch takes as long there as one on a thousand numbers."""
        raise NotImplementedError

    def advance(self, rows: Rows, drawn: Tensor) -> None:
        """Carry the states on with the tokens that the step drew, int64 [R] on the device: ``rows.tokens(drawn)``."""

    def end(self, slot: int) -> None:
        """Forget the slot's state."""

    def state(self, slot: int) -> object:
        """Return the slot's state in a form that can be compared."""
        del slot
        return None


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy to the device in the stream's order, without waiting for it."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
