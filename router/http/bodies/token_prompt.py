"""Bodies whose prompt is one list of token ids, which is read at C speed, separately from the other fields.

Anything that deviates is left to :mod:`.schema`, which reports the fault.
"""

from array import array

import msgspec
import numpy as np

from splitserve.protocol.token_ids import TokenIds

_OF_NUMBERS = b"0123456789, \t\r\n"  # without signs, points and exponents: non-negative integers
_PIECE_BYTES = 1 << 15  # for larger pieces and their numbers, the allocator would request memory from the system
_STAND_IN = msgspec.Raw(b"[0]")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def take_token_ids(body: bytes, field: str = "prompt") -> tuple[TokenIds, bytes] | None:
    """Return the token ids in ``field``, and the body with other ones in their place; None if the field isn't a list of
    token ids that fit into int32, or the body isn't JSON."""
    try:
        fields = _fields.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    token_ids = _parse(bytes(fields[field]).strip()) if field in fields else None
    return None if token_ids is None else (token_ids, msgspec.json.encode(fields | {field: _STAND_IN}))


def _parse(prompt: bytes) -> TokenIds | None:
    """Return the token ids of ``prompt``, which is valid JSON; None unless it is a list of ids that fit into int32."""
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
        if numbers[numbers.argmax()] >= 2**31:  # numbers beyond int64 became its maximum
            return None
        token_ids.frombytes(numbers.astype(np.int32).tobytes())
        start = stop + 1
    return token_ids
