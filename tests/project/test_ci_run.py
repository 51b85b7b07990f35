"""``.ci/run`` on a suite of two tests: its exit status, and its last lines."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not (ROOT / ".ci" / "run").is_file(), reason="not a checkout")

SUITE = """
from pathlib import Path

def test_sound():
    pass

def test_second_time_lucky():
    marker = Path(__file__).with_name("marker")
    first = not marker.exists()
    marker.touch()
    assert not first
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with the true scripts, a small suite, and the cache of an earlier run; set-up and checks do nothing."""
    for script in (".ci/run", "scripts/test"):
        (tmp_path / script).parent.mkdir()
        shutil.copy(ROOT / script, tmp_path / script)
    for script in ("setup", "check"):
        path = tmp_path / "scripts" / script
        path.write_text(f"#!/bin/sh\necho {script} is done\n")
        path.chmod(0o755)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\ntestpaths = tests\naddopts = --disable-plugin-autoload -p xdist.plugin\n"
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_small.py").write_text(SUITE)
    cache = tmp_path / ".pytest_cache" / "v" / "cache"
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text(json.dumps({"tests/test_removed.py::test_of_long_ago": True}))
    return tmp_path


def run(clone: Path) -> tuple[int, list[str]]:
    done = subprocess.run(
        [clone / ".ci" / "run"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=200
    )
    return done.returncode, done.stdout.splitlines()


def test_a_run_without_failures_names_no_second_try(clone: Path) -> None:
    (clone / "tests" / "marker").touch()
    status, lines = run(clone)
    assert status == 0, "\n".join(lines)
    assert " 2 passed in " in lines[-2] and lines[-1] == "check is done"


def test_the_last_lines_name_the_second_tries_of_this_run_alone(clone: Path) -> None:
    status, lines = run(clone)
    assert status == 0, "\n".join(lines)
    assert lines[-2:] == [
        "ci: these tests failed at the first try:",
        "tests/test_small.py::test_second_time_lucky",
    ]
    closing = [line for line in lines[:-2] if " passed" in line and line.startswith("=")]
    assert " 1 failed, 1 passed in " in closing[0] and " 1 passed in " in closing[1] and len(closing) == 2


def test_a_test_that_fails_twice_fails_the_run(clone: Path) -> None:
    (clone / "tests" / "test_small.py").write_text("def test_broken():\n    assert False\n")
    status, lines = run(clone)
    assert status == 1 and lines[-1] == "tests/test_small.py::test_broken"
