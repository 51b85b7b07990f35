"""Child processes of benches, which end with them, and a model for a router."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from splitserve.benchmarks.common import child
from splitserve.common.errors import ConfigError
from splitserve.models.demo.tokenizer import QWEN_TOKENS, train_tokenizer


def start_child(module: str, *arguments: str, stdout: int | None = None) -> "subprocess.Popen[str]":
    """Start a module as a program. It ends with this process, even if that is killed."""
    command = [sys.executable, "-m", child.__name__, module, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, text=True)


@contextlib.contextmanager
def child_process(module: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a module as a program beside the block; its output is read with :func:`next_line`."""
    with start_child(module, *arguments, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()


def next_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise ConfigError(f"a child process ended with status {process.wait()} before it was ready")
    return line


def write_router_model(folder: Path) -> int:
    """Write the part of a model that a router needs: a tokenizer. Returns the size of its vocabulary."""
    tokenizer = train_tokenizer(2000, QWEN_TOKENS, seed=0)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": QWEN_TOKENS.eos, "chat_template": QWEN_TOKENS.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return int(tokenizer.get_vocab_size())
