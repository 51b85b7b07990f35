"""Writes the pages of docs/reference/ that follow from the code: CLI, spec, settings, HTTP API, metrics, spans, log
lines; and the modules with the types of the Python interface's keyword arguments.

``python scripts/reference_pages.py`` writes them anew; with ``--check`` the exit status tells whether they are up to
date. Figures and texts come from argparse, from the schema of cluster specs, from the declarations of settings and
metrics, and from the OpenAPI document.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from log_page import logs_page

from splitserve.models.catalogue import architectures
from splitserve.orchestration.cli.main import BENCHES, TOOLS, build_parser
from splitserve.orchestration.python.declarations import parameters_module, settings_module
from splitserve.orchestration.spec.document import json_schema, schema_text
from splitserve.orchestration.spec.settings_page import settings_page
from splitserve.orchestration.spec.sizes import format_bytes
from splitserve.router.admin.metrics_page import metrics_page
from splitserve.router.admin.overview.reference import overview_page
from splitserve.router.http.openapi import ERRORS, openapi_document
from splitserve.router.requests.timeline.spans_page import spans_page

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
KEYWORDS = FOLDER.parents[1] / "orchestration" / "python"
COMMAND = "python scripts/reference_pages.py"
NOTE = f"<!-- made by `{COMMAND}`, not by hand -->"
SHARED_GROUPS = ("workers", "endpoint", "engine", "KV memory", "KV beyond a worker's own memory")
METHODS = ("get", "post", "put", "delete")

Schema = dict[str, Any]


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def sentence(text: str) -> str:
    """``text`` as a Markdown sentence: a capital letter unless it begins with a value's name, a full stop."""
    text = re.sub(r"; :\w+:`[^`]*`.*", "", text.strip()).replace("*", r"\*")
    if not re.match(r"[\w.-]+:", text):
        text = text[:1].upper() + text[1:]
    return text if not text or text.endswith((".", "!", "?", "`")) else f"{text}."


# ---- command line ----


def cli_page() -> str:
    commands = dict(_commands(build_parser()))
    parts = [
        NOTE,
        "# Command line",
        "`splitserve COMMAND --help` shows the same. SIZE is written like `512MiB`, `2GB`, `1.5g`, or in bytes. "
        "Exit status: 0 success, 1 failure, 2 wrong arguments or a wrong set-up.",
        table(
            ("command", "purpose"), [(f"[`{name}`](#{_anchor(name)})", text) for name, (_, text) in commands.items()]
        ),
        *(_command_section(name, parser) for name, (parser, _) in commands.items() if name not in ("bench", *TOOLS)),
        _bench_section(),
        *(
            f"## splitserve {name}\n\n{sentence(text)} `splitserve {name} --help` lists its options."
            for name, (_, text) in TOOLS.items()
        ),
        "## Options of a cluster",
        "`serve`, `up`, `doctor` and `spec show` take these. They are a shorthand for a "
        "[cluster spec](cluster-spec.md); `--spec FILE` replaces all of them.",
        *_shared_options(commands["serve"][0]),
    ]
    return "\n\n".join(parts) + "\n"


