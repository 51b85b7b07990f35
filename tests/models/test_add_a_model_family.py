"""The guide "Add a model family", followed to the letter in a copy of this checkout."""

import re
from pathlib import Path

import pytest

from documents import ROOT
from followed_guide import FollowedGuide
from splitserve.models.families.registry import FAMILIES

GUIDE = "add-a-model-family.md"

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="not a checkout")


def test_a_family_of_the_guide_draws_the_tokens_of_transformers(tmp_path: Path) -> None:
    guide = FollowedGuide(GUIDE, tmp_path)
    file_text, line = guide.blocks("python")
    guide.write(guide.find(r"This is `(models/families/\w+\.py)`"), file_text)
    guide.add_line(guide.find(r"line to `FAMILIES` in `([\w/.]+)`"), "FAMILIES", line)
    assert len(guide.touched) <= 2
    (architecture,) = re.findall(r'"(\w+ForCausalLM)"', line)
    assert architecture not in FAMILIES, "only the copy may have it: its tests prove that the copy was tested"

    (command,) = guide.blocks("console")
    passed = guide.tests_passed(command, "-k", architecture)
    named = {name for name, parameter in passed if parameter.startswith(architecture)}
    assert {"test_greedy_tokens_are_those_of_transformers", "test_two_ranks_draw_the_same_tokens"} <= named
