"""Masks of the tokens that may come next: made on the host, one bit per token, and applied where the logits are."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLExecutor, LLMatcher
from torch import Tensor

FORBIDDEN = -1e30
"""The logit of a token that isn't allowed: finite, and below whatever a ban by another feature leaves."""

_BITS = 32
_SPARSE = 8  # a mask is sparse if at most one word in so many allows a token

Float32Array = npt.NDArray[np.float32]


class MaskMaker:
    """Maker of masks for the steps of one runner."""

    def __init__(self, *, pin_memory: bool) -> None:
        self._pin_memory = pin_memory
        self._executor = LLExecutor(1)  # one thread: more would compete with the engine's

    def make(self, matchers: Sequence[LLMatcher], vocab_size: int) -> Tensor:
        """Return the masks of ``matchers``: int32 [n, vocab_size / 32, rounded up], on the host; bit i of a row allows
        token i. Takes 5 us a row, and releases the GIL.

        The matchers' vocabulary has at least ``vocab_size`` tokens. A matcher that can't go on has an error afterwards.
        """
        num_words = -(-vocab_size // _BITS)
        bits = torch.empty((len(matchers), num_words), dtype=torch.int32, pin_memory=self._pin_memory)
        numbered = [(matcher, index) for index, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(numbered, bits.data_ptr(), num_words * _BITS // 8, len(matchers))
        return bits


def apply_masks(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set the logits, float32 [R, vocab], of tokens that ``bits`` [n, words] doesn't allow in ``rows`` (int64 [n]) to
    :data:`FORBIDDEN`, in place. All are on one device; a GPU isn't waited for."""
    if logits.device.type == "cpu":
        values, allowed = logits.numpy(), bits.numpy()
        highest = np.empty((allowed.shape[1] * _BITS // 8, 8), np.float32)  # of one row; a new one would cost more
        for row, words in zip(rows.tolist(), allowed.view(np.uint32), strict=True):
            _apply_on_host(values[row], words, highest)
    else:
        logits[rows] = masked(logits[rows], bits)


def masked(logits: Tensor, bits: Tensor) -> Tensor:
    """Return ``logits`` [n, vocab] under the masks ``bits`` [n, words], by operations that suit any device."""
    shifts = torch.arange(_BITS, dtype=torch.int32, device=bits.device)
    allowed = ((bits.unsqueeze(2) >> shifts) & 1).view(bits.shape[0], -1)[:, : logits.shape[1]].bool()
    return logits.masked_fill(~allowed, FORBIDDEN)


def _apply_on_host(row: Float32Array, bits: npt.NDArray[np.uint32], highest: Float32Array) -> None:
    """Apply one mask, uint32 [words], to one row of logits [vocab], without a branch for each token. ``highest``:
    room for the highest logits of the row, [words * 4, 8]."""
    if _SPARSE * np.count_nonzero(bits) < bits.size:
        ids = _allowed_ids(bits)
        ids = ids[: ids.searchsorted(row.size)]
        kept = row.take(ids)
        row.fill(FORBIDDEN)
        row[ids] = kept
    else:
        np.take(_HIGHEST, bits.view(np.uint8), axis=0, out=highest, mode="clip")
        np.minimum(row, highest.reshape(-1)[: row.size], out=row)


def _allowed_ids(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """Return the tokens that a mask allows, in their order."""
    words = (bits != 0).nonzero()[0]
    (found,) = np.unpackbits(bits[words].view(np.uint8), bitorder="little").view(np.bool_).nonzero()
    ids: npt.NDArray[np.int64] = words[found // _BITS] * _BITS + found % _BITS
    return ids


def _highest_logits() -> Float32Array:
    """Return the highest logits of eight tokens by the byte of a mask that stands for them -> [256, 8]."""
    allowed = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(allowed, np.float32(np.inf), np.float32(FORBIDDEN))


_HIGHEST = _highest_logits()
