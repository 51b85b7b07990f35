"""Masks of the tokens that may come next: made on the host, one bit per token, and applied where the logits are."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher
from torch import Tensor

FORBIDDEN = -1e30
"""The logit of a token that isn't allowed: finite, and below whatever a ban by another feature leaves."""

_BITS = 32
_SAMPLE = 32  # the part of a mask that is hashed: one word in so many
_SPARSE = 8  # a mask is sparse if at most one word in so many allows a token

Float32Array = npt.NDArray[np.float32]
Mask = npt.NDArray[np.uint32]  # [words]


class MaskMaker:
    """Maker of masks for the steps of one runner."""

    def __init__(self, *, pin_memory: bool) -> None:
        self._pin_memory = pin_memory
        self._room = torch.empty(0, dtype=torch.int32)  # for masks that aren't pinned; new memory would cost more

    def make(self, matchers: Sequence[LLMatcher], vocab_size: int) -> Tensor:
        """Return the masks of ``matchers``: int32 [n, vocab_size / 32, rounded up], on the host; bit i of a row allows
        token i. Takes 5 us a row on this thread: another thread would cost more than it saves. Masks that aren't pinned
        are valid up to the next call.

        The matchers' vocabulary has at least ``vocab_size`` tokens. A matcher that can't go on has an error afterwards.
        """
        num_words = -(-vocab_size // _BITS)
        bits = self._new_bits(len(matchers), num_words)
        address, num_bytes = bits.data_ptr(), num_words * _BITS // 8
        for index, matcher in enumerate(matchers):
            matcher.unsafe_compute_mask_ptr(address + index * num_bytes, num_bytes)
        return bits

    def _new_bits(self, num_rows: int, num_words: int) -> Tensor:
        if self._pin_memory:
            return torch.empty((num_rows, num_words), dtype=torch.int32, pin_memory=True)
        if self._room.numel() < num_rows * num_words:
            self._room = torch.empty(num_rows * num_words, dtype=torch.int32)
        return self._room[: num_rows * num_words].view(num_rows, num_words)


def apply_masks(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set the logits, float32 [R, vocab], of tokens that ``bits`` [n, words] doesn't allow in ``rows`` (int64 [n]) to
    :data:`FORBIDDEN`, in place, on a GPU, which isn't waited for."""
    logits[rows] = masked(logits[rows], bits)


def masked(logits: Tensor, bits: Tensor) -> Tensor:
    """Return ``logits`` [n, vocab] under the masks ``bits`` [n, words], by operations that suit any device."""
    shifts = torch.arange(_BITS, dtype=torch.int32, device=bits.device)
    allowed = ((bits.unsqueeze(2) >> shifts) & 1).view(bits.shape[0], -1)[:, : logits.shape[1]].bool()
    return logits.masked_fill(~allowed, FORBIDDEN)


class HostMasks:
    """Masks for logits on a CPU, applied in place without a branch for each token."""

    def __init__(self) -> None:
        self._highest = np.empty((0, 8), np.float32)  # room for the highest logits of a row; a new one would cost more

    def apply(self, logits: Tensor, rows: Sequence[int], bits: Tensor) -> None:
        """Apply the masks ``bits`` [n, words] to ``rows`` of the logits, as :func:`apply_masks` does."""
        values = logits.numpy()
        for mask, alike in _alike(rows, bits.numpy().view(np.uint32)):
            if _SPARSE * np.count_nonzero(mask) < mask.size:
                ids = _allowed_ids(mask)
                _keep_few(values, alike, ids[: ids.searchsorted(values.shape[1])])
            else:
                self._lower(values, alike, mask)

    def _lower(self, values: Float32Array, rows: Sequence[int], mask: Mask) -> None:
        """Apply one mask to some rows by the smaller of each logit and the highest one that the mask allows."""
        num_bytes = mask.size * _BITS // 8
        if len(self._highest) != num_bytes:
            self._highest = np.empty((num_bytes, 8), np.float32)
        np.take(_HIGHEST, mask.view(np.uint8), axis=0, out=self._highest, mode="clip")
        highest = self._highest.reshape(-1)[: values.shape[1]]
        for row in rows:
            np.minimum(values[row], highest, out=values[row])


def _alike(rows: Sequence[int], masks: npt.NDArray[np.uint32]) -> Iterator[tuple[Mask, list[int]]]:
    """Yield the distinct ones of the masks [n, words], with the rows that each is for: sequences of one grammar are
    often at places where it allows the same tokens."""
    found: dict[bytes, list[tuple[bytes, Mask, list[int]]]] = {}  # by a part of the mask, which is cheaper to hash
    for row, mask in zip(rows, masks, strict=True):
        content, similar = mask.tobytes(), found.setdefault(mask[::_SAMPLE].tobytes(), [])
        alike = next((those for other, _, those in similar if other == content), None)
        if alike is None:
            similar.append((content, mask, [row]))
        else:
            alike.append(row)
    for similar in found.values():
        for _, mask, alike in similar:
            yield mask, alike


def _keep_few(values: Float32Array, rows: Sequence[int], ids: npt.NDArray[np.int64]) -> None:
    """Keep the logits of a few tokens in some rows."""
    for row in rows:
        logits = values[row]
        kept = logits.take(ids)
        logits.fill(FORBIDDEN)
        logits[ids] = kept


def _allowed_ids(bits: Mask) -> npt.NDArray[np.int64]:
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
