"""Triton's interpreter with elements of two bytes that are read and written whole, as a GPU does.

The interpreter copies each element with ``memcpy``, and glibc's moves the two bytes one after the other: a process that
reads memory while another one writes it may see halves of two numbers.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

WHOLE_BYTES = 2


class WholeElements:
    """Stands for the interpreter's compiled part: NumPy, which takes two bytes as one number, moves the elements of two
    bytes in ``shared``, ``[number of bytes]``. All else is done as before."""

    def __init__(self, compiled: Any, shared: NDArray[np.uint8]) -> None:
        self._compiled = compiled
        self._numbers = shared.view(np.uint16)
        self._first = shared.ctypes.data
        self._end = self._first + shared.nbytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        if not self._holds(pointers, mask, np.dtype(dtype).itemsize):
            return self._compiled.load(pointers, mask, other, dtype)
        loaded = np.array(other, dtype=dtype).reshape(pointers.shape)
        loaded.view(np.uint16)[mask] = self._numbers[self._places(pointers, mask)]
        return loaded

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        if not self._holds(pointers, mask, values.itemsize):
            return self._compiled.store(pointers, values, mask)
        self._numbers[self._places(pointers, mask)] = values.view(np.uint16)[mask]
        return None

    def _holds(self, pointers: Any, mask: Any, itemsize: int) -> bool:
        masked = pointers[mask]
        return bool(
            itemsize == WHOLE_BYTES and masked.size and self._first <= masked.min() and masked.max() < self._end
        )

    def _places(self, pointers: Any, mask: Any) -> Any:
        return ((pointers[mask] - np.uint64(self._first)) // WHOLE_BYTES).astype(np.intp)


def make_whole(shared: NDArray[np.uint8]) -> None:
    """Let kernels move two-byte elements of ``shared`` whole, from now on in this process."""
    from triton.runtime import interpreter

    interpreter._interpreter = WholeElements(interpreter._interpreter, shared)
