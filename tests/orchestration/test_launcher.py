"""The local launcher: start, failure at start, death of a child, orderly end, and no orphans, with real processes."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from running import is_running
from splitserve.common.errors import ConfigError
from splitserve.orchestration.cluster.host import ChildProgress
from splitserve.orchestration.cluster.launcher import (
    Entries,
    LaunchError,
    LaunchInterruptedError,
    LocalCluster,
    probe_ready,
    stop_on_signals,
)
from splitserve.orchestration.cluster.restarts import MAX_BACKOFF_SECONDS, MAX_QUICK_DEATHS, SOON_SECONDS, RestartPolicy
from splitserve.orchestration.cluster.roster import WorkerPhase
from splitserve.orchestration.control.requests import ClusterStatus, GetStatus
from splitserve.orchestration.hosts.process import child_environment
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig
from waiting import PATIENCE_SECONDS, wait_until

ENTRIES = Entries(router="launcher_children:run_router", worker="launcher_children:run_worker")
SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(autouse=True)
def _children_import_from_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))


@pytest.fixture
def events() -> list[ChildProgress]:
    return []


@pytest.fixture
def make_cluster(events: list[ChildProgress]) -> Iterator[Callable[..., LocalCluster]]:
    clusters = []

    def make(*, restart: bool = True, host_kv_memory_bytes: int = 0, **numbers: int) -> LocalCluster:
        engine = EngineConfig(model="./some/model", host_kv_memory_bytes=host_kv_memory_bytes)
        spec = simple_spec(engine, port=0, **numbers)
        clusters.append(LocalCluster(spec, entries=ENTRIES, show=events.append, num_cores=5, restart=restart))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.stop()


def test_starts_serves_and_leaves_nothing(make_cluster, events: list[ChildProgress]) -> None:
    cluster = make_cluster(num_prefill=2, num_decode=1)
    with cluster:
        assert set(cluster.pids) == {"router", "prefill-0", "prefill-1", "decode-0"}
        assert probe_ready(cluster.url)[0]
        pids = list(cluster.pids.values())
        assert all(is_running(pid) for pid in pids)
        assert {os.getsid(pid) for pid in pids} == {os.getsid(0)} and {os.getpgid(pid) for pid in pids} == set(pids)
    assert not any(is_running(pid) for pid in pids)
    assert not probe_ready(cluster.url)[0]
    threads = {event.name: event.detail["threads"] for event in events if event.stage == "ready"}
    assert threads == {"prefill-0": "2", "prefill-1": "2", "decode-0": "1"}


def test_children_get_thread_counts_and_membership(make_cluster, events: list[ChildProgress]) -> None:
    with make_cluster(num_mixed=1):
        pass
    [event] = [event for event in events if event.stage == "environment"]
    assert {event.detail["membership"]} == {each.detail["endpoint"] for each in events if each.stage == "membership"}
    assert json.loads(event.detail["variables"])["OMP_NUM_THREADS"] == "5"


def test_the_membership_port_is_held_without_a_router(make_cluster, events: list[ChildProgress]) -> None:
    with make_cluster(num_mixed=1, restart=False) as cluster:
        [endpoint] = {event.detail["endpoint"] for event in events if event.stage == "membership"}
        address = (urlsplit(endpoint).hostname, urlsplit(endpoint).port)
        os.kill(cluster.pids["router"], signal.SIGKILL)
        assert cluster.watch() == 1
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind(address)
    with socket.socket() as other:
        other.bind(address)


def test_the_status_counts_restarts_of_the_router(make_cluster) -> None:
    with make_cluster(num_mixed=1) as cluster:
        watch = threading.Thread(target=cluster.watch)
        watch.start()
        pid = cluster.pids["router"]
        try:
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: cluster.pids.get("router", pid) != pid and status_of(cluster).router.seconds_ready)
            router = status_of(cluster).router
            assert (router.num_restarts, router.phase) == (1, WorkerPhase.READY)
            assert router.last_words == "was ended by SIGKILL" and router.due_in_seconds is None
        finally:
            cluster.request_stop("test")
            watch.join(PATIENCE_SECONDS)


def status_of(cluster: LocalCluster) -> ClusterStatus:
    reply = cluster._reply(GetStatus())
    assert isinstance(reply, ClusterStatus)
    return reply


def test_a_cluster_without_a_secret_draws_one(
    make_cluster, events: list[ChildProgress], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    for _ in range(2):
        events.clear()
        with make_cluster(num_prefill=1, num_decode=1) as cluster:
            (secret,) = {event.detail["secret"] for event in events if event.stage == "secret"}
            drawn.append(secret)
            for pid in cluster.pids.values():
                process = psutil.Process(pid)
                assert secret not in "".join([*process.cmdline(), *process.environ().values()])
    assert len(set(drawn)) == 2 and all(re.fullmatch("drawn-keys:[0-9a-f]{128}", secret) for secret in drawn)
    events.clear()
    monkeypatch.setenv("SPLITSERVE_SECRET", "one that is configured")
    with make_cluster(num_mixed=1):
        pass
    assert {event.detail["secret"] for event in events if event.stage == "secret"} == {"one that is configured"}


def test_a_worker_that_cannot_be_started(make_cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise ConfigError("mixed-0 needs 1 GPUs; 0 of 1 are free")

    monkeypatch.setattr("splitserve.orchestration.hosts.local.LocalHost.start_worker", refuse)
    cluster = make_cluster(num_mixed=1)
    with pytest.raises(LaunchError, match="mixed-0 can't be started: mixed-0 needs 1 GPUs; 0 of 1 are free"):
        cluster.start()
    assert not cluster.pids


def test_second_start_on_the_same_port(make_cluster) -> None:
    with make_cluster(num_mixed=1) as first:
        port = int(first.url.rsplit(":", 1)[1])
    spec = simple_spec(EngineConfig(model="./some/model"), port=port, num_mixed=1)
    with LocalCluster(spec, entries=ENTRIES) as second:
        assert second.url == first.url


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("decode-0=refuse", r"^decode-0: model.norm.weight is missing: take a complete checkpoint$"),
        ("decode-0=bug", r"^decode-0: ZeroDivisionError: nobody foresaw this$"),
        ("decode-0=crash", r"^decode-0: was ended by SIGKILL$"),
        ("decode-0=half-a-line", r"^decode-0: was ended by SIGKILL$"),
    ],
)
def test_failure_at_start_ends_everything_with_its_message(
    make_cluster, monkeypatch: pytest.MonkeyPatch, behaviour: str, message: str
) -> None:
    monkeypatch.setenv("SPLITSERVE_TEST_BEHAVIOUR", behaviour)
    cluster = make_cluster(num_prefill=1, num_decode=1)
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(LaunchError, match=message):
        cluster.start()
    assert {child.pid for child in psutil.Process().children()} <= before


def test_router_that_never_gets_ready_is_an_error(make_cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITSERVE_TEST_BEHAVIOUR", "router=never-ready")
    monkeypatch.setattr("splitserve.orchestration.cluster.cluster.ROUTER_READY_TIMEOUT_SECONDS", 0.3)
    with pytest.raises(LaunchError, match=r"the router is not: GET .*/ready gives 503"):
        make_cluster(num_mixed=1).start()


def test_workers_start_beside_the_router(
    make_cluster, events: list[ChildProgress], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The router waits until a worker has loaded: workers that waited for the router would never be ready."""
    monkeypatch.setenv("SPLITSERVE_TEST_LOADED", str(tmp_path / "loaded"))
    monkeypatch.setattr("splitserve.orchestration.cluster.cluster.START_TIMEOUT_SECONDS", PATIENCE_SECONDS)
    with make_cluster(num_prefill=1, num_decode=1) as cluster:
        assert cluster.ready == {"prefill-0", "decode-0"}
    stages = [event.stage for event in events]
    assert stages.index("weights") < stages.index("listening")


