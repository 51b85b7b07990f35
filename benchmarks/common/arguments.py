"""Types of benches' options, for argparse: meaningless values are rejected before anything is measured."""

import argparse
import tempfile
from pathlib import Path

from splitserve.orchestration.cli.option_types import finite_number, whole_number

positive = whole_number(1)
not_negative = whole_number(0)


def positive_seconds(text: str) -> float:
    """Parse a finite number above 0."""
    number = finite_number(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text!r}")
    return number


def finite(text: str) -> float:
    """Parse a finite number of at least 0."""
    number = finite_number(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text!r}")
    return number


def share(text: str) -> float:
    """Parse a number from 0 to 1."""
    number = finite_number(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"must be a share, from 0 to 1, got {text!r}")
    return number


def more_than_one(text: str) -> float:
    """Parse a finite number above 1."""
    number = finite_number(text)
    if number <= 1:
        raise argparse.ArgumentTypeError(f"must be more than 1, got {text!r}")
    return number


def writable_directory(text: str) -> str:
    """Return the path of a directory, which is created if needed; "" unchanged, since it stands for a default."""
    if text:
        try:
            Path(text).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise argparse.ArgumentTypeError(f"{text} can't be created: {error.strerror}") from error
        try:
            tempfile.TemporaryFile(dir=text).close()
        except OSError as error:
            raise argparse.ArgumentTypeError(f"{text} can't be written to: {error.strerror}") from error
    return text
