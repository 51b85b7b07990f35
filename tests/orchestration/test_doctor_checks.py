"""The doctor's judgements over plain facts, and what the router remembers of those whom it turned away."""

import asyncio
import dataclasses
import importlib.metadata
import os
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from splitserve.common.security import SocketSecurity
from splitserve.models.weights.checkpoint import weights_version
from splitserve.orchestration.doctor.cluster_checks import cluster_checks
from splitserve.orchestration.doctor.machine import (
    MachineFacts,
    Package,
    PortUser,
    TorchFacts,
    port_user,
    required_packages,
    wake_seconds,
)
from splitserve.orchestration.doctor.machine_checks import (
    check_cores,
    check_packages,
    check_port,
    machine_checks,
    memlock_problem,
)
from splitserve.orchestration.doctor.model import look_at_model
from splitserve.orchestration.doctor.probe import Probe, Shape, predicted_prefix, probe_checks, probe_shape
from splitserve.orchestration.doctor.report import Check, Diagnosis
from splitserve.orchestration.doctor.worker_checks import cores_together
from splitserve.orchestration.hosts.core_plan import Wanted
from splitserve.orchestration.hosts.gpus import Gpu
from splitserve.orchestration.hosts.topology import Core, NumaNode, Topology
from splitserve.protocol.cluster_report import ClusterReport, WorkerReport, WorkerState
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.messages.membership import PeerLink, WorkerInfo, WorkerSetup
from splitserve.protocol.request import Party, Role
from splitserve.protocol.transports import expected_transport, is_by
from splitserve.router.links.links import FailedHandshakes
from splitserve.router.links.rejected_attempts import REFUSED_SECONDS, STRANGER_SECONDS, RejectedAttempts
from waiting import PATIENCE_SECONDS

LAYOUT = LayoutRecord("model", "v1", "float32", 16, 2, 2, 8)
SETUP = WorkerSetup(machine="node-1", version="1", device="cpu", cpus=[0], num_threads=1, num_cores=1, kv_bytes=1 << 20)


def worker(name: str, role: Role, *, links: tuple[PeerLink, ...] = (), **place: Any) -> WorkerReport:
    cpu = sum(name.encode())
    info = WorkerInfo(
        Party(name, 1),
        role,
        f"tcp://{name}",
        42,
        LAYOUT,
        64,
        8,
        1024,
        320,
        setup=msgspec.structs.replace(SETUP, **{"cpus": [cpu], **place}),
    )
    return WorkerReport(
        info=info, state=WorkerState.READY, silent_seconds=0.1, num_heartbeats=3, load=WorkerLoad(), links=list(links)
    )


def report(*workers: WorkerReport, **fields: Any) -> ClusterReport:
    values: dict[str, Any] = {
        "version": "1",
        "machine": "node-0",
        "pid": 1,
        "clock_seconds": 0.0,
        "model": "/model",
        "served_model_name": "model",
        "membership": "tcp://router",
        "has_secret": True,
        "heartbeat_seconds": 1.0,
        "dead_after_seconds": 5.0,
        "workers": list(workers),
    }
    return ClusterReport(**values | fields)


CMA = PeerLink("prefill-0", "cma", 3e9)
HEALTHY = (worker("prefill-0", Role.PREFILL), worker("decode-0", Role.DECODE, links=(CMA,)))


def names(checks: list[Check]) -> list[str]:
    return [problem.name for check in checks for problem in check.problems]


def test_a_healthy_report_has_no_findings() -> None:
    assert names(cluster_checks(report(*HEALTHY))) == []
    assert names(cluster_checks(report(worker("mixed-0", Role.MIXED)))) == []


