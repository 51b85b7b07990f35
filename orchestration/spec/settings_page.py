"""docs/reference/settings.md, made from the declarations of all settings.

``scripts/reference_pages.py`` writes it.
"""

import json
import types
import typing
from collections.abc import Iterator

from msgspec import NODEFAULT

from splitserve.orchestration.spec.cluster_spec import ClusterSpec
from splitserve.orchestration.spec.settings import SpecSetting, spec_settings
from splitserve.orchestration.spec.sizes import format_bytes
from splitserve.protocol.settings import choices_of, plain_types, range_words

_HEAD = """<!-- made by `python scripts/reference_pages.py`, not by hand -->

# Settings

Settings of a cluster by their location in its spec (`splitserve serve --spec FILE`), with the options of
`splitserve serve` and `splitserve up`, or of the command that is named, that set the same. `pools[]` stands for each
pool. What is below `engine` holds for all pools; a pool's own `engine` wins. `splitserve spec schema` prints a JSON
schema for editors, `splitserve spec show PATH ...` the spec that options stand for.
"""
_TYPES = {str: "text", int: "whole number", float: "number", bool: "true or false"}


def settings_page() -> str:
    """Return the page's Markdown: a table for each part of the document."""
    parts: dict[str, list[SpecSetting]] = {name: [] for name in ClusterSpec.__struct_fields__}
    for each in spec_settings():
        parts[each.location.partition(".")[0].removesuffix("[]")].append(each)
    return "\n".join([_HEAD, *(line for part, settings in parts.items() for line in _table(part, settings))])


def _table(part: str, settings: list[SpecSetting]) -> Iterator[str]:
    yield f"## {part}\n"
    yield "| setting | option | values | default | meaning |\n|---|---|---|---|---|"
    for each in settings:
        prefix = "" if each.setting.command == "serve" else f"{each.setting.command} "
        flags = ", ".join(f"`{prefix}{flag}`" for flag in each.setting.flags)
        yield f"| `{each.location}` | {flags} | {_values(each)} | {_default(each)} | {each.description} |"
    yield ""


def _values(each: SpecSetting) -> str:
    """Return the values that a setting takes, in words."""
    choices = each.setting.choices or choices_of(each.kind)
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    if _is_size(each):
        return "size"
    kind = next(plain for plain in plain_types(each.kind) if plain is not types.NoneType)
    words = {list: "list", dict: "mapping"}.get(typing.get_origin(kind)) or _TYPES[kind]
    return " ".join(filter(None, [words, range_words(each.meta)]))


def _is_size(each: SpecSetting) -> bool:
    """Return whether the document has bytes, or text like 512MiB, there."""
    return {int, str} <= set(plain_types(each.kind))


def _default(each: SpecSetting) -> str:
    if each.default is NODEFAULT:
        return "required"
    if each.default in (None, "", {}, []):
        return ""
    if _is_size(each) and each.default:
        return f"`{format_bytes(each.default).replace(' ', '')}`"
    if isinstance(each.default, float):
        return f"`{each.default:.10g}`"
    return f"`{each.default if isinstance(each.default, str) else json.dumps(each.default)}`"
