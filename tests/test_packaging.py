"""The layout that packaging and the import rules rely on, and its description."""

import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"router", "prefill", "decode", "kvconnector", "kernels", "models", "orchestration", "benchmarks"}

pytestmark = pytest.mark.skipif(not (ROOT / "router").is_dir(), reason="not a checkout")


@pytest.fixture(scope="module")
def contracts() -> dict[str, dict]:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return {contract["name"].split(" ", 1)[0]: contract for contract in config["tool"]["importlinter"]["contracts"]}


def test_folders_are_linked_into_the_package_and_have_no_init() -> None:
    linked = {path.name for path in (ROOT / "src" / "splitserve").iterdir() if path.is_symlink()}
    assert linked == FOLDERS
    for name in FOLDERS:
        assert (ROOT / "src" / "splitserve" / name).resolve() == ROOT / name
        assert not (ROOT / name / "__init__.py").exists()


def test_import_rules_know_every_shared_module(contracts: dict[str, dict]) -> None:
    shared = {f"splitserve.{path.stem}" for path in (ROOT / "src" / "splitserve").glob("[!_]*.py")}
    assert set(contracts["Shared"]["source_modules"] + contracts["Security"]["source_modules"]) == shared
    assert set(contracts["Kernels"]["forbidden_modules"]) == shared


def test_import_rules_know_every_folder(contracts: dict[str, dict]) -> None:
    names = {f"splitserve.{name}" for name in FOLDERS}
    layered = {name.strip() for layer in contracts["Imports"]["layers"] for name in layer.split("|")}
    assert layered == names
    assert names <= set(contracts["Shared"]["forbidden_modules"])


def documented_modules(text: str) -> Counter[tuple[str, str]]:
    """Modules that the tables of ARCHITECTURE.md have in their first column, with their folders. A name without a
    folder is in that of the name before it, or of the heading."""
    found: Counter[tuple[str, str]] = Counter()
    folder = ""
    for line in text.splitlines():
        if (heading := re.match(r"### (?:src/)?(\w+)", line)) is not None:
            folder = heading[1]
        elif line.startswith("| `"):
            for name in re.findall(r"`([\w/]+)`", line.split("|")[1]):
                folder, module = name.split("/") if "/" in name else (folder, name)
                found[folder, module] += bool(module)
    return +found


def test_architecture_has_each_module_once() -> None:
    documented = documented_modules((ROOT / "ARCHITECTURE.md").read_text())
    modules = {(path.parent.name, path.stem) for name in FOLDERS for path in (ROOT / name).glob("[!_]*.py")}
    modules |= {("splitserve", path.stem) for path in (ROOT / "src" / "splitserve").glob("[!_]*.py")}
    assert documented.keys() == modules
    assert set(documented.values()) == {1}, documented.most_common(3)


@pytest.mark.parametrize("module", ["splitserve.router.server", "splitserve.orchestration.launcher"])
def test_no_torch_in_the_router_and_the_launcher(module: str) -> None:
    program = f"import {module}, sys; print(*{{'torch', 'transformers', 'nixl_cu13'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
