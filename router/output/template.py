"""Response templates: data that says where reasoning, tool calls and content are in a model's output.

A template is a JSON file: transformers' response template, and beside it what transformers' format has no place for.
"""

from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from splitserve.common.errors import CheckpointError, ConfigError
from splitserve.common.model_files import read_text

MAX_FILE_BYTES = 1 << 18

ArgumentsForm: TypeAlias = Literal["object", "text"]


class ForcedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The text of calls as the model writes them, from which grammars for ``tool_choice`` are made.

    In ``call``, ``{name}``, ``{number}`` and ``{arguments}`` stand for their values; in ``tag``, ``{key}`` and
    ``{value}``. Arguments are tags if there is a ``tag``, else JSON.
    """

    call: str
    begin: str = ""  # before the first call
    separator: str | None = None  # between calls; None: there is one call only
    end: str = ""  # after the last call
    tag: str = ""
    answer_begin: str = ""  # before an answer that calls nothing
    reasoning_open: str = ""  # "": the model doesn't reason
    reasoning_close: str = ""


class TemplateFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file."""

    name: str
    response_template: dict[str, Any]  # as transformers reads it
    about: str = ""
    # Texts that a chat template must hold for the file to be chosen: all of one of these lists.
    chat_template_has: tuple[tuple[str, ...], ...] = ()
    call_ids: Literal["call", "short", "function"] = "call"
    arguments_in_prompt: ArgumentsForm = "object"  # the form in which the chat template reads arguments
    null_content: bool = False  # it distinguishes content that is null; others read text only
    reasoning_in_prompt: str = "reasoning_content"  # the field in which it reads earlier reasoning
    forced_call: ForcedCall | None = None  # None: a call can't be forced

    def fits(self, chat_template: str) -> bool:
        return any(all(text in chat_template for text in texts) for texts in self.chat_template_has)


def read_template(path: Path) -> TemplateFile:
    """Return the template in a file: one of ours, or a bare one of transformers'. Raises :class:`ConfigError`."""
    try:
        content = read_text(path, MAX_FILE_BYTES)
    except (OSError, CheckpointError) as error:
        raise ConfigError(f"response template {path} can't be read: {error}") from error
    return parse_template(content, str(path))


def parse_template(content: str | bytes, where: str) -> TemplateFile:
    """Return the template in a file's content; ``where`` is its name in errors. Raises :class:`ConfigError`."""
    try:
        document = msgspec.json.decode(content)
        if isinstance(document, dict) and "fields" in document:
            document = {"name": Path(where).stem, "response_template": document}
        return msgspec.convert(document, TemplateFile)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is no response template: {error}") from error
