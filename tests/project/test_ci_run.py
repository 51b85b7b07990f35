"""``.ci/run`` on a suite of two tests: its exit status, and its last lines."""

import json
import os
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

WITH_A_LIMIT = f"""
import sys

sys.path.insert(0, {str(ROOT / "tests" / "support")!r})
from time_limit import TimeLimit

def pytest_configure(config):
    config.pluginmanager.register(TimeLimit(config))
"""

ENDS_ITS_TIME = """
def test_that_lasts_to_the_end_of_the_time(pytestconfig):
    for plugin in pytestconfig.pluginmanager.get_plugins():
        if type(plugin).__name__ == "TimeLimit":
            plugin.end = plugin.began
    assert False
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
        "[pytest]\ntestpaths = tests\naddopts = --disable-plugin-autoload -p xdist.plugin --dist loadfile\n"
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_small.py").write_text(SUITE)
    cache = tmp_path / ".pytest_cache" / "v" / "cache"
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text(json.dumps({"tests/test_removed.py::test_of_long_ago": True}))
    return tmp_path


def run(clone: Path, **environment: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [clone / ".ci" / "run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, "SPLITSERVE_TEST_MINUTES": "", **environment},
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


def test_tests_that_begin_too_late_are_left_out_and_counted(clone: Path) -> None:
    (clone / "tests" / "conftest.py").write_text(WITH_A_LIMIT)
    (clone / "tests" / "test_small.py").write_text(ENDS_ITS_TIME + SUITE)
    status, lines = run(clone, SPLITSERVE_TEST_MINUTES="100")
    assert status == 1 and "2 tests were not begun in the time of SPLITSERVE_TEST_MINUTES (100)" in lines
    assert lines[-1] == "ci: this machine is slow: 2 tests were not begun; scripts/test runs them all"


def test_in_the_usual_time_nothing_is_left_out(clone: Path) -> None:
    (clone / "tests" / "conftest.py").write_text(WITH_A_LIMIT)
    (clone / "tests" / "marker").touch()
    status, lines = run(clone)
    assert status == 0 and lines[-1] == "check is done"


def test_a_limit_that_is_no_number_is_refused(clone: Path) -> None:
    (clone / "tests" / "conftest.py").write_text(WITH_A_LIMIT)
    status, lines = run(clone, SPLITSERVE_TEST_MINUTES="soon")
    assert status != 0
    assert any("SPLITSERVE_TEST_MINUTES is 'soon': expected a number of minutes" in line for line in lines)


def test_a_set_up_that_leaves_no_time_for_tests_fails_the_run(clone: Path) -> None:
    status, lines = run(clone, SECONDS="2700")  # the shell's clock goes on from there
    assert status == 1
    assert lines[-1].startswith("ci: the set-up took 45 minutes") and not any(" passed" in line for line in lines)
