"""A cluster spec as a YAML document: read with errors that name the place, written, and its JSON schema.

Reading is strict: unknown and repeated keys are refused, nothing is guessed. Every error says where in the document
(``pools[1].count``, with the line), what is wrong, and what would be right.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import yaml

from splitserve.errors import ConfigError
from splitserve.orchestration.spec import ClusterSpec, SpecError
from splitserve.orchestration.spec_conversion import STEP, convert_spec

MAX_DOCUMENT_BYTES = 1 << 20


class _Loader(yaml.SafeLoader):
    """Without YAML's dates: nothing here is one, and what looks like one is text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as the base class has it
        letter: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def read_spec(path: str) -> ClusterSpec:
    """The spec in the file at ``path``. Raises :class:`ConfigError` with all that is wrong, one problem a line."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror or error}") from error
    if len(data) > MAX_DOCUMENT_BYTES:
        raise ConfigError(f"{path} has {len(data)} bytes; a cluster spec has at most {MAX_DOCUMENT_BYTES}")
    return parse_spec(data, path)


def parse_spec(text: str | bytes, source: str = "spec") -> ClusterSpec:
    """Like :func:`read_spec`, of a document's text; ``source`` is its name in errors."""
    root: yaml.Node | None = None
    try:
        root = _compose(text, source)
        problems = _repeated_keys(root, "")
        if problems:
            raise _located(problems, root, source)
        return convert_spec(yaml.load(text, _Loader))  # noqa: S506 - it is a safe loader
    except RecursionError:
        raise ConfigError(f"{source}: an alias that contains itself, or lists in lists without end") from None
    except SpecError as error:
        raise _located(error.problems, root, source) from None
    except (yaml.YAMLError, ValueError) as error:  # a tag that its value doesn't fit
        raise ConfigError(f"{source}: {' '.join(str(error).split())}") from None


def to_yaml(spec: ClusterSpec) -> str:
    """The document that gives ``spec``, without what is as by default."""
    document = msgspec.to_builtins(spec)
    text: str = yaml.safe_dump(_without_empty(document), sort_keys=False, allow_unicode=True)
    return text


def json_schema() -> dict[str, Any]:
    """JSON schema of the document, made of the structs."""
    schema = msgspec.json.schema(ClusterSpec)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Splitserve cluster", **schema}


def schema_text() -> str:
    """:func:`json_schema` as it is shipped in ``docs/cluster-spec.schema.json``."""
    return json.dumps(json_schema(), indent=2, sort_keys=True) + "\n"


def _compose(text: str | bytes, source: str) -> yaml.Node | None:
    """The document as nodes, which know their lines."""
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


def _repeated_keys(node: yaml.Node | None, place: str) -> list[tuple[str, str]]:
    """YAML itself would take the last one."""
    problems = []
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = f"{place}.{key.value}".lstrip(".")
            if name in seen:
                problems.append((name, "is there twice; keep one"))
            seen.add(name)
            problems += _repeated_keys(value, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            problems += _repeated_keys(value, f"{place}[{index}]")
    return problems


def _located(problems: list[tuple[str, str]], root: yaml.Node | None, source: str) -> ConfigError:
    lines = [
        f"{source}:{_line_of(root, place)}: {place}{': ' if place else ''}{text}"
        for place, text in dict(problems).items()
    ]
    return ConfigError("\n".join(lines))


def _line_of(node: yaml.Node | None, place: str) -> int:
    """Line of ``place``, or of the innermost part of it that is there; from 1 on."""
    line = 1
    for name, index in STEP.findall(place):
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
