"""The cores of this machine: processes and threads that are bound to them."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from splitserve.common.cores import usable_cpus
from splitserve.kvconnector.layout.numa_memory import remote_bytes
from splitserve.orchestration.cli.display import describe_progress
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.document import parse_spec
from splitserve.protocol.config import CoreAffinity
from splitserve.worker.machine.threads import cpus_of_thread, pin_threads

has_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the platform can't")
BIND = """
import os, threading
from splitserve.common.cores import usable_cpus
from splitserve.orchestration.hosts.affinity import bind_process
one = {min(usable_cpus())}
print(bind_process(one))
thread = threading.Thread(target=lambda: print(os.sched_getaffinity(0) == one))
thread.start(); thread.join()
print(bind_process({10**6}))
"""


@has_affinity
def test_a_process_is_bound_with_all_that_it_starts() -> None:
    done = subprocess.run([sys.executable, "-c", BIND], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "False"], "the last is a core that isn't there"


@has_affinity
def test_threads_are_moved_by_what_they_do() -> None:
    first, last = min(usable_cpus()), max(usable_cpus())
    affinity = CoreAffinity(cpus=(first, last), model_cpus=(first,), transfer_cpus=(last,))
    stop = threading.Event()
    seen: dict[str, set[int]] = {}
    names = ["model", "read-0/rank-0/w-0@1", "nixl-serve", "loads-from-host", "status-w-0"]
    threads = [
        threading.Thread(target=lambda n=name: (stop.wait(), seen.update({n: os.sched_getaffinity(0)})), name=name)
        for name in names
    ]
    for thread in threads:
        thread.start()
    moved = pin_threads(affinity)
    stop.set()
    for thread in threads:
        thread.join()
    assert {name: moved[name] for name in names[:4]} == dict(
        zip(names[:4], [(first,), (last,), (last,), (last,)], strict=True)
    )
    assert all(seen[name] == set(moved[name]) for name in names[:4])
    assert seen["status-w-0"] == usable_cpus() and "MainThread" not in moved
    assert pin_threads(CoreAffinity()) == {}


def test_which_threads_are_which() -> None:
    affinity = CoreAffinity(model_cpus=(0,), transfer_cpus=(1,))
    assert [
        cpus_of_thread(name, affinity) for name in ("model-launch", "digest-3", "stores-to-disk", "MainThread")
    ] == [
        (0,),
        (1,),
        (1,),
        (),
    ]


def test_remote_bytes_are_counted() -> None:
    assert remote_bytes({0: 75, 1: 25}, 4096 * 1000, 0) == 1024 * 1000
    assert remote_bytes({0: 75}, 4096, 0) == 0
    assert remote_bytes({0: 1, 1: 1}, 4096, None) == 0
    assert remote_bytes({}, 4096, 0) == 0


@has_affinity
@pytest.mark.skipif(len(usable_cpus()) < 2, reason="needs two cores")
def test_a_workers_threads_are_where_the_spec_says(tiny_qwen3: Path) -> None:
    first, *_, last = sorted(usable_cpus())
    affinity = f"{{cores: ['{first},{last}'], transfer_cores: ['{last}']}}"
    pool = f"{{name: w, role: mixed, memory: {{kv: 8MiB}}, affinity: {affinity}}}"
    shown: list[str] = []
    spec = parse_spec(f"model: {{path: {tiny_qwen3}}}\npools: [{pool}]\nrouter: {{port: 0}}")
    with LocalCluster(
        spec, log_level="warning", show=lambda event: shown.append(describe_progress(event) or "")
    ) as cluster:
        tasks = Path(f"/proc/{cluster.pids['w-0']}/task")
        affinities = [os.sched_getaffinity(int(task.name)) for task in tasks.iterdir()]
    assert {first} in affinities and {last} in affinities
    assert all(cpus <= {first, last} for cpus in affinities)
    assert any(f"cores: model {first}, transfer {last}" in line for line in shown)
