"""Heads of requests that ask for another protocol (``Upgrade``), without that wish."""

from collections.abc import Iterator, Sequence


def plain_head(method: bytes, url: bytes, version: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the bytes of a head; ``headers`` have names in lower case."""
    lines = [b"%s %s HTTP/%s\r\n" % (method, url, version.encode())]
    lines += [b"%s: %s\r\n" % pair for pair in _without_upgrade(headers)]
    return b"".join(lines) + b"\r\n"


def _without_upgrade(headers: Sequence[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    for name, value in headers:
        if name == b"connection":
            tokens = [token for token in value.split(b",") if token.strip().lower() != b"upgrade"]
            yield name, b",".join(tokens)
        elif name != b"upgrade":
            yield name, value