def _commands(parser: argparse.ArgumentParser, prefix: str = "") -> Iterator[tuple[str, tuple[Any, str]]]:
    """All commands below ``parser`` with their parsers and purposes; those of ``spec`` one by one."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            purposes = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, command in action.choices.items():
                if prefix + name == "spec":
                    yield from _commands(command, "spec ")
                else:
                    yield prefix + name, (command, purposes[name])


def _anchor(command: str) -> str:
    return "splitserve-" + command.replace(" ", "-")


def _command_section(name: str, parser: argparse.ArgumentParser) -> str:
    groups = [group for group in parser._action_groups if group.title not in SHARED_GROUPS]
    rows = [_option_row(action) for group in groups for action in group._group_actions if action.dest != "help"]
    has_shared = len(groups) < len(parser._action_groups)
    parts = [f"## splitserve {name}"]
    if parser.description:
        parts.append(sentence(parser.description))
    if rows:
        parts.append(table(("argument", "meaning", "default"), rows))
    if has_shared:
        parts.append("Also: the [options of a cluster](#options-of-a-cluster).")
    return "\n\n".join(parts)


def _shared_options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for group in parser._action_groups:
        if group.title in SHARED_GROUPS:
            rows = [_option_row(action) for action in group._group_actions]
            yield f"### {sentence(group.title).rstrip('.')}\n\n" + table(("argument", "meaning", "default"), rows)


def _option_row(action: argparse.Action) -> tuple[str, str, str]:
    value = "" if action.nargs == 0 else f" {_placeholder(action)}"
    names = ", ".join(f"`{name}{value}`" for name in action.option_strings) or f"`{_placeholder(action)}`"
    return names, sentence((action.help or "").replace("%%", "%")), _default(action)


def _placeholder(action: argparse.Action) -> str:
    if action.choices is not None:
        return "{" + ",".join(str(choice) for choice in action.choices) + "}"
    return str(action.metavar or action.dest.upper())


def _default(action: argparse.Action) -> str:
    if action.default in (None, False, "", []) or not action.option_strings:
        return ""
    if action.default is True:
        return "on"
    if action.metavar == "SIZE" and isinstance(action.default, int) and action.default:
        return format_bytes(action.default)
    return f"`{action.default}`"


def _bench_section() -> str:
    rows = [(f"`{name}`", sentence(text)) for name, (_, text) in BENCHES.items()]
    text = (
        "`splitserve bench BENCH --help` lists the options of each. [Benchmarks](../benchmarks/index.md) has results."
    )
    return "## splitserve bench\n\n" + text + "\n\n" + table(("bench", "measures"), rows)


# ---- cluster spec ----


def spec_page() -> str:
    structs: dict[str, Schema] = json_schema()["$defs"]
    order = ["ClusterSpec", *(name for name in structs if name != "ClusterSpec")]
    parts = [
        NOTE,
        "# Cluster spec",
        "A YAML document with the fields of [ClusterSpec](#clusterspec). `splitserve spec show MODEL --prefill 1 "
        "--decode 1` prints one, `splitserve spec check FILE` names each mistake with its line, and `splitserve spec "
        "schema` prints the [JSON schema](cluster-spec.schema.json) for editors. Unknown fields are refused.",
        *(_struct_section(name, structs[name]) for name in order),
    ]
    return "\n\n".join(parts) + "\n"


def _struct_section(name: str, schema: Schema) -> str:
    if "enum" in schema:
        return f"## {name}\n\nOne of {_type_of(schema)}."
    required = schema.get("required", [])
    rows: list[Sequence[str]] = []
    for field, value in schema["properties"].items():
        default = "required" if field in required else _json_default(value)
        rows.append((f"`{field}`", _type_of(value), default, sentence(value.get("description", ""))))
    headers: Sequence[str] = ("field", "type", "default", "meaning")
    if not any(row[3] for row in rows):  # the settings of a process: see the reference of settings
        headers, rows = headers[:2], [row[:2] for row in rows]
    text = sentence(schema.get("description", ""))
    return f"## {name}\n\n" + (f"{text}\n\n" if text else "") + table(headers, rows)


def _json_default(value: Schema) -> str:
    default = value.get("default")
    return "" if default in (None, "", [], {}) else f"`{json.dumps(default)}`"


def _type_of(value: Schema) -> str:
    """A type as readers write it: ``list of text``, ``1 to 64``, the section of another struct."""
    if "$ref" in value:
        return _reference(value["$ref"])
    if members := value.get("anyOf") or value.get("oneOf"):
        return " or ".join(dict.fromkeys(_type_of(each) for each in members))
    if "enum" in value or "const" in value:
        return ", ".join(f"`{each}`" for each in value.get("enum", [value.get("const")]))
    kind = value.get("type")
    if isinstance(kind, list):
        return " or ".join(_type_of({**value, "type": each}) for each in kind)
    if kind == "array":
        return f"list of {_type_of(value.get('items', {}))}" + _bounds(value)
    if kind == "object":
        values = value.get("additionalProperties")
        return f"map to {_type_of(values)}" if isinstance(values, dict) and values else "map"
    words = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}
    return words.get(str(kind), "null" if kind == "null" else "any value") + _bounds(value)


def _reference(path: str) -> str:
    name = path.rpartition("/")[2]
    return f"[{name}](#{name.lower()})"


def _bounds(value: Schema) -> str:
    """Bounds in parentheses: ``(0 to 2)``, ``(from 1)``, ``(up to 1024 characters)``."""
    is_whole = value.get("type") == "integer" and "exclusiveMaximum" in value
    most = value["exclusiveMaximum"] - 1 if is_whole else value.get("maximum")
    found = [f"more than {value['exclusiveMinimum']}"] if "exclusiveMinimum" in value else []
    found.append(_range(value.get("minimum"), most))
    found.append(_range(value.get("minLength"), value.get("maxLength"), " characters"))
    found.append(_range(value.get("minItems"), value.get("maxItems"), " items"))
    found += [f"pattern `{value['pattern']}`"] if "pattern" in value else []
    text = ", ".join(filter(None, found))
    return f" ({text})" if text else ""


def _range(least: Any, most: Any, unit: str = "") -> str:
    if least is None and most is None:
        return ""
    if unit and (least, most) == (1, None):
        return "not empty"
    if most == 0:
        return "empty"
    if least is None:
        return f"up to {most}{unit}"
    return f"from {least}{unit}" if most is None else f"{least} to {most}{unit}"


# ---- HTTP API ----


def api_page() -> str:
    document = openapi_document(("MODEL",), wants_key=True)
    schemas: dict[str, Schema] = document["components"]["schemas"]
    operations = [
        (path, method, item[method]) for path, item in document["paths"].items() for method in METHODS if method in item
    ]
    without_key = openapi_document(("MODEL",), wants_key=False)["paths"]
    rows = [_operation_row(*each, without_key[each[0]][each[1]]) for each in operations]
    parts = [
        NOTE,
        "# HTTP API",
        "The endpoints follow OpenAI's API. A running router answers `GET /openapi.json` with the whole document for "
        "its model. Parameters that are not supported are refused by name, never ignored; "
        "[below](#parameters-that-take-neutral-values-only) are those that are accepted when they change nothing.",
        "## Endpoints",
        table(("endpoint", "purpose", "API key", "statuses"), rows),
        "Further ones are for operators: `/dashboard` and those under `/admin` "
        "([operations](../guides/operations.md#the-administrators-endpoints)). "
        "The API key is required only where the cluster has one. `/admin` requires the admin key where there is one: "
        "403 to other keys. Without any key, a server that is not on loopback answers 403 to `POST` under `/admin` "
        "([security](../guides/security.md#operations)). Each endpoint answers 405 to other methods than its own.",
        "## Errors",
        "Each error is an OpenAI error object: `error.message`, `error.type`, `error.param`, `error.code`. After the "
        "first streamed token an error comes as an event of the stream.",
        table(("status", "reason"), [(str(status), sentence(text)) for status, text in ERRORS.items()]),
        *_request_sections(schemas),
    ]
    return "\n\n".join(parts) + "\n"


def _operation_row(path: str, method: str, operation: Schema, without_key: Schema) -> tuple[str, str, str, str]:
    """The row of an operation with its statuses where the cluster has a key, and where it has none."""
    key = "yes" if operation.get("security") else "no"
    statuses = sorted({*operation["responses"], *without_key["responses"]})
    return f"`{method.upper()} {path}`", sentence(operation["summary"]), key, ", ".join(statuses)


def _request_sections(schemas: dict[str, Schema]) -> Iterator[str]:
    neutral: dict[str, Schema] = {}
    shown = _parts_of_requests(schemas)
    for name, schema in schemas.items():
        if name not in shown:
            continue
        rows = []
        for field, value in schema["properties"].items():
            if "neutral values only" in value.get("description", ""):
                neutral[field] = value
                continue
            needed = "yes" if field in schema.get("required", []) else ""
            rows.append((f"`{field}`", _type_of(_without_null(value)), needed, sentence(value.get("description", ""))))
        yield f"## {name}\n\n" + table(("field", "type", "required", "meaning"), rows)
    values = [(f"`{field}`", _accepted(value["enum"])) for field, value in sorted(neutral.items())]
    text = "Null, too, is accepted for each of them."
    yield f"## Parameters that take neutral values only\n\n{text}\n\n" + table(("field", "accepted"), values)


def _accepted(values: Sequence[Any]) -> str:
    return ", ".join(f"`{json.dumps(each)}`" for each in values if each is not None) or "null only"


def _parts_of_requests(schemas: dict[str, Schema]) -> set[str]:
    """The names of requests' schemas, and of all that they refer to."""
    found: set[str] = set()
    left = [name for name in schemas if name.endswith("Request")]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += re.findall(r'"#/components/schemas/(\w+)"', json.dumps(schemas[name]))
    return found


