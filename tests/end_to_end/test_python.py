"""The Python interface on real clusters: right tokens, and no process left, however the program ends."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from documents import ROOT, fenced
from running import is_running
from serving import transformers_greedy
from small_clusters import MAX_TOKENS
from splitserve import LLM, Completion, PromptError
from splitserve.orchestration.python.batch import ClusterGoneError
from waiting import PATIENCE_SECONDS, wait_until

GUIDE = ROOT / "docs" / "guides" / "python.md"
SMALL = {"kv_memory": "32MiB", "threads": 1, "dtype": "float32"}
PROGRAM = """
import select, sys
from splitserve import LLM
llm = LLM(sys.argv[1], mixed=1, kv_memory="32MiB", threads=1)
print(*llm.server.pids.values(), flush=True)
while not select.select([sys.stdin], [], [], 0.2)[0]:
    pass  # a signal just before a read would wait for the read's end
"""


def check_gone(pids: Iterable[int]) -> None:
    assert not [pid for pid in pids if is_running(pid)]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    chosen = random.Random(7)
    return [[chosen.randrange(3, 700) for _ in range(length)] for length in (1, 16, 33, 70)]


@pytest.fixture(scope="module")
def expected(tiny_qwen3: Path, prompts: list[list[int]]) -> list[object]:
    return list(transformers_greedy(tiny_qwen3, prompts, MAX_TOKENS))


def check_greedy(llm: LLM, prompts: list[list[int]], expected: list[object]) -> list[Completion]:
    """Check that greedy tokens are those of transformers."""
    results = llm.generate(prompts, max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True, return_route=True)
    for prompt, result, right in zip(prompts, results, expected, strict=True):
        assert result.prompt == prompt and result.usage.prompt_tokens == len(prompt)
        (output,) = result.outputs
        assert right.agrees(output.token_ids), (prompt, output)  # type: ignore[attr-defined]
        assert (output.finish_reason, result.usage.completion_tokens) == ("length", MAX_TOKENS)
    return results


def test_batches_on_prefill_and_decode_workers(
    tiny_qwen3: Path, prompts: list[list[int]], expected: list[object], capfd: pytest.CaptureFixture[str]
) -> None:
    with LLM(tiny_qwen3, prefill=1, decode=1, max_num_seqs=4, policy="least-loaded", progress=True, **SMALL) as llm:
        pids = llm.server.pids
        assert set(pids) == {"router", "prefill-0", "decode-0"}
        results = check_greedy(llm, prompts, expected)
        assert all(result.route and result.route["mode"] == "disaggregated" for result in results)
        assert "4/4" in capfd.readouterr().err

        (text,) = llm.generate("One text", max_tokens=3, progress=False)
        assert text.prompt == "One text" and len(text.outputs[0].token_ids) == 3 and text.outputs[0].text
        assert capfd.readouterr().err == ""
        chat = [{"role": "user", "content": "Hello"}]
        (alone,) = llm.chat(chat, max_tokens=5, temperature=0)
        both = llm.chat([chat, [*chat, {"role": "assistant", "content": "Hi"}, *chat]], max_tokens=5, temperature=0)
        assert alone.messages == chat and both[0].outputs[0].text == alone.outputs[0].text
        assert llm.generate([]) == llm.chat([]) == []

        with pytest.raises(PromptError, match=r"^prompt 1: .*maximum context length is"):
            llm.generate(["a", "b " * 20_000], max_tokens=2)
        mixed = llm.generate(["a", "", [5]], max_tokens=2, return_errors=True)
        assert [type(each) for each in mixed] == [Completion, PromptError, Completion]
        with pytest.raises(PromptError, match=r"^prompt 0: .*temperature"):
            llm.generate("a", temperature=3)
        for wrong in (3, [1.5], [["a"]], ["a", None]):
            with pytest.raises(TypeError):
                llm.generate(wrong)  # type: ignore[call-overload]
        for wrong in ("hello", ["hello"], [chat, "hello"], {"role": "user"}):
            with pytest.raises(TypeError, match="list of messages"):
                llm.chat(wrong)  # type: ignore[call-overload]
    check_gone(pids.values())
    with pytest.raises(ClusterGoneError, match="has ended"):
        llm.generate("a")
    llm.close()


def test_an_exception_ends_a_mixed_cluster_and_a_lost_worker_does_not_end_a_batch(
    tiny_qwen3: Path, prompts: list[list[int]], expected: list[object], tmp_path: Path
) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        LLM(tiny_qwen3, log_folder=tmp_path / "logs", log_level="info", **SMALL) as llm,
    ):
        before = llm.server.pids
        assert set(before) == {"router", "mixed-0"} and (tmp_path / "logs" / "mixed-0.log").stat().st_size
        check_greedy(llm, prompts, expected)
        killer = threading.Timer(0.2, os.kill, (before["mixed-0"], signal.SIGKILL))
        killer.start()
        results = llm.generate(["Again"] * 200, max_tokens=60, temperature=0, ignore_eos=True)
        killer.join()
        assert len({tuple(result.outputs[0].token_ids) for result in results}) == 1
        after = llm.server.pids
        assert after["mixed-0"] != before["mixed-0"], "it was killed in the middle of the batch"
        _ = 1 / 0
    check_gone({*before.values(), *after.values()})


@pytest.mark.parametrize("end", ["exit", "kill", "interrupt"])
def test_the_programs_end_is_the_clusters(tiny_qwen3: Path, end: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tiny_qwen3)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None and program.stdin is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_running, pids))
        match end:
            case "kill":
                program.kill()
            case "interrupt":
                program.send_signal(signal.SIGINT)
            case _:
                program.stdin.close()
        status = program.wait(PATIENCE_SECONDS)
    assert status == {"exit": 0, "kill": -signal.SIGKILL}.get(end, status)
    if end == "kill":
        wait_until(lambda: not any(map(is_running, pids)), "the children didn't end")
    check_gone(pids)


@pytest.mark.skipif(not GUIDE.is_file(), reason="not a checkout")
def test_the_guides_programs_run(tiny_qwen3: Path, tmp_path: Path) -> None:
    programs = fenced(GUIDE.read_text(), "python")
    assert len(programs) == 3 and all(program.count("\n") <= 10 for program in programs)
    smaller = {"1GiB": "32MiB", "9707, 11, 1879": "97, 11, 18", "mixed=2": "mixed=1", "range(100)": "range(10)"}
    text = "\n".join(programs).replace("/models/Qwen3-0.6B", str(tiny_qwen3))
    for old, new in smaller.items():
        assert old in text
        text = text.replace(old, new)
    text = re.sub(r'(LLM\("[^"]+")', r'\1, kv_memory="32MiB", threads=1', text)
    done = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "[(1, 400, 'context_length_exceeded')]" in done.stdout and "http://127.0.0.1:" in done.stdout
    assert (tmp_path / "logs" / "router.log").is_file()
