"""The guide "Add a model family", followed to the letter in a copy of this checkout."""

import json
import re
from pathlib import Path

import pytest

from documents import ROOT
from followed_guide import FollowedGuide
from splitserve.common.errors import CheckpointError
from splitserve.models.config import ConfigFields, load_model_config
from splitserve.models.families import llama
from splitserve.models.families.registry import FAMILIES

GUIDE = "add-a-model-family.md"

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="not a checkout")


def test_a_family_of_the_guide_draws_the_tokens_of_transformers(tmp_path: Path) -> None:
    guide = FollowedGuide(GUIDE, tmp_path)
    file_text, line, sizes = guide.blocks("python")
    mistake, _ = guide.blocks("text")
    guide.write(guide.find(r"This is `(models/families/\w+\.py)`"), file_text)
    (architecture,) = re.findall(r'"(\w+ForCausalLM)"', line)
    assert architecture not in FAMILIES, "only the copy may have it: its tests prove that the copy was tested"
    following = min(name for name in FAMILIES if name > architecture)
    guide.add_line(guide.find(r"line to `FAMILIES` in `([\w/.]+)`"), f'    "{following}": ', line, before=True)
    guide.python("scripts/reference_pages.py")
    assert f"| `{architecture}` | ERNIE 4.5: " in (guide.checkout / "docs/reference/models.md").read_text()

    known, others = guide.find(r"`TESTED` in `([\w/.]+)`"), guide.find(r"line in\s`([\w/.]+)` from `OTHERS`")
    remove_line(guide.checkout / known, f'    "{architecture}",')
    moved = remove_line(guide.checkout / others, f'    "{architecture}": ')
    guide.add_line(others, "NATIVE: ", moved)
    tables = guide.find(r"tables in `([\w/.]+)`")
    guide.add_line(tables, "OWN_SIZES: ", sizes)
    guide.add_line(tables, "MISTAKES: ", mistake)

    (command,) = guide.blocks("console")
    passed = guide.tests_passed(command, "-k", f"{architecture} or lists or list_of or without_a_family")
    named = {name for name, parameter in passed if parameter.startswith(architecture)}
    compared = {"test_greedy_tokens_are_those_of_transformers", "test_two_ranks_draw_the_same_tokens"}
    assert {*compared, "test_every_feature_changes_the_tokens"} <= named
    assert "test_the_lists_for_readers_are_those_of_the_tests" in {name for name, _ in passed}


def test_a_feature_that_no_config_has_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "features", lambda given: {"qkv_bias": False, "is_parallel": True})
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    fields = {"architectures": ["LlamaForCausalLM"], **dict.fromkeys(sizes, 64)}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(TypeError, match=r"families/llama.py: .* 'is_parallel', .*; declare it in Features"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(("given", "shown"), [(True, "true; only false"), ("no", "'no'; true or false is needed")])
def test_a_flag_that_is_not_supported_is_named(given: object, shown: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: use_parallel_residual is {shown}"):
        ConfigFields({"use_parallel_residual": given}).only_flag("use_parallel_residual", allowed=False, default=True)
    ConfigFields({"use_parallel_residual": False}).only_flag("use_parallel_residual", allowed=False, default=True)


def remove_line(file: Path, start: str) -> str:
    """Remove the one line that begins with ``start``, and return it."""
    lines = file.read_text().splitlines(keepends=True)
    (found,) = [line for line in lines if line.startswith(start)]
    file.write_text("".join(line for line in lines if line != found))
    return found
