"""Results: their files, and the description of the code that they were measured with."""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from splitserve.benchmarks.common import report


def test_an_archive_of_a_commit_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``git archive`` makes it, from a repository with our attributes."""
    root = report.results_directory().parent.parent

    def git(*command: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        done = subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / ".gitattributes").write_bytes((root / ".gitattributes").read_bytes())
    (tmp_path / "benchmarks/COMMIT").write_text("$Format:%h$\n")
    (tmp_path / "copy").write_text("$Format:%h$\n")
    git("add", ".")
    git("commit", "-q", "-m", "all")
    git("archive", "-o", "all.tar", "HEAD")
    subprocess.run(["tar", "xf", "all.tar", "benchmarks/COMMIT"], cwd=tmp_path, check=True)
    monkeypatch.delenv("SPLITSERVE_COMMIT", raising=False)
    monkeypatch.setattr(report, "_output", lambda *_command: "")  # outside of a checkout
    monkeypatch.setattr(report, "_ARCHIVED_COMMIT", tmp_path / "benchmarks/COMMIT")
    assert report.versions()["commit"] == git("rev-parse", "--short", "HEAD")
    monkeypatch.setattr(report, "_ARCHIVED_COMMIT", tmp_path / "copy")
    assert report.versions()["commit"] == "unknown", "a copy of a checkout, about which nothing is known"
    monkeypatch.setattr(report, "_ARCHIVED_COMMIT", tmp_path / "none")
    assert report.versions()["commit"] == "unknown"
    monkeypatch.setenv("SPLITSERVE_COMMIT", "e79c62a")
    assert report.versions()["commit"] == "e79c62a", "told by who made the copy"


def test_a_command_is_kept_without_the_folders_of_its_machine(tmp_path: Path) -> None:
    argv = ["--continue", "/here/run", "--rounds", "3", "--result-dir=/there", "--result-dir", str(tmp_path), "--save"]
    found = json.loads(report.write_result("goodput", argv, {}, str(tmp_path)).read_text())
    assert found["command"] == ["splitserve", "bench", "goodput", "--rounds", "3", "--save"]


def test_options_are_kept_without_the_folder_of_the_result(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int)
    report.add_result_options(parser)
    options = parser.parse_args(["--rounds", "3", "--result-dir", str(tmp_path)])
    assert report.kept_options(options) == {"rounds": 3, "save": False}


def test_a_result_names_the_command_that_made_it(tmp_path: Path) -> None:
    found = [json.loads(report.write_result(name, ["--x"], {}, str(tmp_path)).read_text()) for name in ("twin", "plan")]
    assert [each["command"] for each in found] == [
        ["splitserve", "bench", "twin", "--x"],
        ["splitserve", "plan", "--x"],
    ]


def test_an_installed_package_keeps_results_out_of_itself(tmp_path: Path) -> None:
    """The package as a wheel installs it, below another project's repository: files of its own, no pyproject.toml."""
    root, site, here = report.results_directory().parent.parent, tmp_path / "site-packages", tmp_path / "here"
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    here.mkdir()
    ignored = shutil.ignore_patterns("results", "__pycache__")
    shutil.copytree(root / "src/splitserve", site / "splitserve", ignore=ignored)
    script = "from splitserve.benchmarks.common.report import write_result; print(write_result('x', [], {}))"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r}); {script}"]
    done = subprocess.run(command, cwd=here, check=True, capture_output=True, text=True)
    path = Path(done.stdout.strip())
    assert path.parent == here / "splitserve-results"
    assert json.loads(path.read_text())["versions"]["commit"] == "unknown"
    assert not list((site / "splitserve" / "benchmarks").rglob("*.json"))
