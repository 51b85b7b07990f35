"""Amounts of memory: parsing of human-written sizes, and formatting."""

import re

from splitserve.common.errors import ConfigError
from splitserve.protocol.engine_config import MAX_MEMORY_BYTES

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]?)(?P<binary>i?)(?P<byte>b?)", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return the bytes of ``4096``, ``512MiB`` (powers of 1024), ``2GB`` (powers of 1000) or ``1.5g`` (powers of 1024,
    as in ``docker``).

    Raises :class:`ConfigError` for anything else, and for more than :data:`MAX_MEMORY_BYTES`.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match["binary"] and not match["unit"]):
        raise ConfigError(f"{text!r} is not an amount of memory; write it like 512MiB, 2GB, 1.5g or 1073741824")
    decimal = bool(match["byte"]) and not match["binary"]
    num_bytes = float(match["number"]) * (1000 if decimal else 1024) ** _POWERS[match["unit"].lower()]
    if num_bytes > MAX_MEMORY_BYTES:
        raise ConfigError(f"{text!r} is more than the {MAX_MEMORY_BYTES} bytes allowed")
    return int(num_bytes)


def format_bytes(num_bytes: float) -> str:
    """Format ``num_bytes`` in the largest binary unit in which it is at least 1."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
