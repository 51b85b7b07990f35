"""Cores that are kept awake: who spins, when it rests, and that it ends with the worker."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch

from running_loop import FaultyRunner, running
from splitserve.common.cores import awake_cpus, usable_cpus
from splitserve.common.errors import ConfigError
from splitserve.orchestration.hosts.child import Order, cpus_for, run
from splitserve.orchestration.spec.document import parse_spec
from splitserve.orchestration.spec.expansion import Secrets, router_config
from splitserve.protocol.config import CoreAffinity, EngineConfig, WorkerConfig
from splitserve.protocol.request import Role
from splitserve.worker import entry
from splitserve.worker.entry import run_worker
from splitserve.worker.machine import awake_cores
from splitserve.worker.machine.awake_cores import REST_AFTER_SECONDS, AwakeCores, kept_awake
from waiting import wait_until

SPINS = pytest.mark.skipif(
    not hasattr(os, "SCHED_IDLE") or awake_cores.current_cpu_quota() is not None, reason="needs Linux and no CPU quota"
)
STARTS = "import os, sys; from splitserve.worker.machine.awake_cores import AwakeCores as A"
CPUS = sorted(usable_cpus())[:2]


def spinners(pid: int) -> list[int]:
    """Processes of the program ``pid``, in the order of their start."""
    return sorted(child.pid for child in psutil.Process(pid).children())


def state(pid: int) -> str:
    """As the kernel writes it: R runs or could, S sleeps, T is stopped, Z has ended. "" once it's gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def states(pids: list[int]) -> str:
    return "".join(map(state, pids))


def config(*, keep: bool, cpus: tuple[int, ...] = ()) -> WorkerConfig:
    engine = EngineConfig(model="", keep_cores_awake=keep)
    return WorkerConfig(engine_id="w", role=Role.MIXED, engine=engine, membership="", affinity=CoreAffinity(cpus=cpus))


def test_worker_and_router_stay_where_cores_are_awake() -> None:
    assert cpus_for(config(keep=False)) == () and cpus_for(config(keep=False, cpus=(900, 901))) == (900, 901)
    assert cpus_for(config(keep=True)) == awake_cpus(usable_cpus())
    assert cpus_for(config(keep=True, cpus=(900, 901, 902))) == {900, 902}
    for keep, expected in ((True, awake_cpus(usable_cpus())), (False, ())):
        engine = f"{{engine: {{keep_cores_awake: {str(keep).lower()}}}}}"
        pools = f"[{{name: p, role: prefill}}, {{name: d, role: decode, {engine[1:-1]}}}]"
        spec = parse_spec(f"model: {{path: /m}}\npools: {pools}\n")
        router = router_config(spec, Secrets(), "127.0.0.1")
        assert router.on_awake_cores is keep and cpus_for(router) == expected


def test_a_worker_on_a_cpu_needs_its_cores_itself(tiny_qwen3: Path) -> None:
    engine = EngineConfig(model=str(tiny_qwen3), device="cpu", keep_cores_awake=True)
    with pytest.raises(ConfigError, match=r"worker on a CPU.*--keep-cores-awake is for GPUs"):
        run_worker(msgspec.structs.replace(config(keep=True), engine=engine), lambda *_: None)


class Notes:
    """Remembers what a loop said, without repetitions."""

    def __init__(self) -> None:
        self.said: list[bool] = []

    def note(self, is_busy: bool, now: float) -> None:
        del now
        if self.said[-1:] != [is_busy]:
            self.said.append(is_busy)


def test_the_loop_tells_when_there_is_something_to_do() -> None:
    with running(FaultyRunner()) as run:
        notes = Notes()
        run.loop._io = dataclasses.replace(run.loop._io, cores=notes)
        wait_until(lambda: notes.said == [False])
        run.submit("r", max_tokens=4)
        assert len(run.tokens_of("r")) == 4
        wait_until(lambda: len(notes.said) == 3)
    assert notes.said == [False, True, False]


@pytest.fixture
def cores() -> Iterator[AwakeCores]:
    awake = AwakeCores(CPUS)
    yield awake
    awake.close()


@SPINS
def test_each_core_has_a_process_that_runs_where_nobody_else_does(cores: AwakeCores) -> None:
    pids = spinners(cores.pid)
    wait_until(lambda: states(pids) == "R" * len(CPUS))
    wait_until(lambda: [os.sched_getaffinity(pid) for pid in pids] == [{cpu} for cpu in CPUS])
    assert {os.sched_getscheduler(pid) for pid in pids} == {os.SCHED_IDLE}
    assert os.sched_getscheduler(cores.pid) == os.SCHED_OTHER, "it ends when it is told to, however busy the cores are"
    assert {os.getsid(pid) for pid in pids} == {os.getsid(0)}, "else it would share cores with other sessions first"


