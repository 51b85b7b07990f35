"""A launcher that is lost while its cluster starts: what it has stored for the next one, and what clients see."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from splitserve.orchestration.cluster import cluster as launcher
from splitserve.orchestration.cluster.cluster import Cluster
from splitserve.orchestration.cluster.host import ChildProgress, Event, Memory
from splitserve.orchestration.cluster.supervision import KnownWorker, Snapshot
from splitserve.orchestration.hosts.local import Entries, LocalHost
from splitserve.orchestration.hosts.process import ChildProcess
from splitserve.orchestration.ray.client import RayClient
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig

ENTRIES = Entries(router="launcher_children:run_router", worker="launcher_children:run_worker")
SUPPORT = Path(__file__).parents[1] / "support"


class RememberingHost(LocalHost):
    """Host that keeps what it is given to remember, with the number of processes that were started by then."""

    def __init__(self) -> None:
        super().__init__(entries=ENTRIES, num_cores=1)
        self.num_started = 0
        self.memories: list[tuple[int, Memory]] = []

    def start_router(self, *arguments: Any) -> ChildProcess:
        self.num_started += 1
        return super().start_router(*arguments)

    def start_worker(self, *arguments: Any) -> ChildProcess:
        self.num_started += 1
        return super().start_worker(*arguments)

    def remember(self, memory: Memory) -> None:
        self.memories.append((self.num_started, memory))


def test_a_start_is_remembered_before_its_first_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next launcher would start the cluster anew, beside a router that has the port."""
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    host = RememberingHost()
    with Cluster(simple_spec(EngineConfig(model="./some/model"), num_mixed=1, port=0), host) as cluster:
        num_started, first = host.memories[0]
        assert num_started == 0 and not first.snapshot.workers and not first.url
        assert not any(memory.has_served for number, memory in host.memories if number < 2)
        _, last = host.memories[-1]
        assert last.has_served and last.url == cluster.url
        assert [worker.name for worker in last.snapshot.workers] == ["mixed-0"]


def test_a_start_that_is_continued_starts_a_worker_again_that_ended_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setattr(launcher, "START_TIMEOUT_SECONDS", 20.0)
    spec = simple_spec(EngineConfig(model="./some/model"), num_mixed=2, port=0)
    workers = [KnownWorker(f"mixed-{number}", 1, wanted=True, is_leaving=False, num_restarts=0) for number in range(2)]
    snapshot = Snapshot(revision=1, spec=spec, specs={1: spec}, workers=workers, upgrade=None)
    host = RememberingHost()
    host.prepare(spec)

    def adopt(emit: Callable[[Event], None]) -> dict[str, ChildProcess]:
        child = host.start_worker("mixed-0", spec, spec.pools[0], "tcp://127.0.0.1:1", emit)
        child.kill()
        child.join(20.0)
        return {"mixed-0": child}

    continued = Cluster(spec, host, restart_router=True)
    try:
        continued.come_back(Memory(snapshot, membership="", url=""), adopt)
        assert continued.state == "serving" and continued.ready == {"mixed-0", "mixed-1"}
    finally:
        continued.stop()


class ScriptedClient(RayClient):
    """Client of a controller that gives these answers: the name of its life, and its steps from the index asked on."""

    def __init__(self, *answers: tuple[str, list[tuple[str, str]]]) -> None:
        super().__init__("some", "127.0.0.1:1")
        self._answers = list(answers)

    def _call(self, method: Any) -> Any:
        life, steps = self._answers.pop(0)
        details = {"serving": {"url": "http://here"}}
        given = [{"name": name, "stage": stage, "detail": details.get(stage, {})} for name, stage in steps]
        return life, [msgspec.json.encode(each) for each in given]


def test_a_start_is_followed_over_several_lives_of_its_controller() -> None:
    pytest.importorskip("ray")
    router, worker, end = ("router", "listening"), ("w-0", "weights"), ("", "serving")
    seen: list[ChildProgress] = []
    client = ScriptedClient(("a", [router, worker]), ("b", []), ("b", [router]), ("c", [router, end]))
    assert client.follow_start(seen.append) == "http://here"
    assert [(each.name, each.stage) for each in seen] == [router, worker, router, router]
