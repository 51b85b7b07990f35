"""Main of a process that compiles grammars: ``python -m splitserve.router.text.processes.grammar_process``. Only
:mod:`.grammar_checker` starts it.

The messages (:mod:`.child`) are msgpack: a :class:`Setup`, then grammars as strings, each answered by a
:class:`Verdict`. A signal ends the process when a grammar takes too much processor time.
"""

import os
import signal
import socket
import threading
from pathlib import Path

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from splitserve.common.errors import CheckpointError
from splitserve.common.grammars import GRAMMAR_LIMITS, GrammarTokenizer, load_grammar_tokenizer
from splitserve.router.text.processes.child import connect, framed, receive

MAX_MEMORY_BYTES = 4 << 30  # of address space: a large vocabulary takes a tenth of it
MAX_ERROR_CHARS = 10_000  # errors quote the grammar
STACK_BYTES = 1 << 20  # less than a worker's threads have: a grammar that overflows a stack does it here


class Setup(msgspec.Struct, frozen=True):
    """The model's vocabulary, and the bound of each grammar."""

    model_dir: str
    end_token_ids: list[int]
    cpu_seconds: float


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """Answer to a Setup or a grammar."""

    error: str = ""  # "": it can be used


def verdict_on(grammar: str, tokenizer: LLTokenizer) -> Verdict:
    """Compile a grammar and make its first mask."""
    limits = LLParserLimits(**GRAMMAR_LIMITS)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer, limits=limits)
    if is_error:
        return Verdict(messages[0][:MAX_ERROR_CHARS] or "it can't be compiled")
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    matcher.compute_bitmask()
    if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
        return Verdict(f"no text satisfies it ({(matcher.get_error() or matcher.stop_reason()).splitlines()[0]})")
    return Verdict()


def main() -> None:
    connection = connect(MAX_MEMORY_BYTES)
    if not (content := receive(connection)):
        return
    setup = msgspec.msgpack.decode(content, type=Setup)
    try:
        vocabulary = load_grammar_tokenizer(Path(setup.model_dir), setup.end_token_ids)
    except CheckpointError as error:
        connection.sendall(_sent(Verdict(str(error))))
        return
    connection.sendall(_sent(Verdict()))
    threading.stack_size(STACK_BYTES)
    threading.excepthook = _end
    # One thread for all grammars: another could not begin once there is no memory left, and would be waited for.
    thread = threading.Thread(target=_serve, args=(connection, vocabulary, setup.cpu_seconds))
    thread.start()
    thread.join()


def _serve(connection: socket.socket, vocabulary: GrammarTokenizer, cpu_seconds: float) -> None:
    while message := receive(connection):
        connection.sendall(_answer(message, vocabulary, cpu_seconds))


def _answer(message: bytes, vocabulary: GrammarTokenizer, cpu_seconds: float) -> bytes:
    """Return the framed verdict on a grammar. The alarm's default action ends the process: no exception would stop the
    compiler."""
    grammar = msgspec.msgpack.decode(message, type=str)
    tokenizer = vocabulary.of(grammar)  # the first of its kind takes longer than most grammars
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    verdict = verdict_on(grammar, tokenizer)
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    return _sent(verdict)


def _end(error: threading.ExceptHookArgs) -> None:
    """End the process after an error in place of a verdict, as llguidance does when it gets no memory."""
    try:
        threading.__excepthook__(error)
    finally:
        os.abort()


def _sent(verdict: Verdict) -> bytes:
    return framed(msgspec.msgpack.encode(verdict))


if __name__ == "__main__":
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    main()
