"""Counts of a JSON body's structure, taken from its bytes before anything parses it.

A parser builds an object for each value and holds the interpreter meanwhile, which blocks the event loop. Counting
separators and brackets outside strings takes numpy 5 ns per byte and releases the interpreter. The counts are exact for
valid JSON; for invalid JSON they are arbitrary, and the parser reports the error.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from splitserve.router.http.api_error import ApiError

MAX_DEPTH = 128
MAX_FIELDS = 128  # of the outermost object; the API has half as many
MAX_MEMBERS = 8192  # fields of all objects together: 2.5 us each for the parser when they are unknown
MAX_CONTAINERS = 8192
MAX_VALUES = 1 << 17  # commas outside strings; a prompt that is one list of token ids is read separately

_UNCOUNTED_BYTES = 1 << 11
_INLINE_BYTES = 1 << 16
_INLINE_MARKS = 512
_CHUNK_BYTES = 1 << 18
_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_DEPTH_STEPS = np.zeros(256, dtype=np.int8)
_DEPTH_STEPS[list(b"[{")] = 1
_DEPTH_STEPS[list(b"]}")] = -1
_IS_MARK = np.zeros(256, dtype=np.bool_)
_IS_MARK[list(b"[]{},:")] = True

Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True)
class BodyShape:
    """Counts of the characters outside strings."""

    depth: int = 0
    num_fields: int = 0  # members of the outermost object
    num_members: int = 0  # members of all objects
    num_containers: int = 0
    num_commas: int = 0


def is_surely_small(body: bytes) -> bool:
    """Return whether the event loop can parse ``body`` itself: any content then takes at most 3 ms, and isn't nested
    too deeply."""
    if len(body) > _INLINE_BYTES or len(body) - len(body.translate(None, b"[{")) > MAX_DEPTH:
        return False
    if len(body) <= _UNCOUNTED_BYTES:
        return True
    return len(body) - len(body.translate(None, b":[{")) <= _INLINE_MARKS


def check_shape(body: bytes) -> BodyShape:
    """Count the body's structure. Raises :class:`ApiError` 400 for more fields, objects, lists or depth than any
    request needs; :func:`check_values` checks the number of values.
    """
    shape = BodyShape()
    for _ in shapes_of(body, shape):
        _check(shape.depth, MAX_DEPTH, "levels of nesting")
        _check(shape.num_fields, MAX_FIELDS, "fields")
        _check(shape.num_members, MAX_MEMBERS, "fields in all its objects")
        _check(shape.num_containers, MAX_CONTAINERS, "objects and lists")
    return shape


def check_values(shape: BodyShape) -> None:
    """Raise :class:`ApiError` 400 for a body with too many values to be parsed one by one."""
    _check(shape.num_commas + 1, MAX_VALUES, "values, a prompt that is one list of token ids aside")


def _check(count: int, limit: int, noun: str) -> None:
    if count > limit:
        message = f"the body has more than {limit} {noun}; send several smaller requests"
        raise ApiError(400, message, code="body_too_complex")


def shapes_of(body: bytes, shape: BodyShape) -> Iterator[None]:
    """Add the structure of ``body`` to ``shape``, a chunk at each step."""
    depth = 0
    is_inside, is_escaped = False, False  # at the chunk's first byte: within a string, after an odd run of backslashes
    for begin in range(0, len(body), _CHUNK_BYTES):
        chunk = np.frombuffer(body, np.uint8, min(_CHUNK_BYTES, len(body) - begin), begin)
        quotes = np.flatnonzero(chunk == _QUOTE)
        if is_escaped or body.find(b"\\", begin, begin + len(chunk)) >= 0:
            quotes, is_escaped = _unescaped(chunk, quotes, is_escaped)
        marks, is_inside = _marks_outside(chunk, quotes, is_inside)
        depth = _count(marks, depth, shape)
        yield


def _unescaped(chunk: Bytes, quotes: npt.NDArray[np.intp], is_escaped: bool) -> tuple[npt.NDArray[np.intp], bool]:
    """Return the ``quotes`` that follow an even run of backslashes, and whether the chunk ends with an odd run."""
    ends = np.append(quotes, len(chunk))
    last_other = np.arange(len(chunk), dtype=np.int32)
    last_other[chunk == _BACKSLASH] = -1
    np.maximum.accumulate(last_other, out=last_other)
    before = np.where(ends > 0, last_other[ends - 1], -1)
    run = ends - 1 - before
    run[before < 0] += is_escaped  # the run began in an earlier chunk
    is_odd = run % 2 == 1
    return quotes[~is_odd[:-1]], bool(is_odd[-1])


def _marks_outside(chunk: Bytes, quotes: npt.NDArray[np.intp], is_inside: bool) -> tuple[Bytes, bool]:
    """Return the brackets and separators outside strings, and whether the chunk ends inside a string."""
    if not len(quotes):
        return chunk[:0] if is_inside else chunk[_IS_MARK[chunk]], is_inside
    inside = np.zeros(len(chunk), dtype=np.uint8)
    inside[quotes] = 1
    inside[0] ^= is_inside
    np.bitwise_xor.accumulate(inside, out=inside)
    return chunk[_IS_MARK[chunk] & (inside == 0)], bool(inside[-1])


def _count(marks: Bytes, depth: int, shape: BodyShape) -> int:
    """Add ``marks``, the bytes of a chunk's brackets and separators, to ``shape``; return the depth after them."""
    if not len(marks):
        return depth
    steps = _DEPTH_STEPS[marks]
    depths = depth + np.cumsum(steps, dtype=np.int32)
    is_colon = marks == _COLON
    shape.depth = max(shape.depth, int(depths.max()))
    shape.num_fields += int(np.count_nonzero(is_colon & (depths == 1)))
    shape.num_members += int(np.count_nonzero(is_colon))
    shape.num_containers += int(np.count_nonzero(steps == 1))
    shape.num_commas += int(np.count_nonzero(marks == _COMMA))
    return int(depths[-1])
