"""Main of a process that renders chat templates: ``python -m splitserve.router.text.processes.template_process``. Only
:mod:`.renderer` starts it.

The messages (:mod:`.child`) are msgpack, but renderings are JSON, which holds whole numbers of any size. The first is a
:class:`Setup`, answered by a :class:`Reply` with the names of the template's variables, a line each; then comes one
:class:`Rendering` after the other, each answered by a Reply. An alarm ends the process when a rendering takes far too
long.
"""

import gc
import signal
from typing import Any

import msgspec

from splitserve.router.text.chat_template import ChatTemplate, ChatTemplateError
from splitserve.router.text.processes.child import connect, framed, receive

MAX_MEMORY_BYTES = 1 << 30


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


def main() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    connection = connect(MAX_MEMORY_BYTES)
    if not (content := receive(connection)):
        return
    setup = msgspec.msgpack.decode(content, type=Setup)
    try:
        template = _compile(setup)
    except ChatTemplateError as error:
        connection.sendall(_failure(error))
        return
    connection.sendall(_sent(Reply("\n".join(sorted(template.variables)))))
    gc.freeze()
    while message := receive(connection):
        connection.sendall(_render(template, message, setup.seconds))


def _compile(setup: Setup) -> ChatTemplate:
    signal.setitimer(signal.ITIMER_REAL, setup.seconds)
    template = ChatTemplate(setup.source, setup.special_tokens, setup.max_chars)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    return template


def _render(template: ChatTemplate, message: bytes, seconds: float) -> bytes:
    """Return the framed :class:`Reply`. The alarm's default action ends the process: no exception would stop jinja2."""
    wanted = msgspec.json.decode(message, type=Rendering)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return _sent(Reply(template.render(wanted.messages, wanted.tools, wanted.variables)))
    except ChatTemplateError as error:
        return _failure(error)
    except UnicodeEncodeError:
        return _sent(Reply(error="the chat template makes characters that aren't Unicode"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _failure(error: ChatTemplateError) -> bytes:
    return _sent(Reply(error=str(error).encode("utf-8", "replace").decode()))


def _sent(reply: Reply) -> bytes:
    return framed(msgspec.msgpack.encode(reply))


if __name__ == "__main__":
    main()
