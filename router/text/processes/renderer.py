"""Rendering of chat templates in child processes, so that no template can stop the event loop: a rendering that takes
too long is abandoned together with its process, which is replaced.
"""

import asyncio
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from splitserve.common.errors import CheckpointError, SplitserveError
from splitserve.router.text.chat_template import ChatTemplateError
from splitserve.router.text.processes import template_process
from splitserve.router.text.processes.kept import KeptProcess, Program
from splitserve.router.text.processes.template_process import Rendering, Reply, Setup

NUM_PROCESSES = 2
RENDER_SECONDS = 2.0  # thousands of times the usual duration
WAIT_SECONDS = 10.0  # for an idle process
START_SECONDS = 60.0  # of a process, on a machine that is busy with other starts
ALARM_SECONDS = 1.0  # beyond the time limit, a process ends itself
MAX_CHARS = 1 << 25  # of a rendered prompt

_encode = msgspec.msgpack.encode
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
    STARTING = enum.auto()  # or no process is running
    IDLE = enum.auto()
    BUSY = enum.auto()


class Renderer:
    """A few processes that render ``template`` (None for a model without one). For use on the event loop."""

    def __init__(self, template: TemplateSource | None, render_seconds: float = RENDER_SECONDS) -> None:
        self._template = template
        self._seconds = render_seconds
        self._children: list[_Child] = []
        self._idle: asyncio.LifoQueue[_Child] = asyncio.LifoQueue()
        self.variables: frozenset[str] = frozenset()  # those that the template reads, once it is compiled

    async def start(self) -> None:
        """Start the processes; raises :class:`CheckpointError` for a template that can't be compiled."""
        if self._template is None:
            return
        self._children = [_Child(self._template, self._seconds, self._idle.put_nowait) for _ in range(NUM_PROCESSES)]
        try:
            async with asyncio.timeout(START_SECONDS):
                replies = await asyncio.gather(*(child.start() for child in self._children))
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
        rendering = Rendering(list(messages), None if tools is None else list(tools), dict(variables or {}))
        try:
            request = msgspec.json.encode(rendering)
        except RecursionError:
            raise ChatTemplateError("the values for the chat template are nested too deeply") from None
        return await (await self._take()).render(request)

    def close(self) -> None:
        """End all processes. Renderings in flight fail."""
        for child in self._children:
            child.close()

    async def _take(self) -> "_Child":
        while not self._idle.empty():
            if (child := self._idle.get_nowait()).state is _State.IDLE:  # else its process ended
                return child
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while (child := await self._idle.get()).state is not _State.IDLE:
                    pass
        except TimeoutError:
            raise RendererBusyError("all processes that render chat templates are busy: try again") from None
        return child


class _Child:
    """One process at a time, with at most one rendering. ``on_idle`` is called when it becomes idle."""

    def __init__(self, template: TemplateSource, seconds: float, on_idle: Callable[["_Child"], None]) -> None:
        self.state = _State.STARTING
        setup = Setup(template.source, dict(template.special_tokens), MAX_CHARS, seconds + ALARM_SECONDS)
        program = Program(template_process.__name__, "renders chat templates", _encode(setup))
        self._process = KeptProcess(program, self._on_message, self._on_end)
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._on_idle = on_idle
        self._reply: asyncio.Future[Reply] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> Reply:
        """Start a process and return its reply to the template; raises :class:`ChatTemplateError`."""
        self._process.start()
        return await self._reply

    async def render(self, request: bytes) -> str:
        """Return the reply to an encoded request; raises :class:`ChatTemplateError`."""
        self.state = _State.BUSY
        self._reply = self._loop.create_future()
        self._timer = self._loop.call_later(self._seconds, self._give_up)
        self._process.send(request)
        return (await self._reply).text

    def close(self) -> None:
        self._process.close()
        self._stop_timer()

    def _on_message(self, content: bytes) -> None:
        reply = _replies.decode(content)
        self._stop_timer()
        if reply.error:
            self._fail(reply.error)
        elif not self._reply.done():  # else the request was cancelled
            self._reply.set_result(reply)
        self.state = _State.IDLE
        self._on_idle(self)

    def _on_end(self) -> None:
        self._stop_timer()
        at = "while it was compiled" if self.state is _State.STARTING else "at these messages"
        self.state = _State.STARTING
        self._fail(f"the chat template ended its process {at}: it takes too long, or too much memory")

    def _give_up(self) -> None:
        self._fail(f"the chat template took longer than {self._seconds:g} s for these messages")
        self._process.kill()

    def _fail(self, message: str) -> None:
        if not self._reply.done():
            self._reply.set_exception(ChatTemplateError(message))
            self._reply.exception()  # mark as retrieved: else asyncio logs it if no request waits for it any more

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
