"""docs/reference/overview.md, made from the declarations of the overview.

``scripts/reference_pages.py`` writes it.
"""

import inspect
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from splitserve.protocol import cluster_report
from splitserve.protocol.reports import overview

_HEAD = """<!-- made by `python scripts/reference_pages.py`, not by hand -->

# Overview

`GET /admin/overview` answers with one JSON object, `Overview`: the running cluster over the last half minute, and the
bottleneck that it shows. The page `/dashboard`, `splitserve top` and `splitserve doctor --against URL` show it. It
needs the cluster's admin key, or its API key if it has no admin key. However often it is asked for, one is made per
second. Durations are in seconds.
"""
_COMMENT = re.compile(r"^    (\w+): .*?  # (.+)$", re.MULTILINE)


def overview_page() -> str:
    """Return the page's Markdown."""
    own = [each for _, each in inspect.getmembers(overview, _is_struct) if each.__module__ == overview.__name__]
    ordered = [overview.Overview, *(each for each in own if each is not overview.Overview)]
    names = ("RequestRates", "RequestTrace", "TraceSpan", "RequestSummary")
    shared = [getattr(cluster_report, name) for name in names]
    return "\n".join([_HEAD, *(line for each in (*ordered, *shared) for line in _table(each))])


def _is_struct(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, msgspec.Struct)


def _table(struct: type[msgspec.Struct]) -> Iterator[str]:
    yield f"## {struct.__name__}\n"
    yield f"{' '.join((struct.__doc__ or '').replace('``', '`').split())}\n"
    yield "| field | type | meaning |\n|---|---|---|"
    hints: dict[str, Any] = typing.get_type_hints(struct, include_extras=True)
    comments = dict(_COMMENT.findall(inspect.getsource(struct)))
    for name in struct.__struct_fields__:
        meaning = _description(hints[name]) or comments.get(name, "")
        yield f"| `{name}` | {_type(hints[name])} | {meaning} |"
    yield ""


def _description(hint: Any) -> str:
    for each in getattr(hint, "__metadata__", ()):
        if isinstance(each, msgspec.Meta) and each.description:
            return str(each.description)
    return ""


def _type(hint: Any) -> str:
    """Return a type for people."""
    if hasattr(hint, "__metadata__"):
        return _type(hint.__origin__)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"{_type(arguments[1])} by {_type(arguments[0])}"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type(each) for each in arguments)
    if _is_struct(hint):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    return {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null"}[hint]
