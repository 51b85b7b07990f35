"""Rendering of chat templates in child processes, so that no template can stop the event loop: a rendering that takes
too long is abandoned together with its process, which is replaced.
"""

import asyncio
import enum
import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from splitserve.common.errors import CheckpointError, SplitserveError
from splitserve.router.text import template_process
from splitserve.router.text.chat_template import ChatTemplateError
from splitserve.router.text.template_process import LENGTH, Rendering, Reply, Setup, framed

NUM_PROCESSES = 2
RENDER_SECONDS = 2.0  # thousands of times the usual duration
WAIT_SECONDS = 10.0  # for an idle process
START_SECONDS = 60.0  # of a process, on a machine that is busy with other starts
ALARM_SECONDS = 1.0  # beyond the time limit, a process ends itself
RESTART_SECONDS = 1.0  # after a process that ended before it was ready
MAX_CHARS = 1 << 25  # of a rendered prompt

log = logging.getLogger(__name__)
_replies = msgspec.msgpack.Decoder(Reply)


class RendererBusyError(SplitserveError):
    """No process became idle in time."""


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """A chat template and the special tokens that it may use."""

    source: str
    special_tokens: Mapping[str, str]
    where: str  # its name in errors


class _State(enum.Enum):
    STARTING = enum.auto()
    IDLE = enum.auto()
    BUSY = enum.auto()
    ENDED = enum.auto()


class Renderer:
    """A few processes that render ``template`` (None for a model without one). For use on the event loop."""

    def __init__(self, template: TemplateSource | None, render_seconds: float = RENDER_SECONDS) -> None:
        self._template = template
        self._seconds = render_seconds
        self._children: set[_Child] = set()
        self._idle: asyncio.LifoQueue[_Child] = asyncio.LifoQueue()
        self._restarts: set[asyncio.Task[None]] = set()
        self.variables: frozenset[str] = frozenset()  # those that the template reads, once it is compiled

    async def start(self) -> None:
        """Start the processes; raises :class:`CheckpointError` for a template that can't be compiled."""
        if self._template is None:
            return
        children = [await self._spawn(self._template) for _ in range(NUM_PROCESSES)]
        try:
            async with asyncio.timeout(START_SECONDS):
                replies = await asyncio.gather(*(child.ready for child in children))
        except TimeoutError:
            message = f"{self._template.where} wasn't ready to be rendered within {START_SECONDS:g} s"
            raise CheckpointError(message) from None
        except ChatTemplateError as error:
            raise CheckpointError(f"{self._template.where} {error}") from error
        self.variables = frozenset(replies[0].text.split())

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a conversation, to be encoded without special tokens.

        Raises :class:`ChatTemplateError`, and :class:`RendererBusyError` if all processes stay busy too long.
        """
        if self._template is None:
            raise ChatTemplateError("this model has no chat template: use /v1/completions")
        request = framed(Rendering(list(messages), None if tools is None else list(tools), dict(variables or {})))
        return await (await self._take()).render(request)

    def close(self) -> None:
        """End all processes. Renderings in flight fail."""
        for task in self._restarts:
            task.cancel()
        children, self._children = self._children, set()
        for child in children:
            child.close()

    async def _take(self) -> "_Child":
        while not self._idle.empty():
            if (child := self._idle.get_nowait()).state is _State.IDLE:  # else it ended while it was idle
                return child
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while (child := await self._idle.get()).state is not _State.IDLE:
                    pass
        except TimeoutError:
            raise RendererBusyError("all processes that render chat templates are busy: try again") from None
        return child

    async def _spawn(self, template: TemplateSource) -> "_Child":
        """Start a process; raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", template_process.__name__]
            process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        child = _Child(process, self._seconds, self._on_change)
        self._children.add(child)
        transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: child, sock=ours)
        child.set_up(
            transport, Setup(template.source, dict(template.special_tokens), MAX_CHARS, self._seconds + ALARM_SECONDS)
        )
        return child

    def _on_change(self, child: "_Child") -> None:
        if child.state is _State.IDLE:
            self._idle.put_nowait(child)
        elif child in self._children:
            self._children.remove(child)
            task = asyncio.get_running_loop().create_task(self._replace(child))
            self._restarts.add(task)
            task.add_done_callback(self._restarts.discard)

    async def _replace(self, ended: "_Child") -> None:
        """Reap ``ended`` and start another process; retry until one has started."""
        assert self._template is not None
        try:
            status = await asyncio.get_running_loop().run_in_executor(None, ended.process.wait)
        finally:  # it was killed: this takes no time
            ended.process.wait()
        log.warning("a process that renders chat templates ended with status %d: starting another one", status)
        if not ended.ready.done() or ended.ready.exception() is not None:
            await asyncio.sleep(RESTART_SECONDS)
        while True:
            try:
                await self._spawn(self._template)
                return
            except OSError as error:
                log.warning("can't start a process that renders chat templates: %s", error)
                await asyncio.sleep(RESTART_SECONDS)


class _Child(asyncio.Protocol):
    """One process, with at most one rendering at a time. ``on_change`` is called on the states IDLE and ENDED."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", seconds: float, on_change: Callable[["_Child"], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.process = process
        self.state = _State.STARTING
        self.ready: asyncio.Future[Reply] = loop.create_future()
        self._loop = loop
        self._seconds = seconds
        self._on_change = on_change
        self._reply = self.ready
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._timer: asyncio.TimerHandle | None = None

    def set_up(self, transport: asyncio.Transport, setup: Setup) -> None:
        self._transport = transport
        transport.write(framed(setup))

    async def render(self, request: bytes) -> str:
        """Return the reply to an encoded request; raises :class:`ChatTemplateError`."""
        self.state = _State.BUSY
        self._reply = self._loop.create_future()
        self._timer = self._loop.call_later(self._seconds, self._give_up)
        assert self._transport is not None
        self._transport.write(request)
        return (await self._reply).text

    def close(self) -> None:
        self._on_change = _ignore
        self.process.kill()
        self.process.wait()
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = LENGTH.size + (LENGTH.unpack_from(self._received)[0] if len(self._received) >= LENGTH.size else 0)
        if end == LENGTH.size or len(self._received) < end:
            return
        reply = _replies.decode(memoryview(self._received)[LENGTH.size : end])
        self._received = bytearray()
        if self._timer is not None:
            self._timer.cancel()
        self.state = _State.IDLE
        if reply.error:
            self._fail(reply.error)
        elif not self._reply.done():  # else the request was cancelled
            self._reply.set_result(reply)
        self._on_change(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self._timer is not None:
            self._timer.cancel()
        was_starting = self.state is _State.STARTING
        self.state = _State.ENDED
        at = "while it was compiled" if was_starting else "at these messages"
        self._fail(f"the chat template ended its process {at}: it takes too long, or too much memory")
        self.process.kill()
        self._on_change(self)

    def _give_up(self) -> None:
        self._fail(f"the chat template took longer than {self._seconds:g} s for these messages")
        self.process.kill()

    def _fail(self, message: str) -> None:
        if not self._reply.done():
            self._reply.set_exception(ChatTemplateError(message))
            self._reply.exception()  # mark as retrieved: else asyncio logs it if no request waits for it any more


def _ignore(_child: _Child) -> None:
    pass
