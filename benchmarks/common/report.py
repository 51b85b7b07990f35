"""Report of a bench: command, versions, machine and results; as JSON and as a table."""

import argparse
import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from splitserve import __version__
from splitserve.benchmarks.common.arguments import writable_directory
from splitserve.common.cores import usable_cpus

_PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
RESULTS_DIRECTORY = _PACKAGE_FOLDER / "results"  # in a checkout: the kept results
COMMIT_VARIABLE = "SPLITSERVE_COMMIT"  # names the commit of a copy without git
UNKNOWN_COMMIT = "unknown"
_ARCHIVED_COMMIT = _PACKAGE_FOLDER / "COMMIT"  # filled in by git archive
_FOLDER_OPTIONS = frozenset(("--result-dir", "--continue"))
_COMMANDS = frozenset(("plan", "simulate"))  # that keep results, and are no benches
_PACKAGES = (
    "torch",
    "triton",
    "flashinfer-python",
    "nixl-cu13",
    "nixl-cu12",
    "transformers",
    "tokenizers",
    "numpy",
    "pyzmq",
    "uvicorn",
    "aiohttp",
    "ray",
)


def results_directory() -> Path:
    """Return the default folder of results: ``benchmarks/results`` of a checkout or an unpacked source archive,
    ``splitserve-results`` in the current directory if Splitserve is installed."""
    if _is_source_tree():
        return _PACKAGE_FOLDER / "results"
    return Path.cwd() / "splitserve-results"


def add_result_options(parser: argparse.ArgumentParser, *, always: bool = False) -> None:
    """Add the option for the result's folder and, unless the result is ``always`` kept, the option to keep it."""
    if not always:
        parser.add_argument("--save", action="store_true", help="keep the result as JSON; implied by --result-dir")
    add = parser.add_argument
    add(
        "--result-dir",
        type=writable_directory,
        default="",
        metavar="DIR",
        help="folder of the JSON; empty: benchmarks/results of a checkout, else ./splitserve-results",
    )


def kept_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options to keep with a result: all but where it is kept."""
    return {name: value for name, value in vars(options).items() if name != "result_dir"}


def keep_result(name: str, argv: Sequence[str], data: dict[str, Any], options: argparse.Namespace) -> None:
    """Write the result with :func:`write_result` if the options ask for it, and print its path."""
    if options.result_dir or getattr(options, "save", True):
        print(f"written to {write_result(name, argv, data, options.result_dir)}")


def write_result(name: str, argv: Sequence[str], data: dict[str, Any], directory: str = "") -> Path:
    """Write ``data`` with command, versions and machine to ``<directory>/<name>-<UTC time>.json``; returns the path.

    ``argv`` are the arguments of ``splitserve bench <name>``, or of the command of that name that is no bench; an empty
    ``directory`` means :func:`results_directory`.
    """
    now = datetime.datetime.now(datetime.UTC)
    result = {
        "bench": name,
        "command": ["splitserve", *(() if name in _COMMANDS else ("bench",)), name, *without_folders(argv)],
        "time": now.isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": machine(),
        **data,
    }
    folder = Path(directory) if directory else results_directory()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{now:%Y%m%dT%H%M%S}-{os.getpid()}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return path


def without_folders(argv: Sequence[str]) -> list[str]:
    """Return the arguments but those that name folders of the machine, which say nothing about what was measured."""
    kept: list[str] = []
    is_value = False
    for argument in argv:
        option, _, value = argument.partition("=")
        is_folder = option in _FOLDER_OPTIONS
        if not is_folder and not is_value:
            kept.append(argument)
        is_value = is_folder and not value
    return kept


def versions() -> dict[str, str]:
    """Return Splitserve's version and commit, Python's, and those of the packages that matter to speed."""
    found = {"splitserve": __version__, "commit": _commit(), "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Describe processor, usable cores, memory and GPUs, without naming the host."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu_model(),
        "cpus": len(usable_cpus()),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines(),
    }


def table(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    """Format rows as aligned text: the first column to the left, the others to the right; floats with two decimals."""
    cells = [list(headers)] + [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    lines = []
    for row in cells:
        first, *rest = (
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join(lines)


def _cell(value: object) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def _is_source_tree() -> bool:
    return (_PACKAGE_FOLDER.parent / "pyproject.toml").is_file()


def _commit() -> str:
    """Return the commit of this code: $SPLITSERVE_COMMIT, else the checkout's, marked if files differ from it, else
    that of an archive (``git archive``), else :data:`UNKNOWN_COMMIT`."""
    if given := os.environ.get(COMMIT_VARIABLE, "").strip():
        return given
    folder, commit = str(_PACKAGE_FOLDER), ""
    if _is_source_tree():  # otherwise a repository around this code is another project's
        commit = _output("git", "-C", folder, "rev-parse", "--short=12", "HEAD")
    if commit:
        changed = _output("git", "-C", folder, "status", "--porcelain", "--untracked-files=no")
        return f"{commit}+changes" if changed else commit
    archived = _ARCHIVED_COMMIT.read_text(encoding="utf-8").strip() if _ARCHIVED_COMMIT.is_file() else ""
    return UNKNOWN_COMMIT if not archived or archived.startswith("$") else archived


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _output(*command: str) -> str:
    """Return the output of a command; empty if it doesn't exist or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.strip() if done.returncode == 0 else ""