@SPINS
def test_they_rest_when_nothing_was_to_do_for_a_while(cores: AwakeCores) -> None:
    now, pids = awake_cores.time.monotonic(), spinners(cores.pid)
    stopped, awake = "T" * len(CPUS), "R" * len(CPUS)
    cores.note(False, now + REST_AFTER_SECONDS - 1)
    wait_until(lambda: states(pids) == awake)
    cores.note(False, now + REST_AFTER_SECONDS + 1)
    wait_until(lambda: states(pids) == stopped)
    cores.note(True, now + 100)
    wait_until(lambda: states(pids) == awake)
    cores.note(False, now + 99 + REST_AFTER_SECONDS)
    assert states(pids) == awake
    cores.note(False, now + 100 + REST_AFTER_SECONDS)
    wait_until(lambda: states(pids) == stopped)


@SPINS
@pytest.mark.parametrize("rests", [False, True])
def test_they_end_with_a_worker_that_is_killed(rests: bool) -> None:
    note = "a.note(False, float('inf')); " if rests else ""
    code = f"{STARTS}; a = A({CPUS}); {note}print(a.pid, flush=True); sys.stdin.read()"
    worker = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None and worker.stdin is not None
    program = int(worker.stdout.readline())
    pids = spinners(program)
    wait_until(lambda: states(pids) == ("T" if rests else "R") * len(CPUS))
    worker.kill()
    wait_until(lambda: set(states([program, *pids])) <= {"Z"})
    worker.wait()
    worker.stdin.close()
    worker.stdout.close()


@SPINS
def test_one_that_was_killed_is_told_of_and_missed_by_nobody(
    cores: AwakeCores, caplog: pytest.LogCaptureFixture
) -> None:
    pids = spinners(cores.pid)
    os.kill(cores.pid, signal.SIGKILL)
    wait_until(lambda: set(states([cores.pid, *pids])) <= {"Z"})
    cores.note(False, float("inf"))
    cores.note(True, 0.0)
    assert caplog.text.count("aren't kept awake any more") == 1


def test_a_quota_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awake_cores.os, "SCHED_IDLE", 5, raising=False)
    monkeypatch.setattr(awake_cores, "current_cpu_quota", lambda: 1.5)
    with pytest.raises(ConfigError, match=r"quota \(1.5 cores\).*without --keep-cores-awake"):
        AwakeCores(CPUS)
    with kept_awake(False, CPUS) as cores:
        cores.note(True, 0.0)


@SPINS
def test_a_platform_that_cannot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    popen: Callable[..., subprocess.Popen[str]] = subprocess.Popen
    forbidden = (
        "import os, runpy, sys\n"
        "def refuse(*_): raise PermissionError(1, 'no')\n"
        "os.sched_setscheduler = refuse\n"
        f"sys.argv[0] = '-'; runpy.run_module({awake_cores.__name__!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(
        awake_cores.subprocess, "Popen", lambda words, **more: popen([words[0], "-c", forbidden, *words[3:]], **more)
    )
    with pytest.raises(ConfigError, match=r"this platform can't.*no.*without --keep"), kept_awake(True, CPUS):
        pass


def test_a_process_that_cannot_be_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would run on cores that sleep, or spin on all of them."""
    told: list[str] = []
    status = SimpleNamespace(report=lambda _stage, detail: told.append(detail["message"]))
    raw = msgspec.Raw(msgspec.json.encode(config(keep=True, cpus=(9000,))))
    order = Order(name="w", kind="worker", entry="json:loads", config=raw, status_fd=0)
    assert run(order, status, lambda: None) == 2  # type: ignore[arg-type]
    assert told == ["w can't stay on some of the cores; go without --keep-cores-awake"]


def test_too_few_cores_to_have_half_of_them(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "usable_cpus", lambda: {0, 1, 2})
    monkeypatch.setattr(entry, "device_of", lambda *_: torch.device("cuda"))
    engine = EngineConfig(model=str(tiny_qwen3), device="cuda", keep_cores_awake=True)
    with pytest.raises(ConfigError, match="here 3 hardware threads; it needs 4"):
        run_worker(msgspec.structs.replace(config(keep=True), engine=engine), lambda *_: None)
