"""Types of the Python interface, as a type checker sees them from a program that uses it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
from typing import assert_type
import splitserve
from splitserve import LLM, ChatCompletion, Completion, Output, PromptError, launch

with LLM("model", prefill=1, decode=1, kv_memory="1GiB", max_num_seqs=8, device="cpu") as llm:
    assert_type(llm, LLM)
    found = llm.generate(["a", "b"], max_tokens=3, temperature=0, stop=["x"], logit_bias={3: 1.5})
    assert_type(found, list[Completion])
    assert_type(found[0].outputs, list[Output])
    assert_type(found[0].outputs[0].token_ids, list[int])
    assert_type(found[0].usage.prompt_tokens, int)
    assert_type(llm.generate([[1, 2]], return_errors=True), list[Completion | PromptError])
    llm.generate("a")
    llm.generate([1, 2, 3])
    both: list[str | list[int]] = ["a", [1, 2]]
    llm.generate(both)
    assert_type(llm.chat([{"role": "user", "content": "a"}], seed=1), list[ChatCompletion])
    chats = [[{"role": "user", "content": "a"}]]
    assert_type(llm.chat(chats, max_completion_tokens=2), list[ChatCompletion])
with launch(spec="cluster.yaml", progress=False) as server:
    assert_type(server.base_url, str)
assert_type(splitserve.__version__, str)
"""
WRONG = {
    'LLM("model", kv_memry="1GiB")': "kv_memry",
    'LLM("model", max_num_seqs="many")': "max_num_seqs",
    'LLM("model", device="tpu")': "device",
    'launch("model", prefil=1)': "prefil",
    'launch("model", enable_prefix_caching="no")': "enable_prefix_caching",
    'LLM("model").generate(3)': "generate",
    'LLM("model").generate("a", max_token=3)': "generate",
    'LLM("model").generate("a", temperature="hot")': "generate",
    'LLM("model").chat(["a"])': "chat",
    "splitserve.LMM": "LMM",
}


@pytest.mark.skipif(not (ROOT / "router").is_dir(), reason="not a checkout")
def test_a_typed_program_passes_and_each_mistake_is_found(tmp_path: Path) -> None:
    text = f"{PROGRAM}\n" + "".join(f"{line}\n" for line in WRONG)
    (tmp_path / "program.py").write_text(text)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary"]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src"), "MYPY_CACHE_DIR": str(ROOT / ".mypy_cache")}
    done = subprocess.run(
        [*command, "program.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    first = text.splitlines().index(next(iter(WRONG))) + 1
    lines = [int(error.split(":")[1]) for error in errors]
    assert sorted(set(lines)) == list(range(first, first + len(WRONG))), done.stdout + done.stderr
    for number, word in enumerate(WRONG.values(), first):
        assert any(f"program.py:{number}: " in error and word in error for error in errors), errors