def _without_null(value: Schema) -> Schema:
    """The type of a field that may be left out: null is one more way to leave it out."""
    kinds = value.get("anyOf")
    if not kinds:
        return value
    left = [each for each in kinds if each.get("type") != "null"]
    return left[0] if len(left) == 1 else {**value, "anyOf": left}


# ---- models ----


def models_page() -> str:
    """List the supported architectures with the first sentence of their families' modules."""
    known = list(architectures())
    rows = [(f"`{each.name}`", each.note) for each in known if each.support == "native"]
    tested = [each.name for each in known if each.support == "transformers"]
    refused = [(f"`{each.name}`", each.note) for each in known if each.support == "refused"]
    parts = [
        NOTE,
        "# Models",
        "`architectures` in a checkpoint's config.json decides whose code computes it; `--model-backend` forces it "
        "([guide](../guides/other-models.md)). `splitserve models` prints this list, `splitserve doctor MODEL` how one "
        "checkpoint is served.",
        "## Native families",
        "Fields of config.json that are unknown for the architecture, and tensors that are missing, surplus or "
        "misshapen, are refused by name. [Add a model family](../guides/add-a-model-family.md) shows how to add one.",
        "The context length is `max_position_embeddings`, or with YaRN `factor` times "
        "`original_max_position_embeddings` where that is longer. An LM head that is stored is used, even if "
        "`tie_word_embeddings` is true. Fields that are missing have the defaults of transformers' config classes, or "
        "are refused.",
        table(("architecture", "family"), rows),
        "Sliding layers keep keys and values of their window only, in blocks of their own; KV tiers are off then.",
        "## Through transformers",
        "All other causal language models of the transformers library run through its code, with Splitserve's "
        "attention and KV memory, if a proof and a test at start admit them. `scripts/long-tests models` compares the "
        f"tokens of these {len(tested)} with those of transformers:",
        ", ".join(f"`{name}`" for name in tested) + ".",
        "Refused, among others:",
        table(("architecture", "reason"), refused),
    ]
    return "\n\n".join(parts) + "\n"


def pages() -> dict[Path, str]:
    """All pages and modules, as they should be."""
    schemas: dict[str, Schema] = openapi_document(("MODEL",), wants_key=True)["components"]["schemas"]
    texts = {
        "cli.md": cli_page(),
        "cluster-spec.md": spec_page(),
        "cluster-spec.schema.json": schema_text(),
        "settings.md": settings_page(),
        "http-api.md": api_page(),
        "metrics.md": metrics_page(),
        "overview.md": overview_page(),
        "spans.md": spans_page(),
        "logs.md": logs_page(NOTE),
        "models.md": models_page(),
    }
    modules = {"settings.py": settings_module(), "parameters.py": parameters_module(schemas)}
    return {FOLDER / name: text for name, text in texts.items()} | {
        KEYWORDS / name: text for name, text in modules.items()
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a page would change")
    options = parser.parse_args(list(argv))
    old = [path for path, text in pages().items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in old:
        print(f"{path} is out of date" if options.check else f"{path} is written anew")
        if not options.check:
            path.write_text(pages()[path], encoding="utf-8")
    return 1 if options.check and old else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
