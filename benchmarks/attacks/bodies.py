"""Request bodies that cost the router more than their sender, by name: :data:`BODIES`."""

from collections.abc import Callable
from dataclasses import dataclass

from splitserve.benchmarks.router.stages import MODEL_ID

MIB = 1 << 20
BODY_BYTES = 16 * MIB - 256
"""Larger than a router accepts by default."""


@dataclass(frozen=True, slots=True)
class HostileBody:
    """Request, and how often it is sent at once."""

    make: Callable[[], bytes]  # the request, head included
    times: int = 8


def post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def completion(fields: bytes) -> bytes:
    return post("/v1/completions", b'{"model":"%s",' % MODEL_ID.encode() + fields + b"}")


def chat(messages: bytes) -> bytes:
    start = b'{"model":"%s","max_tokens":1,"messages":' % MODEL_ID.encode()
    return post("/v1/chat/completions", start + messages + b"}")


def prompt(value: bytes) -> bytes:
    return completion(b'"max_tokens":1,"prompt":' + value)


def repeated(unit: bytes, size: int, separator: bytes = b"") -> bytes:
    return separator.join([unit] * ((size + len(separator)) // len(unit + separator)))


def string_of(unit: bytes, size: int = BODY_BYTES) -> bytes:
    return b'"' + repeated(unit, size) + b'"'


def array_of(unit: bytes, size: int = BODY_BYTES) -> bytes:
    return b"[" + repeated(unit, size, b",") + b"]"


def fields(count: int, start: int = 0) -> bytes:
    return b",".join(b'"f%d":1' % index for index in range(start, start + count))


def messages(count: int, message: bytes = b'{"role":"user","content":""}') -> bytes:
    return b"[" + b",".join([message] * count) + b"]"


_PART = b'{"type":"text","text":"a"}'
_SMALL = 4 * MIB - 256  # fits into the default limit
_REQUESTS: dict[str, Callable[[], bytes]] = {
    "900,000 unknown fields": lambda: completion(b'"prompt":"a",' + fields(900_000)),
    "250,000 unknown fields": lambda: completion(b'"prompt":"a",' + fields(250_000)),
    "as many unknown fields as pass": lambda: completion(b'"prompt":"a",' + fields(120)),
    "a message of 15,000 unknown fields": lambda: chat(b'[{"role":"user","content":"a",' + fields(15_000) + b"}]"),
    "400,000 empty messages": lambda: chat(messages(400_000)),
    "130,000 empty messages": lambda: chat(messages(130_000)),
    "as many empty messages as pass": lambda: chat(messages(2_048)),
    "400,000 empty text parts": lambda: chat(
        b'[{"role":"user","content":' + messages(400_000, b'{"type":"text","text":""}') + b"}]"
    ),
    "as many text parts as pass": lambda: chat(messages(7, b'{"role":"user","content":%s}' % messages(1_000, _PART))),
    "brackets, 4 MiB deep": lambda: prompt(b"[" * _SMALL),
    "objects, deep": lambda: prompt(b'{"a":' * (_SMALL // 5)),
    "a million closed lists": lambda: prompt(array_of(b"[]", _SMALL)),
    "a string of 16 MiB": lambda: prompt(string_of(b"a")),
    "a string of 4 MiB": lambda: prompt(string_of(b"a", _SMALL)),
    "escapes, 16 MiB": lambda: prompt(string_of(b"\\n")),
    "escapes, 4 MiB": lambda: prompt(string_of(b"\\n", _SMALL)),
    "escaped quotes, 4 MiB": lambda: prompt(string_of(b'\\"', _SMALL)),
    "unicode escapes, 4 MiB": lambda: prompt(string_of(b"\\ud83d\\ude00", _SMALL)),
    "a chat of escapes, 4 MiB": lambda: chat(b'[{"role":"user","content":%s}]' % string_of(b"\\u00e9", _SMALL)),
    "ASCII, then one emoji, 4 MiB": lambda: prompt(b'"' + b"a" * _SMALL + "\U0001f600".encode() + b'"'),
    "two-byte characters, 4 MiB": lambda: prompt(string_of("é".encode(), _SMALL)),
    "8 million token ids": lambda: prompt(array_of(b"1")),
    "2 million token ids": lambda: prompt(array_of(b"1", _SMALL)),
    "4 million floats": lambda: prompt(array_of(b"1.5")),
    "1 million floats": lambda: prompt(array_of(b"1.5", _SMALL)),
    "lists of token ids, 4 MiB": lambda: prompt(array_of(array_of(b"1", 8_000), _SMALL)),
    "stop_token_ids, 4 MiB": lambda: completion(b'"prompt":"a","stop_token_ids":' + array_of(b"1", _SMALL)),
    "a number of 4 million digits": lambda: completion(b'"prompt":"a","max_tokens":' + b"1" * _SMALL),
    "a token id of 4 million digits": lambda: prompt(b"[" + b"1" * _SMALL + b"]"),
    "an exponent of 4 million digits": lambda: completion(b'"prompt":"a","temperature":1e' + b"1" * _SMALL),
    "one key of 4 MiB": lambda: completion(b'"prompt":"a",' + string_of(b"k", _SMALL) + b":1"),
    "one key four times, 1 MiB each": lambda: completion(b",".join([b'"prompt":' + string_of(b"\\n", MIB - 64)] * 4)),
    "one key 300,000 times": lambda: completion(repeated(b'"prompt":"a"', _SMALL, b",")),
    "a model name of 4 MiB": lambda: post("/v1/completions", b'{"prompt":"a","model":%s}' % string_of(b"\\n", _SMALL)),
    "4 MiB of spaces": lambda: prompt(b" " * _SMALL + b'"a"'),
    "a profile request of 4 MiB": lambda: post("/admin/profile", b"{" + fields(250_000) + b"}"),
}
_SLOW = (
    "brackets, 4 MiB deep",
    "escaped quotes, 4 MiB",
    "lists of token ids, 4 MiB",
    "2 million token ids",
    "a number of 4 million digits",
    "one key four times, 1 MiB each",
    "a profile request of 4 MiB",
)
BODIES = {name: HostileBody(make, 1 if name in _SLOW else 8) for name, make in _REQUESTS.items()}
