"""Fixtures that several tests share: tiny checkpoints of both architectures, made once per run."""

import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from abrupt_end import end_abruptly, is_of_xdist
from command_line import splitserve
from compiled_tests import compiled_once
from orderly_end import end_in_order
from quick_interpreter import make_quick
from splitserve.orchestration.hosts import forking
from time_limit import TimeLimit
from two_heads import two_heads  # noqa: F401  (a fixture)

if not Path("/dev/nvidiactl").exists():  # no GPU: Triton's kernels run under its interpreter; read at triton's import
    os.environ["TRITON_INTERPRET"] = "1"

# Else PyTorch sets it when it first needs it, and processes with another environment get a fork server of their own.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"))
forking.IDLE_SECONDS = 1000.0  # a run of tests has pauses, and a new server imports PyTorch anew

# A shell's background jobs ignore it, and so would everything that is started here.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How fast a machine is decides nothing, and each run is the same; --hypothesis-profile=random looks for more.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("same", settings.get_profile("random"), derandomize=True)
settings.load_profile("same")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Turn the collector off while modules are imported, whose objects stay: it would take a fifth of the time."""
    gc.disable()
    with compiled_once(session.config):
        return (yield)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # or each full pass would go over all modules' objects
    gc.set_threshold(20_000, 50, 100)  # tests make many objects, and little that only the collector frees
    gc.enable()
    if os.environ.get("TRITON_INTERPRET") and "triton" in sys.modules:
        make_quick()
    if is_of_xdist(session.config) and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # the other cores have other processes of pytest-xdist


def pytest_configure(config: pytest.Config) -> None:
    end_abruptly(config)
    end_in_order(config)
    config.pluginmanager.register(TimeLimit(config))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not is_of_xdist(session.config):
        gc.unfreeze()  # extensions look for what is left over at the end


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """pytest-xdist asks for it."""
    from lanes import Lanes

    return Lanes(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let the two long lanes of pytest-xdist go first; in one process there are none."""
    if is_of_xdist(item.config):
        from lanes import give_way

        give_way(item)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Note the versions that run, commit and PyTorch among them, as properties of the JUnit file if there is one."""
    for plugin in session.config.pluginmanager.get_plugins():
        if hasattr(plugin, "add_global_property"):
            from splitserve.benchmarks.common.report import machine, versions

            for name, value in {**versions(), "gpus": "; ".join(machine()["gpus"])}.items():
                plugin.add_global_property(name, value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("SPLITSERVE_SLOW_TESTS"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow; others are much like it: scripts/long-tests slow"))
    for marker, needed, reason in (("gpu", 1, "needs a GPU"), ("gpu2", 2, "needs two GPUs")):
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and _num_gpus() < needed:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a Qwen3 checkpoint of about 5 MB, with tokenizer and chat template."""
    from splitserve.models.demo.checkpoint import write_demo_model

    return write_demo_model(tmp_path_factory.mktemp("checkpoints") / "tiny-qwen3", architecture="qwen3")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a Llama checkpoint of about 5 MB, with llama3 rope scaling, tokenizer and chat template."""
    from splitserve.models.demo.checkpoint import write_demo_model

    return write_demo_model(tmp_path_factory.mktemp("checkpoints") / "tiny-llama", architecture="llama")


@pytest.fixture(scope="session")
def chat_tokens(tiny_qwen3: Path) -> list[list[list[int]]]:
    """Tokens of the chats of tier_chats, by user and turn, from a worker with room for all of them."""
    from small_clusters import cluster
    from tier_chats import chat

    with cluster(tiny_qwen3, "mixed") as plenty:
        return chat(plenty.url, tiny_qwen3)[0]


@pytest.fixture(autouse=True)
def logging_stays_as_it_was() -> Iterator[None]:
    """Commands that run in this process set up logging: a later test would log to the captured output of an earlier, or
    not at all."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.setLevel(level)
    for handler in list(root.handlers):
        if handler not in before and type(handler).__module__ == "splitserve.common.logs":
            root.removeHandler(handler)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch with one thread: tiny operations gain nothing from more, and lose much on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The state folder of a test's commands; clusters that still run end with the test."""
    root = tmp_path / "state"
    monkeypatch.setenv("SPLITSERVE_STATE_DIR", str(root))
    yield root
    for lock in root.glob("*/lock"):
        splitserve("down", "--name", lock.parent.name)
