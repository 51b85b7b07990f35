"""A launcher that is lost while its cluster starts: what it has stored for the next one, and what clients see."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from splitserve.orchestration.cluster.cluster import Cluster
from splitserve.orchestration.cluster.host import ChildProgress, Memory
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