@pytest.mark.parametrize(
    ("one", "other", "transport", "is_right"),
    [
        ({}, {}, "cma", True),
        ({}, {}, "sysv", True),
        ({}, {}, "tcp (software emulation)", False),
        ({}, {}, "unknown", True),
        ({}, {"machine": "node-2"}, "tcp (software emulation)", True),
        ({"rdma_devices": ["mlx5_0"]}, {"rdma_devices": ["mlx5_0"], "machine": "node-2"}, "tcp", False),
        ({"rdma_devices": ["mlx5_0"]}, {"rdma_devices": ["mlx5_0"], "machine": "node-2"}, "rc_mlx5", True),
        ({"device": "cuda:0"}, {"device": "cuda:0"}, "cuda_ipc", True),
        ({"device": "cuda:0"}, {"device": "cuda:0"}, "cuda_copy+cma", False),
        ({"device": "cuda:0"}, {}, "cuda_copy", True),
    ],
)
def test_transports(one: dict[str, Any], other: dict[str, Any], transport: str, is_right: bool) -> None:
    link = PeerLink("prefill-0", transport, 1e9)
    found = report(worker("prefill-0", Role.PREFILL, **other), worker("decode-0", Role.DECODE, links=(link,), **one))
    assert ("wrong_transport" in names(cluster_checks(found))) is not is_right


def test_a_link_with_a_problem_of_its_own_is_named_with_it() -> None:
    slow = PeerLink("prefill-0", "cuda_ipc", 1e9, "read at 1 GB/s, not at 30 or more")
    gpu = {"device": "cuda:0"}
    found = report(worker("prefill-0", Role.PREFILL, **gpu), worker("decode-0", Role.DECODE, links=(slow,), **gpu))
    (problem,) = (problem for check in cluster_checks(found) for problem in check.problems)
    assert problem.name == "wrong_transport" and "not at 30 or more" in problem.text


def test_a_transport_that_was_asked_for() -> None:
    assert expected_transport(SETUP, SETUP) == "shared memory"
    assert is_by("rc_mlx5+cuda_ipc", "cuda_ipc") and not is_by("tcp (software emulation)", "cma")
    assert names(cluster_checks(report(*HEALTHY), "tcp")) == ["wrong_transport"]


def test_a_pair_without_a_link_and_one_that_failed() -> None:
    for links in ((), (PeerLink("prefill-0", "", 0.0, "it doesn't answer"),)):
        found = report(worker("prefill-0", Role.PREFILL), worker("decode-0", Role.DECODE, links=links))
        (problem,) = (problem for check in cluster_checks(found) for problem in check.problems)
        assert problem.name == "unreachable_peer" and "tcp://prefill-0" in problem.text
        assert ("it doesn't answer" in problem.text) is bool(links)


def test_a_worker_of_another_version_and_one_that_found_wrong_bytes() -> None:
    old = worker("prefill-0", Role.PREFILL, version="0.9")
    wrong = msgspec.structs.replace(HEALTHY[1], load=WorkerLoad(kv_mismatches=2))
    assert sorted(names(cluster_checks(report(old, wrong)))) == ["kv_mismatch", "version_mismatch"]


def test_plain_kernels_are_a_problem_on_a_gpu_only() -> None:
    kernels = {"kernels": {"rms_norm": "triton", "make_attention": "reference"}}
    assert names(cluster_checks(report(worker("mixed-0", Role.MIXED, **kernels)))) == []
    assert names(cluster_checks(report(worker("mixed-0", Role.MIXED, device="cuda:0", **kernels)))) == ["slow_kernels"]


def test_memory_on_another_node() -> None:
    found = report(worker("mixed-0", Role.MIXED, remote_bytes=1 << 19))
    assert names(cluster_checks(found)) == ["remote_memory"]
    on_gpu = {"device": "cuda:0", "kv_bytes": 1 << 30, "host_kv_bytes": 1 << 20}
    found = report(worker("mixed-0", Role.MIXED, remote_bytes=1 << 19, **on_gpu))
    assert names(cluster_checks(found)) == ["remote_memory"], "what is on a GPU isn't on any node"


