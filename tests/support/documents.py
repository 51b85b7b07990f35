"""Commands and YAML of the documentation's pages. Not a test module."""

import contextlib
import importlib
import importlib.util
import io
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

from splitserve.orchestration.cli import main as cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
GENERATED = {
    "cli.md",
    "cluster-spec.md",
    "cluster-spec.schema.json",
    "settings.md",
    "http-api.md",
    "logs.md",
    "metrics.md",
    "spans.md",
    "models.md",
    "overview.md",
}
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def fenced(text: str, language: str) -> list[str]:
    """The contents of all fenced blocks in ``language``."""
    return [found[2] for found in _FENCE.finditer(text) if found[1] == language]


def shell_lines(text: str) -> Iterator[str]:
    """Lines of indented and of fenced shell blocks, those that end with a backslash joined to the next."""
    indented = [line[4:] for line in _FENCE.sub("", text).splitlines() if line.startswith("    ")]
    lines = [*indented, *"\n".join(fenced(text, "sh")).splitlines()]
    yield from "\n".join(lines).replace("\\\n", " ").splitlines()


def splitserve_commands(text: str) -> Iterator[list[str]]:
    """Arguments of each command that begins with ``splitserve``, without redirections and comments."""
    for line in shell_lines(text):
        if line.startswith("splitserve "):
            words = shlex.split(line.split(" > ")[0], comments=True)
            yield [word for word in words[1:] if word != "&"]


def check_command(arguments: list[str]) -> None:
    """Raise SystemExit or AssertionError for arguments that ``splitserve`` does not accept. Runs nothing."""
    if arguments[0] not in ("bench", *cli.TOOLS):
        cli.build_parser().parse_args(arguments)
        return
    is_tool = arguments[0] in cli.TOOLS
    rest = arguments[1:] if is_tool else arguments[2:]
    options = bench_options(arguments[0] if is_tool else arguments[1])
    assert {word for word in rest if word.startswith("--")} <= options, arguments


@cache
def bench_options(name: str) -> frozenset[str]:
    """Long options of a bench, or of a tool like ``tune``, from its help."""
    module = {**cli.BENCHES, **cli.TOOLS}[name][0]
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        importlib.import_module(module).main(["--help"])
    return frozenset(re.findall(r"--[a-z][\w-]*", shown.getvalue()))


def all_options() -> frozenset[str]:
    """Long options of all commands and benches."""
    parsers, found = [cli.build_parser()], set()
    while parsers:
        for action in parsers.pop()._actions:
            found.update(action.option_strings)
            if isinstance(action.choices, dict):
                parsers.extend(action.choices.values())
    return frozenset(found).union(*(bench_options(name) for name in [*cli.BENCHES, *cli.TOOLS]))


def load_script(name: str) -> ModuleType:
    """Import a script; scripts import each other by their names."""
    if str(ROOT / "scripts") not in sys.path:
        sys.path.append(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
