"""A body whose prompt is one list of token ids: they are read at C speed, apart from the other fields.

Whatever isn't quite that is left to :mod:`.schema`, which says what is wrong with it.
"""

from array import array

import msgspec
import numpy as np

from splitserve.protocol.token_ids import TokenIds

_OF_NUMBERS = b"0123456789, \t\r\n"  # without signs, points and exponents: non-negative integers
_PIECE_BYTES = 1 << 15  # larger ones, and what is made of them, are memory that the allocator asks the system for
_STAND_IN = msgspec.Raw(b"[0]")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def take_token_ids(body: bytes) -> tuple[TokenIds, bytes] | None:
    """The prompt's token ids, and the body with another prompt in their place; None if the prompt isn't a list of
    token ids that int32 can hold, or the body isn't JSON."""
    try:
        fields = _fields.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    token_ids = _parse(bytes(fields["prompt"]).strip()) if "prompt" in fields else None
    return None if token_ids is None else (token_ids, msgspec.json.encode(fields | {"prompt": _STAND_IN}))


def _parse(prompt: bytes) -> TokenIds | None:
    """``prompt`` is valid JSON."""
    start, end = 1, len(prompt) - 1
    if prompt[:1] != b"[" or not prompt[start:end].strip():
        return None
    token_ids = array("i")
    while start < end:
        comma = prompt.find(b",", start + _PIECE_BYTES, end)
        stop = end if comma < 0 else comma
        piece = prompt[start:stop]
        if piece.translate(None, _OF_NUMBERS):
            return None
        numbers = np.fromstring(piece.strip(), dtype=np.int64, sep=",")
        if numbers[numbers.argmax()] >= 2**31:  # what int64 can't hold is its highest
            return None
        token_ids.frombytes(numbers.astype(np.int32).tobytes())
        start = stop + 1
    return token_ids