def test_cores_of_workers_together() -> None:
    apart = [msgspec.structs.replace(SETUP, cpus=[2 * i, 2 * i + 1], num_cores=1) for i in range(3)]
    together = [msgspec.structs.replace(SETUP, cpus=list(range(8)), num_cores=4)] * 3
    quota = [msgspec.structs.replace(SETUP, cpus=list(range(64)), num_cores=2)] * 2
    assert (cores_together(apart), cores_together(together), cores_together(quota)) == (3, 4, 2)
    assert cores_together([msgspec.structs.replace(SETUP, cpus=[], num_cores=4)]) == 4


def test_memlock_counts_kv_memory_only_where_a_network_card_reads_it() -> None:
    assert memlock_problem("w", 8 << 20, [], 1 << 30) is None
    assert memlock_problem("w", None, ["mlx5_0"], 1 << 30) is None
    problem = memlock_problem("w", 8 << 20, ["mlx5_0"], 1 << 30)
    assert problem is not None and "1.00 GiB" in problem.text and "mlx5_0" in problem.text


# ---- this machine ----

GPUS = tuple(Gpu(index, f"GPU-{index}", f"0000:{index}", "H200", 1 << 37) for index in range(2))
FACTS = MachineFacts(
    packages=(Package("torch", ">=2.11", "2.13.0", fits=True),),
    num_cores=2,
    wake_seconds=53e-6,
    topology=Topology(
        cores=(Core((0,), 0), Core((1,), 1)), nodes=tuple(NumaNode(index, 1 << 30, True) for index in range(2))
    ),
    gpus=GPUS,
    torch=TorchFacts(torch="2.13.0", cuda="13.0", gpus=[{}, {}], peer_access=[(0, 1, True), (1, 0, True)]),
    memlock_bytes=None,
    max_open_files=65536,
    shared_memory_bytes=1 << 30,
    memory_bytes=1 << 35,
)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"packages": (Package("nixl-cu13", ">=1.5", None, fits=False),)}, ["package"]),
        ({"torch": "ImportError: libcudart.so.13"}, ["package"]),
        ({"torch": TorchFacts(torch="2.13.0+cpu", cuda=None)}, ["devices"]),
        ({"gpus": "nvidia-smi doesn't answer"}, ["devices"]),
        ({"torch": msgspec.structs.replace(FACTS.torch, peer_access=[(0, 1, False)])}, ["peer_access"]),
        ({"memlock_bytes": 1 << 16}, ["low_memlock"]),
        ({"max_open_files": 256}, ["low_open_files"]),
        ({"shared_memory_bytes": 1 << 20}, ["shared_memory"]),
        (
            {"topology": Topology(FACTS.topology.cores, (NumaNode(0, 1, True), NumaNode(1, 1, False)))},
            ["numa"],
        ),
    ],
)
def test_facts_of_a_machine(changes: dict[str, Any], found: list[str]) -> None:
    values = {name: getattr(FACTS, name) for name in FACTS.__dataclass_fields__} | changes
    assert names(machine_checks(MachineFacts(**values), ["splitserve 1"])) == found


def test_running_without_being_installed_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    facts = dataclasses.replace(FACTS, packages=required_packages(with_gpus=False))
    [problem] = check_packages(facts, []).problems
    assert problem.text == "splitserve is not installed; any version is needed"


def test_how_long_a_sleeping_core_takes() -> None:
    [devices] = [check for check in machine_checks(FACTS, []) if check.name == "devices"]
    assert "2 hardware threads; one that slept runs after 53 us" in devices.text
    assert 0.0 < wake_seconds() < 1.0


def test_a_port_of_ours_is_a_problem_only_where_somebody_wants_it() -> None:
    ours, theirs = PortUser(1, "python", is_splitserve=True), PortUser(0, "in use", is_splitserve=False)
    assert not check_port("::1", 8000, None, asked_for=True).problems
    assert not check_port("127.0.0.1", 8000, ours, asked_for=False).problems
    assert check_port("127.0.0.1", 8000, ours, asked_for=True).problems
    assert check_port("127.0.0.1", 8000, theirs, asked_for=False).problems


