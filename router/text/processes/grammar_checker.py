"""Checks of grammars in a child process before any work is done for their requests: a grammar that takes too much time
or memory ends that process alone. Verdicts are kept, so that a grammar in use is compiled once.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from splitserve.common.errors import SplitserveError
from splitserve.router.text.grammars import GrammarError
from splitserve.router.text.processes import grammar_process
from splitserve.router.text.processes.child import LENGTH, framed
from splitserve.router.text.processes.grammar_process import Setup, Verdict

CPU_SECONDS = 1.0  # a hundred times the usual duration
CHECK_SECONDS = 10.0  # by the clock, on a busy machine
START_SECONDS = 60.0  # of the process, which reads the vocabulary
WAIT_SECONDS = 10.0  # for the process
MAX_VERDICTS = 256
MAX_REPLY_BYTES = 1 << 20
_ENDS_BY_GRAMMARS = {-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV}
"""Exit statuses of a process whose grammar took too much time, memory or stack; one that the machine interrupted has
another."""
_ONE_THREAD = {"RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}

log = logging.getLogger(__name__)
_verdicts = msgspec.msgpack.Decoder(Verdict)


class CheckerBusyError(SplitserveError):
    """The process is busy with other grammars, was interrupted, or can't be started now."""


class GrammarChecker:
    """One process, started by the first grammar, which compiles grammars for the tokenizer in ``model_dir``."""

    def __init__(self, model_dir: Path, end_token_ids: Sequence[int], cpu_seconds: float = CPU_SECONDS) -> None:
        self._setup = Setup(str(model_dir), list(end_token_ids), cpu_seconds)
        self._child: _Child | None = None
        self._lock = asyncio.Lock()
        self._known: OrderedDict[str, str] = OrderedDict()  # errors by grammar, "" for none; least recently used first

    async def check(self, grammar: str) -> None:
        """Raise :class:`GrammarError` if the grammar can't be used, :class:`CheckerBusyError` if that isn't known."""
        error = self._known.get(grammar)
        if error is None:
            try:
                async with asyncio.timeout(WAIT_SECONDS):
                    await self._lock.acquire()
            except TimeoutError:
                raise CheckerBusyError("grammars of other requests are being compiled: try again") from None
            try:
                error = self._known.get(grammar)
                if error is None:
                    error = self._known[grammar] = await self._compile(grammar)
            finally:
                self._lock.release()
        self._known.move_to_end(grammar)
        if len(self._known) > MAX_VERDICTS:
            self._known.popitem(last=False)
        if error:
            raise GrammarError(error)

    def close(self) -> None:
        """End the process. Checks in flight fail."""
        child, self._child = self._child, None
        if child is not None:
            child.process.kill()
            child.process.wait()
            child.writer.transport.abort()

    async def _compile(self, grammar: str) -> str:
        """Return the reason why a grammar can't be used, or "". The process ends with an exchange that isn't over."""
        try:
            async with asyncio.timeout(START_SECONDS):
                child = await self._started()
        except (TimeoutError, OSError, EOFError) as error:
            self.close()
            raise CheckerBusyError(
                f"the compiler of grammars can't be started: {error or 'it takes too long'}"
            ) from None
        except BaseException:
            self.close()
            raise
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                return await child.exchange(grammar)
        except (TimeoutError, OSError, EOFError):
            self.close()
            status = child.process.returncode
            log.warning(
                "the process that compiled a grammar of %d characters ended with status %d", len(grammar), status
            )
            if status not in _ENDS_BY_GRAMMARS:
                raise CheckerBusyError("the compilation of the grammar was interrupted: try again") from None
            return f"it takes more than {self._setup.cpu_seconds:g} s, or too much memory, to compile"
        except BaseException:
            self.close()
            raise

    async def _started(self) -> "_Child":
        """Return the running process. Raises :class:`GrammarError` for a tokenizer that can't be used, OSError,
        EOFError."""
        if self._child is not None and self._child.process.poll() is None:
            return self._child
        self.close()
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", grammar_process.__name__]
            process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env={**os.environ, **_ONE_THREAD}
            )
        child = self._child = _Child(process, *await asyncio.open_connection(sock=ours))
        if error := await child.exchange(self._setup):
            raise GrammarError(error)
        return child


@dataclass(frozen=True, slots=True)
class _Child:
    """The process, and the socket that is its standard input."""

    process: "subprocess.Popen[bytes]"
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def exchange(self, message: Setup | str) -> str:
        """Send a message and return the error of its verdict. Raises OSError, EOFError if the process ends."""
        self.writer.write(framed(msgspec.msgpack.encode(message)))
        await self.writer.drain()
        (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
        if length > MAX_REPLY_BYTES:
            raise EOFError("a verdict is too long")
        return _verdicts.decode(await self.reader.readexactly(length)).error
