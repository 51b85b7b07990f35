"""``scripts/gpu-tests``: which tests it selects, the exit status it keeps, the JUnit file it writes."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu-tests"
RUNS_ON_GPU = re.compile(r'"cuda"(, 0\))? if (torch\.cuda\.is_available\(\)|ON_GPU)|if torch\.cuda\.is_available\(\):')
NEEDS_GPU = re.compile(
    r"skipif\(\s*not (torch\.cuda\.is_available\(\)|ON_GPU)|skipif\(\s*torch\.cuda\.device_count\(\)"
)

pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="not a checkout")


MARKED = """
import pytest

@pytest.mark.gpu
def test_on_one(): pass

@pytest.mark.gpu2
def test_on_two(): pass

@pytest.mark.on_gpu
@pytest.mark.parametrize("name", ["first", "second"])
def test_anywhere(name): pass

def test_of_no_gpu(): pass
"""


def run(
    directory: Path, *arguments: str, script: Path = SCRIPT, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [script, directory, *arguments]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=200
    )


@pytest.fixture
def interpreter_with_gpu(tmp_path: Path) -> str:
    """An interpreter whose PyTorch claims one GPU when the script asks; the tests themselves see the true machine."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then echo 1; else exec {sys.executable} "$@"; fi\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_without_a_gpu_there_is_nothing_to_run(tmp_path: Path) -> None:
    done = run(tmp_path, PYTHON=sys.executable)
    assert done.returncode == 5 and "finds no GPU on this machine: there is nothing to run" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_interpreter_without_torch_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, PYTHON="/bin/false")
    assert done.returncode == 1 and "/bin/false can't import torch" in done.stderr


@pytest.fixture
def small_checkout(tmp_path: Path) -> Path:
    """The script in a checkout with two test modules, one of which can't be imported; all else is this checkout's."""
    root = tmp_path / "checkout"
    (root / "tests").mkdir(parents=True)
    for name in ("scripts", "src", "pyproject.toml", "tests/conftest.py", "tests/support"):
        (root / name).symlink_to(ROOT / name)
    (root / "tests" / "test_marked.py").write_text(MARKED)
    (root / "tests" / "test_others.py").write_text("import no_such_package\n")
    return root / "scripts" / SCRIPT.name


def test_the_junit_file_has_the_marked_tests_and_names_commit_and_torch(
    tmp_path: Path, interpreter_with_gpu: str, small_checkout: Path
) -> None:
    results = tmp_path / "new" / "results"
    done = run(
        results,
        "-q",
        "-k",
        "not second",
        script=small_checkout,
        PYTHON=interpreter_with_gpu,
        SPLITSERVE_COMMIT="0a1b2c3",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = results.iterdir()
    assert re.fullmatch(r"gpu-tests-\d{8}T\d{6}-\d+\.xml", file.name) and f"written to {file}" in done.stdout
    suite = ET.parse(file).getroot().find("testsuite")
    assert suite is not None
    assert [each.get("name") for each in suite.iter("testcase")] == [
        "test_on_one",
        "test_on_two",
        "test_anywhere[first]",
    ]
    properties = {each.get("name"): each.get("value") for each in suite.iter("property")}
    assert properties["commit"] == "0a1b2c3" and properties["torch"] == torch.__version__ and "gpus" in properties


def test_the_status_is_that_of_pytest(tmp_path: Path, interpreter_with_gpu: str, small_checkout: Path) -> None:
    done = run(tmp_path / "results", "--no-such-option", script=small_checkout, PYTHON=interpreter_with_gpu)
    assert done.returncode == 4 and "pytest wrote no" in done.stderr


def test_no_test_for_gpus_is_without_its_marker() -> None:
    for path in sorted(set((ROOT / "tests").rglob("test_*.py")) - {Path(__file__)}):
        text = path.read_text()
        assert not NEEDS_GPU.search(text), f"{path.name}: mark what needs a GPU with gpu or gpu2"
        if RUNS_ON_GPU.search(text):
            assert "mark.on_gpu" in text, f"{path.name}: mark what runs on a GPU where there is one with on_gpu"
