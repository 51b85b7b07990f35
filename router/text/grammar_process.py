"""Main of a process that compiles grammars: ``python -m splitserve.router.text.grammar_process``. Only
:mod:`.grammar_checker` starts it.

Messages on standard input and output are msgpack preceded by four bytes of length: a :class:`Setup`, then grammars as
strings, each answered by a :class:`Verdict`. The process ends with its input, or by a signal when a grammar takes too
much processor time.
"""

import os
import resource
import signal
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from splitserve.common.errors import CheckpointError
from splitserve.common.grammars import GRAMMAR_LIMITS, load_grammar_tokenizer

MAX_MEMORY_BYTES = 4 << 30  # of address space: a large vocabulary takes a tenth of it
STACK_BYTES = 1 << 20  # less than a worker's threads have: a grammar that overflows a stack does it here
LENGTH = struct.Struct("<I")


class Setup(msgspec.Struct, frozen=True):
    """The model's vocabulary, and the bound of each grammar."""

    model_dir: str
    end_token_ids: list[int]
    cpu_seconds: float


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """Answer to a Setup or a grammar."""

    error: str = ""  # "": it can be used


def framed(message: Any) -> bytes:
    """Return a message as it is sent."""
    content = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(content)) + content


def verdict_on(grammar: str, tokenizer: LLTokenizer) -> Verdict:
    """Compile a grammar and make its first mask."""
    limits = LLParserLimits(**GRAMMAR_LIMITS)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer, limits=limits)
    if is_error:
        return Verdict(messages[0] or "it can't be compiled")
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    matcher.compute_bitmask()
    if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
        return Verdict(f"no text satisfies it ({(matcher.get_error() or matcher.stop_reason()).splitlines()[0]})")
    return Verdict()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal's Ctrl-C is for the router, which ends its streams
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setup = msgspec.msgpack.decode(_receive(), type=Setup)
    try:
        tokenizer = load_grammar_tokenizer(Path(setup.model_dir), setup.end_token_ids)
    except CheckpointError as error:
        _send(Verdict(str(error)))
        return
    _send(Verdict())
    threading.stack_size(STACK_BYTES)
    while message := _receive():
        _run_on_small_stack(lambda: _answer(message, tokenizer, setup.cpu_seconds))


def _answer(message: bytes, tokenizer: LLTokenizer, cpu_seconds: float) -> None:
    """Answer one grammar. The alarm's default action ends the process: no exception would stop the compiler."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    verdict = verdict_on(msgspec.msgpack.decode(message, type=str), tokenizer)
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    _send(verdict)


def _run_on_small_stack(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def _send(verdict: Verdict) -> None:
    sys.stdout.buffer.write(framed(verdict))
    sys.stdout.buffer.flush()


def _receive() -> bytes:
    """Return the next message; b"" at the end."""
    header = sys.stdin.buffer.read(LENGTH.size)
    return sys.stdin.buffer.read(LENGTH.unpack(header)[0]) if len(header) == LENGTH.size else b""


if __name__ == "__main__":
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    main()
