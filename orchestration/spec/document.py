"""Cluster specs as YAML documents: reading, with errors that name the location; writing; the JSON schema.

Reading is strict: unknown and repeated keys are refused, nothing is guessed. Every error names the location
(``pools[1].count``, with the line), the fault, and the remedy.
"""

import json
from collections.abc import Callable
from inspect import cleandoc
from typing import Any

import msgspec
import yaml

from splitserve.common.errors import ConfigError
from splitserve.orchestration.spec.cluster_spec import ClusterSpec, SpecError
from splitserve.orchestration.spec.conversion import STEP, convert_spec, may_follow
from splitserve.orchestration.spec.small_files import read_small_file

MAX_DOCUMENT_BYTES = 256 << 10
MAX_NODES = 5_000
MAX_DEPTH = 32
MAX_SCALAR_CHARACTERS = 4096
"""Bounds of a document with its aliases expanded: nested aliases may stand for billions of values."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader without dates: a spec has none, and text that looks like a date stays text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as the base class has it
        letter: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


Problems = list[tuple[str, str]]
"""Locations in the document, each with a message."""


def read_spec(path: str, further: Callable[[ClusterSpec], Problems] | None = None) -> ClusterSpec:
    """Read the spec in the file at ``path``. Raises :class:`ConfigError` with all problems, one per line.

    ``further`` checks for problems beyond the document itself; it is called even if the document has some.
    """
    return parse_spec(read_small_file(path, MAX_DOCUMENT_BYTES), path, further)


def parse_spec(
    text: str | bytes, source: str = "spec", further: Callable[[ClusterSpec], Problems] | None = None
) -> ClusterSpec:
    """Parse a document's text as :func:`read_spec` does; ``source`` is its name in errors."""
    _check_extent(text, source)
    root = _compose(text, source)
    problems = _repeated_keys(root, "")
    spec: ClusterSpec | None
    try:
        spec = convert_spec(yaml.load(text, _Loader))  # noqa: S506 - it is a safe loader
    except SpecError as error:
        problems += error.problems
        spec = error.repaired
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a value that doesn't fit its tag
        raise ConfigError(f"{source}: {' '.join(str(error).split())}") from None
    if further is not None and spec is not None:
        known = [location for location, _ in problems]
        problems += [each for each in further(spec) if not may_follow(each[0], known)]
    if problems:
        raise _located(problems, root, source)
    assert spec is not None
    return spec


def to_yaml(spec: ClusterSpec) -> str:
    """Return the document of ``spec``, without default values."""
    document = msgspec.to_builtins(spec)
    text: str = yaml.safe_dump(_without_empty(document), sort_keys=False, allow_unicode=True)
    return text


def json_schema() -> dict[str, Any]:
    """Return the document's JSON schema, made from the structs."""
    schema = _with_plain_descriptions(msgspec.json.schema(ClusterSpec))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Splitserve cluster", **schema}


def _with_plain_descriptions(node: Any) -> Any:
    """Return a schema whose descriptions have no indentation of docstrings, which msgspec keeps before 0.23."""
    if isinstance(node, list):
        return [_with_plain_descriptions(each) for each in node]
    if not isinstance(node, dict):
        return node
    return {
        name: cleandoc(each) if name == "description" and isinstance(each, str) else _with_plain_descriptions(each)
        for name, each in node.items()
    }


def schema_text() -> str:
    """Return :func:`json_schema` as text, as in ``docs/reference/cluster-spec.schema.json``."""
    return json.dumps(json_schema(), indent=2, sort_keys=True) + "\n"


def _check_extent(text: str | bytes, source: str) -> None:
    """Raise :class:`ConfigError` for a document beyond the bounds, before any object is built from it.

    An alias counts as the nodes and depth that it stands for.
    """
    sizes: dict[str, tuple[int, int]] = {}  # by anchor: nodes and levels
    opened: list[list[Any]] = [["", 0, 0]]  # open collections: anchor, nodes, levels below
    try:
        for event in yaml.parse(text, _Loader):
            line = _line(event)
            if isinstance(event, yaml.CollectionStartEvent):
                opened.append([event.anchor, 1, 1])
            elif isinstance(event, yaml.AliasEvent) and event.anchor in [anchor for anchor, _, _ in opened]:
                raise ConfigError(f"{source}:{line}: the alias {event.anchor} contains itself")
            elif isinstance(event, yaml.AliasEvent) and event.anchor not in sizes:
                return  # composing reports that there is no such anchor
            elif isinstance(event, yaml.AliasEvent):
                _add(opened[-1], *sizes[event.anchor or ""])
            elif isinstance(event, yaml.ScalarEvent):
                if len(event.value) > MAX_SCALAR_CHARACTERS:
                    raise ConfigError(f"{source}:{line}: a value has at most {MAX_SCALAR_CHARACTERS} characters")
                _add(opened[-1], 1, 0)
                sizes |= {event.anchor: (1, 0)} if event.anchor else {}
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, nodes, levels = opened.pop()
                _add(opened[-1], nodes, levels)
                sizes |= {anchor: (nodes, levels)} if anchor else {}
            if sum(nodes for _, nodes, _ in opened) > MAX_NODES:
                raise ConfigError(
                    f"{source}:{line}: a cluster spec has at most {MAX_NODES} values, aliases written out"
                )
            if len(opened) - 1 + opened[-1][2] > MAX_DEPTH:
                raise ConfigError(f"{source}:{line}: a cluster spec has at most {MAX_DEPTH} levels")
    except yaml.YAMLError:
        return  # composing reports the fault


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1


def _add(collection: list[Any], nodes: int, levels: int) -> None:
    collection[1] += nodes
    collection[2] = max(collection[2], levels + 1 if levels else 0)


def _compose(text: str | bytes, source: str) -> yaml.Node | None:
    """Return the document as nodes, which carry their line numbers."""
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{source}{line}: this isn't YAML: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: this isn't YAML: {' '.join(str(error).split())}") from None
    if node is None:
        raise ConfigError(f"{source} is empty; `splitserve spec show MODEL --prefill 1 --decode 1` prints an example")
    return node


def _repeated_keys(node: yaml.Node | None, location: str) -> list[tuple[str, str]]:
    """Return the repeated keys; YAML itself would silently take the last one."""
    problems = []
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = f"{location}.{key.value}".lstrip(".")
            if name in seen:
                problems.append((name, "is there twice; keep one"))
            seen.add(name)
            problems += _repeated_keys(value, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            problems += _repeated_keys(value, f"{location}[{index}]")
    return problems


def _located(problems: list[tuple[str, str]], root: yaml.Node | None, source: str) -> ConfigError:
    """Return one error with all problems, in the order of their lines."""
    lines = sorted((_line_of(root, location), location, text) for location, text in dict.fromkeys(problems))
    shown = [f"{source}:{line}: {location}{': ' if location else ''}{text}" for line, location, text in lines]
    return ConfigError("\n".join(shown))


def _line_of(node: yaml.Node | None, location: str) -> int:
    """Return the line of ``location``, or of the innermost present part of it; lines count from 1."""
    line = 1
    for name, index in STEP.findall(location):
        if isinstance(node, yaml.MappingNode) and name:
            found = [(key, value) for key, value in node.value if key.value == name]
            if not found:
                break
            key, node = found[-1]
            line = key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and index and int(index) < len(node.value):
            node = node.value[int(index)]
            line = node.start_mark.line + 1
        else:
            break
    return line


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {name: _without_empty(part) for name, part in value.items()}
        return {name: part for name, part in kept.items() if part not in ({}, [])}
    return [_without_empty(part) for part in value] if isinstance(value, list) else value
