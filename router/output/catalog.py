"""The choice of a response template: by option, the checkpoint's own, or the one that fits the chat template."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from splitserve.common.errors import CheckpointError, ConfigError
from splitserve.router.output.template import TemplateFile, parse_template, read_template

if TYPE_CHECKING:
    from splitserve.router.output.segments import Segmentation

AUTO = "auto"
NONE = "none"
TOOL_CALLS = "tool_calls"
REASONING_FIELDS = frozenset({"reasoning_content", "reasoning", "thinking"})

# In the order in which they are tried: what fits fewer models comes first.
NAMES = (
    "gpt-oss",
    "kimi-k2",
    "deepseek-v3",
    "deepseek-v3.1",
    "glm-4.5",
    "qwen3.5",
    "qwen3",
    "hermes",
    "mistral-args",
    "mistral",
    "gemma4",
    "functiongemma",
    "llama3",
)


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """A chosen template, ready for use. ``where`` names it in the log."""

    file: TemplateFile
    where: str
    with_tools: "Segmentation"
    without_tools: "Segmentation"

    @property
    def has_reasoning(self) -> bool:
        return bool(REASONING_FIELDS & set(self.with_tools.fields))

    @property
    def has_tools(self) -> bool:
        return TOOL_CALLS in self.with_tools.fields


@cache
def bundled(name: str) -> TemplateFile:
    """Return one of the templates that come with the router."""
    file = resources.files("splitserve.router.output").joinpath("templates", f"{name}.json")
    return parse_template(file.read_bytes(), name)


def choose_format(
    option: str, chat_template: str | None, own: Mapping[str, Any] | None, model: str
) -> ResponseFormat | None:
    """Return the format of a model's output; None if nothing is known of it, and for a model without a chat template.

    ``option`` is a name of :data:`NAMES`, a file, "auto" or "none". ``own`` is the checkpoint's template, in the format
    of transformers. Raises :class:`ConfigError` for an unusable option, :class:`CheckpointError` for an unusable own
    template.
    """
    if option == NONE or (chat_template is None and option == AUTO):
        return None
    if option != AUTO:
        return _loaded(*_named(option), ConfigError)
    fitting = next((name for name in NAMES if bundled(name).fits(chat_template or "")), None)
    if own is None:
        return None if fitting is None else _loaded(bundled(fitting), fitting, ConfigError)
    # What transformers' format has no place for comes from the template that would fit.
    file = bundled(fitting) if fitting is not None else TemplateFile("own", {})
    file = msgspec.structs.replace(file, name="own", response_template=dict(own))
    return _loaded(file, f"the one of {model}", CheckpointError)


def _named(option: str) -> tuple[TemplateFile, str]:
    if option in NAMES:
        return bundled(option), option
    path = Path(option)
    if not path.is_file():
        message = f"response template {option!r} is neither a file nor one of {', '.join((AUTO, NONE, *NAMES))}"
        raise ConfigError(message)
    return read_template(path), option


def _loaded(file: TemplateFile, where: str, kind: type[ConfigError] | type[CheckpointError]) -> ResponseFormat:
    # Imported here, since it takes a third of a second, and models without a template don't need it.
    from splitserve.router.output.segments import Segmentation

    try:
        with_tools = Segmentation(file.response_template)
        has_others = set(with_tools.fields) != {TOOL_CALLS}
        without_tools = Segmentation(file.response_template, without=(TOOL_CALLS,)) if has_others else with_tools
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise kind(f"the response template ({where}) can't be used: {error}") from error
    return ResponseFormat(file, where, with_tools, without_tools)
