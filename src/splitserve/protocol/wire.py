"""Messages as bytes: four bytes of magic and schema version, then msgpack. The version is checked before the rest."""

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from splitserve.common.errors import ConfigError, WireError
from splitserve.protocol.messages.envelope import SCHEMA_VERSION, Body, Envelope
from splitserve.protocol.messages.membership import Registered
from splitserve.protocol.request import Party
from splitserve.protocol.token_ids import from_bytes, highest

_MAGIC = b"SP"
_HEADER_BYTES = 4
_HEADER = _MAGIC + SCHEMA_VERSION.to_bytes(2, "big")
MAX_MESSAGE_BYTES = 16 * 1024 * 1024  # a prompt of four million tokens


def plain(value: Any) -> bytes:
    """Token ids as msgpack has them. Raises NotImplementedError for what no message has a field of."""
    if not isinstance(value, array):
        raise NotImplementedError(f"a {type(value).__name__} in a message")
    return value.tobytes()


def _token_ids(_kind: type, value: Any) -> Any:
    if not isinstance(value, bytes):
        raise TypeError(f"token ids are bytes, not a {type(value).__name__}")
    token_ids = from_bytes(value)
    if token_ids and highest(token_ids) >= 2**31:
        raise ValueError("a token id is negative")
    return token_ids


_encoder = msgspec.msgpack.Encoder(enc_hook=plain)
_decoder = msgspec.msgpack.Decoder(Envelope, strict=True, dec_hook=_token_ids)
_bodies_decoder = msgspec.msgpack.Decoder(list[Body], strict=True, dec_hook=_token_ids)
_ARRAY = b"\xdd"  # begins an array of msgpack; its length follows


def encode(envelope: Envelope) -> bytes:
    return _HEADER + _encoder.encode(envelope)


def decode(data: bytes) -> Envelope:
    """Decode an envelope. Raises :class:`WireError` with the problem of the bytes, and no other error."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are accepted")
    if data[:_HEADER_BYTES] != _HEADER:
        raise WireError(_fault_of_header(data))
    try:
        return _decoder.decode(memoryview(data)[_HEADER_BYTES:])
    except (msgspec.DecodeError, ConfigError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"malformed message: {error}") from error


class OneWay:
    """Messages of one sender to one receiver: their envelopes begin with the same bytes, which needn't be decoded."""

    def __init__(self, sender: Party, to: Party) -> None:
        body = Registered()
        self._start = encode(Envelope(sender, to, body)).removesuffix(_encoder.encode(body))

    def bodies(self, messages: Sequence[bytes]) -> list[Body] | None:
        """Return the bodies of messages, which are decoded as one array; None if one of them must be judged by
        :func:`decode`, or if they have more than ``MAX_MESSAGE_BYTES`` together."""
        start, size = self._start, len(self._start)
        bodies = [message[size:] for message in messages if message.startswith(start)]
        if len(bodies) != len(messages) or sum(map(len, messages)) > MAX_MESSAGE_BYTES:
            return None
        array = _ARRAY + len(bodies).to_bytes(4, "big") + b"".join(bodies)
        try:
            return _bodies_decoder.decode(array)
        except (msgspec.DecodeError, ConfigError, RecursionError, UnicodeDecodeError):
            return None


def _fault_of_header(data: bytes) -> str:
    """Return in words how the first bytes of a message differ from ours."""
    if data[:2] != _MAGIC or len(data) < _HEADER_BYTES:
        return "not a Splitserve message: wrong first bytes"
    version = int.from_bytes(data[2:_HEADER_BYTES], "big")
    return f"message of schema version {version}; this process speaks {SCHEMA_VERSION}: upgrade the older side"
