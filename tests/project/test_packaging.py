"""The layout that packaging and the import rules rely on, and its description."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import splitserve.router.server
from waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "splitserve"
LINKED = {"router", "prefill", "decode", "kvconnector", "kernels", "models", "orchestration", "benchmarks"}
SHARED = {path.name for path in SOURCE.glob("[!_]*/") if not path.is_symlink()}
pytestmark = pytest.mark.skipif(not (ROOT / "router").is_dir(), reason="not a checkout")


@pytest.fixture(scope="module")
def layers() -> list[set[str]]:
    """The layers of the import rules, highest first, by the names of their folders."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    [contract] = [each for each in config["tool"]["importlinter"]["contracts"] if each["type"] == "layers"]
    return [{name.strip().removeprefix("splitserve.") for name in layer.split("|")} for layer in contract["layers"]]


def rooms() -> dict[str, str]:
    """Folders inside the package, such as ``router/http``, with their docstrings."""
    found = {}
    for top in [*LINKED, *SHARED]:
        for path in (
            (SOURCE / top).resolve().rglob("*/") if top in LINKED else [SOURCE / top, *(SOURCE / top).rglob("*/")]
        ):
            if any(path.glob("*.py")):
                init = path / "__init__.py"
                name = str(path.relative_to(ROOT)).removeprefix("src/splitserve/")
                found[name] = (ast.get_docstring(ast.parse(init.read_text())) or "") if init.exists() else ""
    return found


def test_folders_are_linked_into_the_package_and_have_no_init() -> None:
    assert {path.name for path in SOURCE.iterdir() if path.is_symlink()} == LINKED
    for name in LINKED:
        assert (SOURCE / name).resolve() == ROOT / name
        assert not (ROOT / name / "__init__.py").exists()


def test_import_rules_know_every_folder(layers: list[set[str]]) -> None:
    named = [name for layer in layers for name in layer]
    assert sorted(named) == sorted(LINKED | SHARED)


def test_each_room_says_what_it_is_for() -> None:
    assert not [name for name, docstring in rooms().items() if not docstring]


def test_architecture_has_each_room_once() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    first_cells = re.findall(r"^\| (`[^|]+`) \|", text, re.MULTILINE)
    documented = [name for cell in first_cells for name in re.findall(r"`([\w/]+)/`", cell)]
    assert sorted(documented) == sorted({*rooms(), "prefill", "decode"})


def test_architecture_names_modules_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = {name for name in re.findall(r"`([\w]+(?:/[\w]+)+)`", text) if name.split("/")[0] in LINKED | SHARED}
    assert named, "the path of a request names modules"
    missing = {name for name in named if not any((SOURCE / f"{name}{end}").exists() for end in (".py", "/__init__.py"))}
    assert not missing


@pytest.mark.parametrize("module", ["splitserve.router.server", "splitserve.orchestration.cluster.launcher"])
def test_no_torch_in_the_router_and_the_launcher(module: str) -> None:
    program = f"import {module}, sys; print(*{{'torch', 'transformers', 'nixl_cu13'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_router_needs_no_torch():
    folder = Path(splitserve.router.server.__file__).parent
    paths = (path.relative_to(folder).with_suffix("") for path in folder.glob("**/[!_]*.py"))
    modules = sorted(f"splitserve.router.{'.'.join(path.parts)}" for path in paths)
    code = "import sys, splitserve.router.server; print('transformers' in sys.modules); "
    code += f"import {', '.join(modules)}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS
    )
    assert done.stdout.split() == ["False", "False"] and len(modules) > 10
