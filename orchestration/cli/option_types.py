"""Types of options, for argparse: each refuses a value with what was given and what is allowed."""

import argparse
import math
import os
from collections.abc import Callable

from msgspec import Meta

from splitserve.common.errors import ConfigError
from splitserve.orchestration.spec.sizes import parse_bytes
from splitserve.protocol.settings import is_within, range_words


def bytes_option(text: str) -> int:
    """Parse a size with :func:`parse_bytes`."""
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive_bytes(text: str) -> int:
    """Parse a size as :func:`bytes_option` does, of at least one byte."""
    num_bytes = bytes_option(text)
    if num_bytes < 1:
        raise argparse.ArgumentTypeError(f"must be more than 0 bytes, got {text!r}")
    return num_bytes


def size_option(meta: Meta) -> Callable[[str], int]:
    """Return a parser of sizes within the range of ``meta``."""

    def parse(text: str) -> int:
        num_bytes = bytes_option(text)
        if not is_within(meta, num_bytes):
            raise argparse.ArgumentTypeError(f"must be {range_words(meta)} bytes, got {text!r}")
        return num_bytes

    return parse


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a parser of whole numbers from ``least`` to ``most``, both included; None: of any size."""
    allowed = f"from {least} on" if most is None else f"between {least} and {most}"

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"must be a whole number {allowed}, got {text!r}")
        return number

    return parse


def finite_number(text: str) -> float:
    """Parse a number that is neither infinite nor NaN."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text!r}")
    return number


def address(text: str) -> str:
    """Check a host name or an IP address; not empty, which would mean every address of the machine."""
    if not text or text != "".join(text.split()):
        raise argparse.ArgumentTypeError(f"must be an address like 127.0.0.1, ::1 or 0.0.0.0 (all), got {text!r}")
    return text


def path(text: str) -> str:
    """Check a path: not empty, and without NUL."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"must be a path, got {text!r}")
    return text


def absolute_path(text: str) -> str:
    """Return the path from the root; "" for none."""
    return os.path.abspath(text) if text else ""


def name_or_path(text: str) -> str:
    """Return a path of JSON from the root, and any other text as it is."""
    return absolute_path(text) if text.endswith(".json") else text


def source(text: str) -> str:
    """Return ``auto`` and ``none`` as they are, anything else as the path of a directory from the root."""
    return text if text in ("", "auto", "none") else os.path.abspath(text)


COUNT = whole_number(0, 4096)
"""Number of workers."""