@pytest.mark.parametrize(
    ("host", "port"), [("192.0.2.1", 8000), ("no-such-host.invalid", 8000), ("127.0.0.1", 70000), ("fe80::1", 8000)]
)
def test_an_address_that_nobody_could_use_is_named_as_such(host: str, port: int) -> None:
    [problem] = check_port(host, port, port_user(host, port), asked_for=True).problems
    assert problem.name == "unusable_address" and "--host" in problem.advice


@pytest.mark.parametrize(("num_workers", "threads", "is_too_many"), [(2, 0, False), (3, 0, True), (1, 8, True)])
def test_cores_of_a_plan(num_workers: int, threads: int, is_too_many: bool) -> None:
    wanted = [Wanted(f"mixed-{index}") for index in range(num_workers)]
    check = check_cores(FACTS.topology, 2, wanted, {each.name: threads for each in wanted})
    assert (names([check]) == ["oversubscribed_cores"]) is is_too_many


def test_a_checkpoint_that_changed_under_its_workers(tiny_qwen3: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_qwen3, tmp_path / "model"))
    before, as_dummy = weights_version(model), weights_version(model, "dummy")
    assert not look_at_model(str(model), served_versions=[before]).problems
    (weights,) = model.glob("*.safetensors")
    with weights.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")
    assert names([look_at_model(str(model), served_versions=[before])]) == ["changed_weights"]
    weights.unlink()
    assert names([look_at_model(str(model), served_versions=[before])]) == ["missing_weights"]
    assert not look_at_model(str(model), served_versions=[as_dummy]).problems, "random weights need no files"
    (model / "tokenizer.json").write_text("no JSON")
    assert names([look_at_model(str(model), "dummy")]) == ["missing_weights"]


# ---- the probe ----


def route(decode: str, *, blocks: int = 5, cached: int = 0, **fields: Any) -> dict[str, Any]:
    handover = {
        "blocks": blocks,
        "bytes": blocks << 20,
        "transport": "nixl/cma",
        "reads": 1,
        "seconds": 0.01,
        "read_seconds": 0.005,
        "cached_tokens": cached,
    }
    values = {"mode": "disaggregated", "prefill": "prefill-0", "decode": decode, "handover": handover}
    return values | {"failed_attempts": [], "attempts": 1, "handover_seconds": 0.01, "cached_tokens": 0} | fields


def probe_of(*routes: dict[str, Any]) -> Probe:
    return Probe(Shape(72, 16, 320), list(routes), [0.1] * len(routes))


def test_the_probes_prompt_fits_every_worker() -> None:
    assert probe_shape(report(*HEALTHY)) == Shape(488, 16, 320)  # half the context, less its output
    assert probe_shape(report()) is None


def test_a_probe_that_went_as_predicted() -> None:
    probe = probe_of(route("decode-0"), route("decode-1"), route("decode-0", blocks=1, cached=64))
    assert predicted_prefix(report(*HEALTHY), probe) == (64, 64)
    assert names(list(probe_checks(report(*HEALTHY), probe, None))) == []


@pytest.mark.parametrize(
    ("routes", "found"),
    [
        ([route("decode-0"), route("decode-0")], ["prefix_miss"]),
        ([route("decode-0", mode="local", handover=None)], ["not_disaggregated"]),
        ([route("decode-0", blocks=4)], ["blocks"]),
        (
            [route("decode-0", attempts=2, failed_attempts=[{"worker": "decode-1", "reason": "handover"}])],
            ["failed_attempts"],
        ),
    ],
)
def test_a_probe_that_went_otherwise(routes: list[dict[str, Any]], found: list[str]) -> None:
    assert names(list(probe_checks(report(*HEALTHY), probe_of(*routes), None))) == found


