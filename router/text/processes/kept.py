"""The router's side of a child process that is replaced whenever it ends."""

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from splitserve.router.text.processes.child import LENGTH, framed

START_SECONDS = 60.0  # of a process, on a machine that is busy with other starts
END_SECONDS = 1.0  # of a process whose connection is closed; then it is killed
RESTART_SECONDS = 1.0  # at least between two starts
MAX_RESTART_SECONDS = 60.0  # the time doubles up to this one while processes end before their first message

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Program:
    """A child process to run."""

    module: str  # the name of its main
    purpose: str  # its work, in log lines: "a process that ..."
    setup: bytes  # its first message, which it answers when it is ready


class KeptProcess:
    """One child process at a time, from :meth:`start` to :meth:`close`. For use on the event loop.

    ``on_message`` is called with the content of each message, ``on_end`` once a process has ended that had started.
    """

    def __init__(self, program: Program, on_message: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._program = program
        self._on_message = on_message
        self._on_end = on_end
        self._process: subprocess.Popen[bytes] | None = None
        self._link: _Link | None = None
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    def send(self, content: bytes) -> None:
        """Send a message to the process, which must be running."""
        assert self._link is not None and self._link.transport is not None
        self._link.transport.write(framed(content))

    def kill(self) -> None:
        """End the process, which is running: another takes its place. Messages that it has sent are dropped."""
        assert self._process is not None
        self._process.kill()
        if self._link is not None and self._link.transport is not None:
            self._link.transport.abort()

    def close(self) -> None:
        """End the process for good; nothing is called any more."""
        if self._keeper is not None:
            self._keeper.cancel()
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        pause = RESTART_SECONDS
        while True:
            started_at = loop.time()
            try:
                link = await self._spawn()
            except OSError as error:
                log.warning("can't start a process that %s: %s", self._program.purpose, error)
            else:
                either = (link.ready, link.ended)
                done, _ = await asyncio.wait(either, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    self.kill()
                await link.ended
                status = await self._reaped()
                log.warning(
                    "a process that %s ended with status %d: starting another one", self._program.purpose, status
                )
                pause = RESTART_SECONDS if link.ready.done() else min(2 * pause, MAX_RESTART_SECONDS)
            await asyncio.sleep(started_at + pause - loop.time())

    async def _spawn(self) -> "_Link":
        """Start a process; raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                command = [sys.executable, "-m", self._program.module]
                self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        except OSError:
            ours.close()
            raise
        link = self._link = _Link(self._program.setup, self._on_message, self._ended)
        await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
        return link

    def _ended(self) -> None:
        self._link = None
        self._on_end()

    async def _reaped(self) -> int:
        """Return the exit status of the process, whose connection is closed."""
        assert self._process is not None
        status = await asyncio.get_running_loop().run_in_executor(None, _wait, self._process)
        self._process = None
        return status


def _wait(process: "subprocess.Popen[bytes]") -> int:
    try:
        return process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


class _Link(asyncio.Protocol):
    """The connection to one process."""

    def __init__(self, setup: bytes, on_message: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self.transport: asyncio.Transport | None = None
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._setup = setup
        self._on_message = on_message
        self._on_end: Callable[[], None] | None = on_end
        self._received = bytearray()

    def close(self) -> None:
        """Close the connection without a call of ``on_end``."""
        self._on_end = None
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(framed(self._setup))

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            content = bytes(memoryview(self._received)[LENGTH.size : end])
            del self._received[:end]
            if not self.ready.done():
                self.ready.set_result(None)
            self._on_message(content)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self._on_end is not None:
            self._on_end()
            self.ended.set_result(None)
