"""docs/reference/logs.md, made from the calls of loggers in the code and from the summary of a request."""

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import splitserve.protocol.cluster_report as report
from splitserve.protocol.cluster_report import RequestSummary

ROOT = Path(__file__).parents[1]
PROCESSES = {
    "Router": ("router",),
    "Workers": (
        "src/splitserve/engine",
        "src/splitserve/worker",
        "prefill",
        "decode",
        "kvconnector",
        "models",
        "kernels",
    ),
    "Launcher, commands, every process": ("orchestration", "src/splitserve/common"),
}
LEVELS = {"debug": "DEBUG", "info": "INFO", "warning": "WARNING", "error": "ERROR", "exception": "ERROR"}
LOGGERS = ("log", "_log", "logger")
RATE_LIMITED = {
    "self._stale_log": "INFO",
    "self._wire_log": "WARNING",
    "self._refusal_log": "WARNING",
    "self._stranger_log": "WARNING",
    "self._warnings": "WARNING",
}
"""Logs with at most one line in some time, and their levels."""
_CALLS = re.compile(
    "|".join(re.escape(start) for start in ("Log(", *(f"{name}." for name in (*LOGGERS, *RATE_LIMITED))))
)
"""What a module with a call has in its text: the others aren't parsed."""

_HEAD = """# Log lines

Every process writes one line per record to standard error: time, level, process (`router`, or the engine id), module,
message; a traceback follows an unexpected error. With `--log-format json` a line is a JSON object with `time` (UTC),
`level`, `process`, `logger`, `message`, perhaps `traceback`, and, when a request ends, the fields below. `--log-level`
(info) is for all processes.

A request's id begins with its `X-Request-Id`. Router and workers name it in each line about the request; with
`--log-level debug` workers log each message about a request.

## When a request ends

INFO, or WARNING if it failed; `--no-request-log` leaves the failed ones:

    request ID finished (length), prefill-0 -> decode-0, prompt=512 cached=0 output=128 ttft_ms=41.3 itl_ms=8.02
    handover_ms=3.10 transport=nixl/cma seconds=1.060

It is one line. The workers' lines have the same id with the number of the attempt, `ID#0`. Every 10 s with load, INFO:

    last 10 s: 4.2 requests/s, 2150 prompt and 538 output tokens/s, 5 in flight, TTFT 44 ms median, 97 ms p99
"""


@dataclass(frozen=True, order=True)
class Line:
    """One call of a logger. ``message``: the text with its placeholders, or the expression that makes it."""

    module: str
    number: int
    level: str
    message: str


@cache
def lines_of(folder: str) -> tuple[Line, ...]:
    """Return the calls of loggers in the modules below ``folder``."""
    return tuple(line for path in sorted((ROOT / folder).rglob("*.py")) for line in _lines_in(path))


def _lines_in(path: Path) -> Iterator[Line]:
    text = path.read_text(encoding="utf-8")
    if _CALLS.search(text):
        module = path.relative_to(ROOT).as_posix().removeprefix("src/splitserve/").removesuffix(".py")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and (found := _call(node)) is not None:
                yield Line(module, node.lineno, *found)


def _call(node: ast.Call) -> tuple[str, str] | None:
    """Return the level and the message of a call that writes a line; None for any other call."""
    function = node.func
    if isinstance(function, ast.Name):
        return ("WARNING", _text(node.args[0], ())) if function.id == "Log" else None
    if not isinstance(function, ast.Attribute):
        return None
    owner = ast.unparse(function.value)
    if function.attr == "write" and owner in RATE_LIMITED:
        return RATE_LIMITED[owner], _text(node.args[1], ())
    if owner not in LOGGERS:
        return None
    if function.attr == "log":
        return "varies", _text(node.args[1], node.args[2:])
    level = LEVELS.get(function.attr)
    return None if level is None else (level, _text(node.args[0], node.args[1:]))


def _text(template: ast.expr, arguments: Iterable[ast.expr]) -> str:
    """Return the message with the names of its values in place of formats."""
    if isinstance(template, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else f"{{{_name(part)}}}" for part in template.values)
        return "".join(map(str, parts))
    if not (isinstance(template, ast.Constant) and isinstance(template.value, str)):
        return f"{{{ast.unparse(template)}}}"
    names = iter([_name(argument) for argument in arguments])
    return re.sub(r"%(?:\.?\d*\w|r)", lambda _: f"{{{next(names, '')}}}", template.value)


def _name(value: ast.expr) -> str:
    """Return a short name of a value: its last attribute, or that of a call's function."""
    if isinstance(value, ast.FormattedValue):
        return _name(value.value)
    if isinstance(value, ast.Call):
        return _name(value.func)
    if isinstance(value, ast.Attribute):
        return value.attr.lstrip("_")
    return value.id if isinstance(value, ast.Name) else "..."


def fields() -> list[tuple[str, str]]:
    """Return the fields of a request's JSON line with the comments of :class:`RequestSummary`."""
    source = inspect.getsource(report).partition("class RequestSummary")[2]
    comments = dict(re.findall(r"^    (\w+): [^#\n]+# (.+)$", source.partition("\nclass ")[0], re.MULTILINE))
    names = {name: "failure" if name == "message" else name for name in RequestSummary.__struct_fields__}
    return [(shown, comments[name].replace("``", "`")) for name, shown in names.items()]


def logs_page(note: str) -> str:
    """Return the page's Markdown."""
    parts = [note, _HEAD, "| JSON field | meaning |", "|---|---|"]
    parts += [f"| `{name}` | {meaning} |" for name, meaning in fields()]
    for title, folders in PROCESSES.items():
        parts += ["", f"## {title}", "", "| level | message | module |", "|---|---|---|"]
        lines = dict.fromkeys(
            (line.level, line.message, line.module) for folder in folders for line in lines_of(folder)
        )
        parts += [f"| {level} | `{_cell(message)}` | `{module}` |" for level, message, module in lines]
    return "\n".join(parts) + "\n"


def _cell(message: str) -> str:
    return " ".join(message.split()).replace("|", "\\|").replace("`", "'")