def test_a_slow_hand_over_is_judged_by_much_data_only() -> None:
    copy = TorchFacts(torch="2.13.0", cuda=None, copied="host memory", copy_bytes_per_second=1e12)
    small, large = route("decode-0"), route("decode-0")
    large["handover"]["bytes"] = 64 << 20
    assert names(list(probe_checks(report(*HEALTHY), probe_of(small), copy))) == []
    assert names(list(probe_checks(report(*HEALTHY), probe_of(large), copy))) == ["slow_handover"]


def test_without_prefix_caching_nothing_is_to_be_found() -> None:
    info = msgspec.structs.replace(HEALTHY[1].info, prefix_caching=False)
    cluster = report(HEALTHY[0], msgspec.structs.replace(HEALTHY[1], info=info))
    assert predicted_prefix(cluster, probe_of(route("decode-0"), route("decode-0"))) == (0, 0)


def test_what_a_diagnosis_prints() -> None:
    diagnosis = Diagnosis("1", "this machine", cluster_checks(report(*HEALTHY), "tcp"))
    lines = [line for check in diagnosis.checks for line in check.lines()]
    assert any(line.startswith("ok       workers ") for line in lines)
    where = next(index for index, line in enumerate(lines) if line.startswith("problem  transport "))
    assert "- wrong_transport: decode-0 reads KV" in lines[where + 1] and "what to do: " in lines[where + 2]
    assert diagnosis.summary() == "1 problem with this machine."
    assert diagnosis.as_json()["healthy"] is False


# ---- the router's part ----


def test_who_was_turned_away_is_remembered_for_a_while() -> None:
    rejected_attempts = RejectedAttempts()
    info = HEALTHY[0].info
    rejected_attempts.refuse(info, "dtype: 'float32' against 'bfloat16'", 10.0)
    rejected_attempts.stranger("10.0.0.7", 10.0)
    rejected_attempts.stranger("10.0.0.7", 11.0)
    rejected_attempts.stranger("", 11.0)
    (refused,) = rejected_attempts.refused(12.0)
    assert (refused.engine_id, refused.seconds_ago, refused.machine) == ("prefill-0", 2.0, "node-1")
    (stranger,) = rejected_attempts.strangers(12.0)
    assert (stranger.address, stranger.num_attempts, stranger.seconds_ago) == ("10.0.0.7", 2, 1.0)
    assert rejected_attempts.strangers(11.5 + STRANGER_SECONDS) == []
    assert rejected_attempts.refused(10.5 + REFUSED_SECONDS) == []
    rejected_attempts.forgive("prefill-0")
    assert rejected_attempts.refused(12.0) == []


@pytest.mark.parametrize(("ours", "theirs"), [("a" * 20, "b" * 20), ("a" * 20, "a" * 20)])
def test_failed_handshakes_are_heard_of(ours: str, theirs: str) -> None:
    async def run() -> list[str]:
        context, other = zmq.Context(), zmq.Context()
        securities = SocketSecurity(context, ours), SocketSecurity(other, theirs)
        bound, dialled = context.socket(zmq.ROUTER), other.socket(zmq.DEALER)
        securities[0].protect_bound(bound)
        securities[1].protect_connecting(dialled)
        bound.bind("tcp://127.0.0.1:*")
        addresses: list[str] = []
        failures = FailedHandshakes(bound, addresses.append)
        dialled.connect(bound.getsockopt_string(zmq.LAST_ENDPOINT))
        deadline = time.monotonic() + (PATIENCE_SECONDS if ours != theirs else 1.0)
        while not addresses and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        failures.close()
        for socket in (bound, dialled):
            socket.close(linger=0)
        for security in securities:
            security.close()
        for each in (context, other):
            each.term()
        return addresses

    heard = asyncio.run(run())
    assert bool(heard) is (ours != theirs) and set(heard) <= {"127.0.0.1", ""}, (
        "whatever is gone too soon has no address"
    )