def test_a_router_that_fails_at_start_ends_the_workers_beside_it(
    make_cluster, events: list[ChildProgress], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPLITSERVE_TEST_LOADED", str(tmp_path / "loaded"))
    monkeypatch.setenv("SPLITSERVE_TEST_BEHAVIOUR", "router=refuse")
    cluster = make_cluster(num_mixed=1)
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(LaunchError, match=r"^router: tokenizer\.json is missing: take a complete checkpoint$"):
        cluster.start()
    assert "weights" in [event.stage for event in events]
    assert {child.pid for child in psutil.Process().children()} <= before


def test_stop_request_during_start(make_cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITSERVE_TEST_BEHAVIOUR", "mixed-0=slow")
    cluster = make_cluster(num_mixed=1)
    threading.Timer(0.5, cluster.request_stop, ("SIGINT",)).start()
    with pytest.raises(LaunchInterruptedError, match="SIGINT"):
        cluster.start()


def test_dead_worker_is_reported_and_the_rest_goes_on(make_cluster, caplog: pytest.LogCaptureFixture) -> None:
    cluster = make_cluster(num_prefill=1, num_decode=2, restart=False)
    with cluster:
        statuses: list[int] = []
        watcher = threading.Thread(target=lambda: statuses.append(cluster.watch()))
        watcher.start()
        os.kill(cluster.pids["decode-1"], signal.SIGKILL)
        wait_until(lambda: "decode-1 is not restarted; decode-0, prefill-0, router continue" in caplog.text)
        assert "decode-1: was ended by SIGKILL" in caplog.text
        assert probe_ready(cluster.url)[0]
        cluster.request_stop("SIGTERM")
        watcher.join(PATIENCE_SECONDS)
        assert statuses == [0]


@pytest.mark.parametrize("victim", ["router", "mixed-0"])
def test_death_of_the_router_or_the_last_worker_ends_all(make_cluster, victim: str) -> None:
    with make_cluster(num_mixed=1, restart=False) as cluster:
        os.kill(cluster.pids[victim], signal.SIGKILL)
        assert cluster.watch() == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_ends_is_started_again(make_cluster, number: signal.Signals) -> None:
    with make_cluster(num_prefill=1, num_decode=1) as cluster, cluster.supervised():
        before = cluster.pids
        cluster.send_signal("decode-0", number)
        assert "decode-0" not in cluster.ready
        assert cluster.wait_ready("decode-0", PATIENCE_SECONDS)
        assert cluster.pids["decode-0"] != before["decode-0"]
        assert cluster.pids["prefill-0"] == before["prefill-0"] and is_running(cluster.pids["decode-0"])
        pids = cluster.pids.values()
    assert not any(is_running(pid) for pid in pids)


def test_workers_that_all_die_at_once_come_back(make_cluster) -> None:
    with make_cluster(num_mixed=2) as cluster, cluster.supervised():
        for _ in range(2):
            for name in ("mixed-0", "mixed-1"):
                cluster.send_signal(name, signal.SIGKILL)
            assert all(cluster.wait_ready(name, PATIENCE_SECONDS) for name in ("mixed-0", "mixed-1"))


def test_a_worker_that_cannot_be_started_any_more_is_given_up_in_the_end(
    make_cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("splitserve.orchestration.cluster.restarts.MAX_QUICK_DEATHS", 2)
    with make_cluster(num_mixed=1) as cluster:
        monkeypatch.setenv("SPLITSERVE_TEST_BEHAVIOUR", "mixed-0=crash")
        cluster.send_signal("mixed-0", signal.SIGKILL)
        assert cluster.watch() == 1
    assert "mixed-0 is not restarted" in caplog.text


def test_the_end_of_a_supervised_cluster_is_an_error(make_cluster, caplog: pytest.LogCaptureFixture) -> None:
    cluster = make_cluster(num_mixed=1, restart=False)
    with pytest.raises(LaunchError, match="ended by itself"), cluster, cluster.supervised():
        cluster.send_signal("router", signal.SIGKILL)
        wait_until(lambda: "the router is gone" in caplog.text)


def test_restarts_wait_longer_each_time_and_end() -> None:
    chosen, policy = random.Random(0), RestartPolicy()
    assert policy.on_death(SOON_SECONDS, chosen) == 0.0
    assert policy.on_death(1.0, chosen) == 0.0, "the first quick death may be chance"
    delays = [policy.on_death(1.0, chosen) for _ in range(MAX_QUICK_DEATHS - 1)]
    assert None not in delays
    assert all(0.5 * 2**n <= delay <= 2**n for n, delay in enumerate(delays[:5]) if delay is not None)
    assert max(delay or 0.0 for delay in delays) <= MAX_BACKOFF_SECONDS
    assert policy.on_death(1.0, chosen) is None
    assert policy.on_death(SOON_SECONDS, chosen) == 0.0, "whoever served for a while begins anew"
    assert RestartPolicy().on_death(None, chosen) != 0.0, "it never got ready: it might not next time either"


@pytest.mark.parametrize(("host_gib", "seconds"), [(0, "0.5"), (4, "1.5")])
def test_child_that_ignores_sigterm_is_killed(
    host_gib: int, seconds: str, make_cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Later where a large host tier is given back."""
    monkeypatch.setenv("SPLITSERVE_TEST_BEHAVIOUR", "mixed-0=stubborn")
    monkeypatch.setattr("splitserve.orchestration.cluster.children.STOP_GRACE_SECONDS", 0.5)
    cluster = make_cluster(num_mixed=1, host_kv_memory_bytes=host_gib << 30)
    cluster.start()
    pids = list(cluster.pids.values())
    cluster.stop()
    assert not any(is_running(pid) for pid in pids)
    assert "mixed-0" in caplog.text and f"did not end within {seconds} s: killed" in caplog.text


LAUNCHER_PROGRAM = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may have been started with nohup
from splitserve.protocol.config import EngineConfig
from splitserve.orchestration.cluster.launcher import Entries, LocalCluster, stop_on_signals
from splitserve.orchestration.spec.shorthand import simple_spec
cluster = LocalCluster(
    simple_spec(EngineConfig(model="./some/model"), port=0, num_prefill=1, num_decode=1),
    entries=Entries(router="launcher_children:run_router", worker="launcher_children:run_worker"),
)
with stop_on_signals(cluster), cluster:
    print(*cluster.pids.values(), flush=True)
    sys.exit(cluster.watch())
"""


@pytest.fixture
def launcher() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A launcher in a process of its own, and the pids of its children."""
    with subprocess.Popen([sys.executable, "-c", LAUNCHER_PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, [int(pid) for pid in process.stdout.readline().split()]
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_launcher_and_children(launcher, number: signal.Signals) -> None:
    process, pids = launcher
    assert len(pids) == 3
    process.send_signal(number)
    assert process.wait(PATIENCE_SECONDS) == 0
    assert not any(is_running(pid) for pid in pids)


def test_an_ignored_hangup_stays_ignored(make_cluster) -> None:
    previous, terminate = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.getsignal(signal.SIGTERM)
    try:
        with stop_on_signals(make_cluster(num_mixed=1)):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_IGN, signal.SIG_DFL, terminate)
        assert signal.getsignal(signal.SIGTERM) is terminate
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_no_orphans_after_a_launcher_was_killed_that_waited_for_its_router(tmp_path: Path) -> None:
    """The workers still load then."""
    environment = {
        **os.environ,
        "SPLITSERVE_TEST_LOADED": str(tmp_path / "loaded"),
        "SPLITSERVE_TEST_BEHAVIOUR": "prefill-0=slow decode-0=slow",
    }
    with subprocess.Popen([sys.executable, "-c", LAUNCHER_PROGRAM], env=environment) as process:
        try:
            children = psutil.Process(process.pid).children
            wait_until(lambda: len(children()) == 3, "router and workers run")
            pids = [child.pid for child in children()]
        finally:
            process.kill()
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def test_no_orphans_after_the_launcher_was_killed(launcher) -> None:
    process, pids = launcher
    assert len(pids) == 3 and all(is_running(pid) for pid in pids)
    process.kill()
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def test_stubborn_orphans_end_too(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("SPLITSERVE_TEST_BEHAVIOUR", "prefill-0=stubborn")
    process, pids = request.getfixturevalue("launcher")
    process.kill()
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def test_environment_keeps_what_the_user_has_set() -> None:
    environment = child_environment(3, {"GOMP_SPINCOUNT": "7", "OMP_NUM_THREADS": "64", "HOME": "/x"})
    assert environment["GOMP_SPINCOUNT"] == "7"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["HOME"] == "/x"
    assert "OMP_NUM_THREADS" not in child_environment(0, {})
