"""A guide of the documentation, followed in a copy of this checkout. Not a test module."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from documents import ROOT, fenced

_LEFT_OUT = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "results")


class FollowedGuide:
    """A page of docs/guides/ and a copy of the checkout. ``touched``: files of the checkout that were changed.

    Programs in the copy use one thread: tiny operations gain nothing from more.
    """

    def __init__(self, page: str, folder: Path) -> None:
        self.text = (ROOT / "docs" / "guides" / page).read_text()
        self.checkout = folder / "checkout"
        self.touched: set[str] = set()
        self.environment = {**os.environ, "PYTHONPATH": str(self.checkout / "src"), "OMP_NUM_THREADS": "1"}
        shutil.copytree(ROOT, self.checkout, symlinks=True, ignore=_LEFT_OUT)

    def blocks(self, language: str) -> list[str]:
        """Return the fenced blocks in a language, in order."""
        return fenced(self.text, language)

    def find(self, pattern: str) -> str:
        """Return the one text of the page that the pattern's group matches."""
        (found,) = re.findall(pattern, self.text)
        assert isinstance(found, str)
        return found

    def write(self, path: str, text: str) -> None:
        """Write a file that is not there yet."""
        assert not (self.checkout / path).exists(), path
        (self.checkout / path).write_text(text)

    def add_line(self, path: str, beside: str, lines: str, *, before: bool = False) -> None:
        """Add lines to an existing file, after or before the one line that begins with ``beside``."""
        file = self.checkout / path
        changed, count = re.subn(
            rf"^{re.escape(beside)}.*\n",
            lambda match: lines + match[0] if before else match[0] + lines,
            file.read_text(),
            flags=re.M,
        )
        assert count == 1, f"{path} has {count} lines that begin with {beside}"
        file.write_text(changed)
        self.touched.add(path)

    def python(self, *arguments: str) -> str:
        """Run Python in the copy, and return its output; it must succeed."""
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=self.checkout, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def tests_passed(self, command: str, *options: str) -> list[tuple[str, str]]:
        """Run a page's ``python -m pytest ...`` in the copy; all must pass. Return their names and parameters."""
        program, *arguments = command.split()
        assert program == "python", command
        plain = ("-n", "0", "-v", "-p", "no:cacheprovider", "-p", "no:schemathesis")  # a plugin that loads for a second
        return re.findall(r"::(\w+)(?:\[(.*)\])? PASSED", self.python(*arguments, *plain, *options))
