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
        values = logits.numpy()
        for row, allowed in zip(rows.tolist(), bits.numpy().view(np.uint32), strict=True):
            _apply_on_host(values[row], allowed)
    else:
        logits[rows] = masked(logits[rows], bits)


def masked(logits: Tensor, bits: Tensor) -> Tensor:
    """Return ``logits`` [n, vocab] under the masks ``bits`` [n, words], by operations that suit any device."""
    shifts = torch.arange(_BITS, dtype=torch.int32, device=bits.device)
    allowed = ((bits.unsqueeze(2) >> shifts) & 1).view(bits.shape[0], -1)[:, : logits.shape[1]].bool()
    return logits.masked_fill(~allowed, FORBIDDEN)


def _apply_on_host(row: Float32Array, bits: npt.NDArray[np.uint32]) -> None:
    """Apply one mask, uint32 [words], to one row of logits [vocab], without a branch for each token."""
    words = np.flatnonzero(bits)
    if _SPARSE * words.size < bits.size:
        ids = _allowed_ids(bits, words)
        ids = ids[ids < row.size]
        kept = row[ids]
        row.fill(FORBIDDEN)
        row[ids] = kept
    else:
        highest = np.take(_HIGHEST, bits.view(np.uint8), axis=0).reshape(-1)[: row.size]
        np.minimum(row, highest, out=row)


def _allowed_ids(bits: npt.NDArray[np.uint32], words: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the tokens that the ``words`` of a mask allow."""
    unpacked = np.unpackbits(bits[words].view(np.uint8), bitorder="little").reshape(-1, _BITS)
    word, bit = np.nonzero(unpacked)
    return words[word] * _BITS + bit


def _highest_logits() -> Float32Array:
    """Return the highest logits of eight tokens by the byte of a mask that stands for them -> [256, 8]."""
    allowed = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(allowed, np.float32(np.inf), np.float32(FORBIDDEN))


_HIGHEST = _highest_logits()
