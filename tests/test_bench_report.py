"""What a result says of the code that it was measured with."""

import subprocess
from pathlib import Path

import pytest

from splitserve.benchmarks import report


def test_an_archive_of_a_commit_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``git archive`` makes it, from a repository with our attributes."""
    root = report.RESULTS_DIRECTORY.parent.parent

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
