"""Masks of the tokens that may come next: made on the host, one bit per token, and applied where the logits are."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLExecutor, LLMatcher
from torch import Tensor

from splitserve.kernels.sampling import FORBIDDEN, MaskLogits

_BITS = 32
_FEW = 8  # rows that one thread makes sooner than several threads wake up
_SPARSE = 8  # a mask is sparse if at most one word in so many allows a token

Float32Array = npt.NDArray[np.float32]
Mask = npt.NDArray[np.uint32]  # [words]


class MaskMaker:
    """Maker of masks for the steps of one runner. ``num_threads``: cores that are free for it meanwhile, 1 where these
    compute the step."""

    def __init__(self, *, pin_memory: bool, num_threads: int = 1) -> None:
        self._pin_memory = pin_memory
        self._executor = LLExecutor(num_threads=num_threads) if num_threads > 1 else None
        self._room = torch.empty(0, dtype=torch.int32)  # for masks that aren't pinned; new memory would cost more

    def make(self, matchers: Sequence[LLMatcher], vocab_size: int) -> Tensor:
        """Return the masks of ``matchers``: int32 [n, vocab_size / 32, rounded up], on the host; bit i of a row allows
        token i. A row takes 5 us in usual grammars, and milliseconds in the worst. Masks that aren't pinned are valid
        up to the next call.

        The matchers' vocabulary has at least ``vocab_size`` tokens. A matcher that can't go on has an error afterwards.
        """
        num_words = -(-vocab_size // _BITS)
        bits = self._new_bits(len(matchers), num_words)
        address, num_bytes = bits.data_ptr(), num_words * _BITS // 8
        if self._executor is None or len(matchers) < _FEW:
            for index, matcher in enumerate(matchers):
                matcher.unsafe_compute_mask_ptr(address + index * num_bytes, num_bytes)
        else:
            numbered = [(matcher, index) for index, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(numbered, address, num_bytes, len(matchers))
        return bits

    def _new_bits(self, num_rows: int, num_words: int) -> Tensor:
        if self._pin_memory:
            return torch.empty((num_rows, num_words), dtype=torch.int32, pin_memory=True)
        if self._room.numel() < num_rows * num_words:
            self._room = torch.empty(num_rows * num_words, dtype=torch.int32)
        return self._room[: num_rows * num_words].view(num_rows, num_words)


class DeviceMasks:
    """Masks for logits on a GPU. They are copied beside the steps' stream, which computes the logits meanwhile."""

    def __init__(self, device: torch.device, mask_logits: MaskLogits) -> None:
        self._device = device
        self._mask_logits = mask_logits
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def apply(self, logits: Tensor, rows: Sequence[int], bits: Tensor) -> None:
        """Set the logits of tokens that ``bits`` [n, words], pinned, doesn't allow in ``rows`` of ``logits``, float32
        [R, vocab], to :data:`FORBIDDEN`, in place. The current stream waits for the copies, the host for nothing."""
        with torch.cuda.stream(self._stream):
            copies = [each.to(self._device, non_blocking=True) for each in (torch.tensor(rows).pin_memory(), bits)]
        steps = torch.cuda.current_stream(self._device)
        steps.wait_stream(self._stream)
        for copy in copies:
            copy.record_stream(steps)
        self._mask_logits(logits, *copies)


class HostMasks:
    """Masks for logits on a CPU, applied in place without a branch for each token."""

    def __init__(self) -> None:
        self._highest = np.empty((0, 8), np.float32)  # the highest logits of a row under the last mask that lowered any
        self._lowering: Mask = np.empty(0, np.uint32)  # that mask

    def apply(self, logits: Tensor, rows: Sequence[int], bits: Tensor) -> None:
        """Apply the masks ``bits`` [n, words] to ``rows`` of the logits, as :class:`.DeviceMasks` does."""
        values = logits.numpy()
        for row, mask in zip(rows, bits.numpy().view(np.uint32), strict=True):
            is_used = mask != 0
            if _SPARSE * np.count_nonzero(is_used) < mask.size:
                _keep_few(values[row], _allowed_ids(mask, is_used.nonzero()[0]))
            else:
                self._lower(values[row], mask)

    def _lower(self, logits: Float32Array, mask: Mask) -> None:
        """Apply a mask to a row of logits by the smaller of each one and the highest one that the mask allows."""
        if not np.array_equal(mask, self._lowering):  # inside strings it is the same for many rows and steps
            if mask.size != self._lowering.size:
                self._highest = np.empty((mask.size * _BITS // 8, 8), np.float32)
            np.take(_HIGHEST, mask.view(np.uint8), axis=0, out=self._highest, mode="clip")
            self._lowering = mask.copy()
        np.minimum(logits, self._highest.reshape(-1)[: logits.size], out=logits)


def _keep_few(logits: Float32Array, ids: npt.NDArray[np.int64]) -> None:
    """Keep the logits of a few tokens in a row; ``ids`` beyond its end don't count."""
    if ids.size and ids[-1] >= logits.size:
        ids = ids[: ids.searchsorted(logits.size)]
    kept = logits.take(ids)
    logits.fill(FORBIDDEN)
    logits[ids] = kept


def _allowed_ids(bits: Mask, words: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the tokens that a mask allows, in their order; ``words`` are the numbers of those words that aren't 0."""
    (found,) = np.unpackbits(bits[words].view(np.uint8), bitorder="little").view(np.bool_).nonzero()
    ids: npt.NDArray[np.int64] = words[found // _BITS] * _BITS + found % _BITS
    return ids


def _highest_logits() -> Float32Array:
    """Return the highest logits of eight tokens by the byte of a mask that stands for them -> [256, 8]."""
    allowed = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(allowed, np.float32(np.inf), np.float32(FORBIDDEN))


_HIGHEST = _highest_logits()
