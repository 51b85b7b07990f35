"""A model's chat template in a sandboxed jinja2. It runs in a process of its own (:mod:`.template_process`), since a
template may run for ever or take all memory.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from splitserve.common.errors import SplitserveError

_MAX_ERROR_CHARS = 500


class ChatTemplateError(SplitserveError):
    """A conversation that the model's chat template doesn't accept, or a model without a usable template."""


class ChatTemplate:
    """A template compiled from ``source``; it renders at most ``max_chars``. Raises :class:`ChatTemplateError`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], max_chars: int) -> None:
        self._special_tokens = special_tokens
        self._max_chars = max_chars
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except Exception as error:  # compiling evaluates constant expressions, which may raise anything
            raise ChatTemplateError(f"can't be compiled: {_described(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a conversation, up to the beginning of the assistant's answer.

        ``variables`` are further ones of the template; those that every template has can't be among them.
        """
        given = {"documents": None, **(variables or {}), **self._special_tokens}
        given |= {"messages": messages, "tools": tools, "add_generation_prompt": True}
        pieces, num_chars = [], 0
        try:
            for piece in self._template.generate(**given):
                num_chars += len(piece)
                if num_chars > self._max_chars:
                    break
                pieces.append(piece)
        except Exception as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {_described(error)}") from error
        if num_chars > self._max_chars:
            raise ChatTemplateError(f"the chat template makes more than {self._max_chars} characters of these messages")
        return "".join(pieces)


def _described(error: Exception) -> str:
    text = str(error)[:_MAX_ERROR_CHARS]
    return text if isinstance(error, jinja2.TemplateError) and text else f"{type(error).__name__}: {text}"


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """The tag ``{% generation %}...{% endgeneration %}``, which marks text for training; here its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
