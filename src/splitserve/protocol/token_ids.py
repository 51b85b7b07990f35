"""A prompt's token ids as packed int32: long prompts are copied, checked, hashed and sent without a loop over them."""

from array import array
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    TokenIds: TypeAlias = array[int]
else:
    TokenIds = array  # can't be subscripted before Python 3.12

TOKEN_ID_BYTES = 4


def from_bytes(data: bytes) -> TokenIds:
    """Raises ValueError for bytes that aren't whole token ids. No bound is checked."""
    packed = array("i")
    packed.frombytes(data)
    return packed


def highest(token_ids: TokenIds) -> int:
    """Return the highest of at least one token id. A negative id counts as 2**31 or more, so that one pass finds every
    id out of bounds."""
    numbers = np.asarray(token_ids, dtype=np.int32).view(np.uint32)
    return int(numbers[numbers.argmax()])
