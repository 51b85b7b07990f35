"""Main of a process that renders chat templates: ``python -m splitserve.router.text.template_process``. Only
:mod:`.renderer` starts it.

Standard input is a socket. Each message in either direction is msgpack preceded by four bytes of length. The first is a
:class:`Setup`, answered by a :class:`Reply` with the names of the template's variables, a line each; then comes one
:class:`Rendering` after the other, each answered by a Reply.
The process ends when the socket is closed, or by an alarm when a rendering takes far too long.
"""

import gc
import resource
import signal
import socket
import struct
from typing import Any

import msgspec

from splitserve.router.text.chat_template import ChatTemplate, ChatTemplateError

MAX_MEMORY_BYTES = 1 << 30
LENGTH = struct.Struct("<I")
_RECEIVE_BYTES = 1 << 18


class Setup(msgspec.Struct, frozen=True):
    """The template and its bounds."""

    source: str
    special_tokens: dict[str, str]
    max_chars: int
    seconds: float  # a longer rendering ends this process


class Rendering(msgspec.Struct, frozen=True, array_like=True):
    """A conversation to render."""

    messages: list[Any]
    tools: list[Any] | None = None
    variables: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """Answer to a Setup or to a rendering."""

    text: str = ""
    error: str = ""  # "": success


def framed(message: Any) -> bytes:
    content = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(content)) + content


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal's Ctrl-C is for the router, which ends its streams
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = socket.socket(fileno=0)
    setup = msgspec.msgpack.decode(_receive(connection), type=Setup)
    try:
        template = _compile(setup)
    except ChatTemplateError as error:
        connection.sendall(_failure(error))
        return
    connection.sendall(framed(Reply("\n".join(sorted(template.variables)))))
    gc.freeze()
    while message := _receive(connection):
        connection.sendall(_render(template, message, setup.seconds))


def _compile(setup: Setup) -> ChatTemplate:
    signal.setitimer(signal.ITIMER_REAL, setup.seconds)
    template = ChatTemplate(setup.source, setup.special_tokens, setup.max_chars)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    return template


def _render(template: ChatTemplate, message: bytes, seconds: float) -> bytes:
    """Return the framed :class:`Reply`. The alarm's default action ends the process: no exception would stop jinja2."""
    wanted = msgspec.msgpack.decode(message, type=Rendering)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return framed(Reply(template.render(wanted.messages, wanted.tools, wanted.variables)))
    except ChatTemplateError as error:
        return _failure(error)
    except UnicodeEncodeError:
        return framed(Reply(error="the chat template makes characters that aren't Unicode"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _failure(error: ChatTemplateError) -> bytes:
    return framed(Reply(error=str(error).encode("utf-8", "replace").decode()))


def _receive(connection: socket.socket) -> bytes:
    """Return the next message; b"" at the end."""
    data = bytearray()
    needed = LENGTH.size
    while len(data) < needed:
        piece = connection.recv(min(_RECEIVE_BYTES, needed - len(data)))
        if not piece:
            return b""
        data += piece
        if needed == LENGTH.size and len(data) >= needed:
            needed += LENGTH.unpack_from(data)[0]
    return bytes(data[LENGTH.size :])


if __name__ == "__main__":
    main()
