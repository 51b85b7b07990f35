"""Types of benches' options, for argparse: what makes no sense is refused before anything is measured."""

import argparse
import math
import tempfile
from pathlib import Path


def positive(text: str) -> int:
    """A whole number from 1."""
    return _at_least(1, text)


def not_negative(text: str) -> int:
    """A whole number from 0."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a whole number from {least} on")
    return int(text)


def positive_seconds(text: str) -> float:
    """Some, and not for ever."""
    number = finite(text)
    if number == 0:
        raise argparse.ArgumentTypeError("it must be more than 0")
    return number


def finite(text: str) -> float:
    """From 0 on."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a number from 0 on")
    return number


def writable_directory(text: str) -> str:
    """The same; it's there from now on. An empty one stands for something else."""
    if text:
        try:
            Path(text).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise argparse.ArgumentTypeError(f"{text} can't be made: {error.strerror}") from error
        try:
            tempfile.TemporaryFile(dir=text).close()
        except OSError as error:
            raise argparse.ArgumentTypeError(f"{text} can't be written to: {error.strerror}") from error
    return text
