"""The layout that packaging and the import rules rely on."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"router", "prefill", "decode", "kvconnector", "kernels", "models", "orchestration", "benchmarks"}

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="not a checkout")


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


@pytest.mark.parametrize("module", ["splitserve.router.server", "splitserve.orchestration.launcher"])
def test_no_torch_in_the_router_and_the_launcher(module: str) -> None:
    program = f"import {module}, sys; print(*{{'torch', 'transformers', 'nixl_cu13'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
