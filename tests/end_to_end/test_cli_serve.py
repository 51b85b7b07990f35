"""`splitserve serve` and `splitserve demo` as a user runs them: a real router, real workers, real signals."""

import json
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from command_line import command
from running import is_running
from splitserve.models.demo.checkpoint import write_demo_model
from waiting import PATIENCE_SECONDS


@pytest.fixture(scope="module")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("models") / "my-demo")


def shared_memory_of(processes: list[psutil.Process]) -> set[Path]:
    """Files in /dev/shm that the processes have mapped; none on platforms without /proc."""
    maps = [Path(f"/proc/{process.pid}/maps") for process in processes]
    lines = [line for path in maps if path.exists() for line in path.read_text().splitlines()]
    return {Path("/dev/shm" + line.split("/dev/shm", 1)[1]) for line in lines if " /dev/shm/" in line}


@contextmanager
def serving(model: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A running ``serve``: the process, its URL up to /v1, and the lines it has printed."""
    serve = command("serve", str(model), "--kv-memory", "64MiB", "--log-level", "warning", *arguments)
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines: list[str] = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("Ready: "):
                    break
            assert lines[-1].startswith("Ready: "), lines
            yield process, lines[-1].split()[1], lines
        finally:
            process.kill()


def complete(url: str, model: str) -> dict:
    body = {"model": model, "prompt": list(range(40)), "max_tokens": 4, "ignore_eos": True, "return_route": True}
    request = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=PATIENCE_SECONDS) as response:
        return json.load(response)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_serve_until_a_signal_then_mixed_under_another_name_on_the_same_port(
    demo_model: Path, number: signal.Signals
) -> None:
    split = ("--prefill", "1", "--decode", "1", "--policy", "least-loaded", "--port", "0")
    with serving(demo_model, *split) as (process, url, lines):
        text = "".join(lines)
        for stage in ("weights", "KV memory", "ready", "listening"):
            assert stage in text
        answer = complete(url, "my-demo")
        assert answer["usage"]["completion_tokens"] == 4
        assert answer["splitserve"]["mode"] == "disaggregated"
        assert answer["splitserve"]["handover"]["blocks"] >= 1
        end_with(process, number)
    port = url.removesuffix("/v1").rsplit(":", 1)[1]
    mixed = ("--mixed", "1", "--port", port, "--served-model-name", "other")
    with serving(demo_model, *mixed) as (process, again, lines):
        assert again == url and "1 mixed" in lines[0]
        answer = complete(url, "other")
        assert answer["splitserve"]["mode"] == "local" and answer["splitserve"]["handover"] is None
        end_with(process, number)


def end_with(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Send the signal: ``serve`` ends in order, and so do all of its processes; none leaves shared memory."""
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 3
    segments = shared_memory_of(children)
    process.send_signal(number)
    assert process.wait(PATIENCE_SECONDS) == 0
    assert not [child for child in children if is_running(child)]
    assert not [path for path in segments if path.exists()]


def test_a_checkpoint_that_cannot_be_served_is_one_line(demo_model: Path, tmp_path: Path) -> None:
    """A worker finds it while it loads the weights."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).symlink_to(demo_model / name)
    weights = load_file(demo_model / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    serve = command("serve", str(tmp_path), "--mixed", "1", "--port", "0", "--log-level", "error")
    done = subprocess.run(serve, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert "lacks model.norm.weight" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_demo_shows_the_whole_path() -> None:
    done = subprocess.run(
        command("demo", "--max-tokens", "8"), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    for part in (
        "prefill ran on   prefill-0",
        "decode ran on    decode-0: 8 tokens",
        "KV blocks",
        "All processes ended",
    ):
        assert part in done.stdout
