"""The guide "Add a model family", followed to the letter in a copy of this checkout."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = Path("docs/guides/add-a-model-family.md")

pytestmark = pytest.mark.skipif(not (ROOT / GUIDE).is_file(), reason="not a checkout")


def test_a_family_of_the_guide_draws_the_tokens_of_transformers(tmp_path: Path) -> None:
    text = (ROOT / GUIDE).read_text()
    (file_name,) = re.findall(r"This is `(models/families/\w+\.py)`", text)
    (registry_name,) = re.findall(r"line to `FAMILIES` in `([\w/.]+)`", text)
    file_text, line = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (command,) = re.findall(r"```console\npython (.*)\n```", text)
    (architecture,) = re.findall(r'"(\w+ForCausalLM)"', line)

    checkout = tmp_path / "checkout"
    left_out = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "results")
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=left_out)
    assert not (checkout / file_name).exists()
    (checkout / file_name).write_text(file_text)
    registry = checkout / registry_name
    registry.write_text(re.sub(r"^FAMILIES.*\{\n", lambda start: start[0] + line, registry.read_text(), flags=re.M))

    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    options = ["-k", architecture, "-n", "0", "-v", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, *command.split(), *options],
        cwd=checkout, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.findall(rf"::(\w+)\[{architecture}.*PASSED", done.stdout)
    assert {"test_greedy_tokens_are_those_of_transformers", "test_two_ranks_draw_the_same_tokens"} <= set(passed)
    found = subprocess.run(
        [sys.executable, "-c", "import splitserve.models.families.registry as r; print(r.__file__)"],
        cwd=checkout, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(found.stdout.strip()).resolve() == registry, "the copy was tested"
