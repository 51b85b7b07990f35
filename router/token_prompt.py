"""A body whose prompt is one list of token ids: they are read at C speed, apart from the other fields.

Whatever isn't quite that is left to :mod:`.schema`, which says what is wrong with it.
"""

import msgspec
import numpy as np

from splitserve.token_ids import TokenIds, from_numpy

_OF_NUMBERS = b"0123456789, \t\r\n"  # without signs, points and exponents: non-negative integers
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
    inner = prompt[1:-1].strip()
    if prompt[:1] != b"[" or not inner or inner.translate(None, _OF_NUMBERS):
        return None
    numbers = np.fromstring(inner, dtype=np.int64, sep=",")
    return from_numpy(numbers) if int(numbers.max()) < 2**31 else None  # what int64 can't hold is its highest
