"""``splitserve doctor``: problems of this machine, of a cluster to be started on it, or of a running cluster; then a
request through the real path.

    splitserve doctor                        this machine, with a small cluster of its own for the probe
    splitserve doctor MODEL [options]        likewise, and the start of `splitserve serve MODEL [options]`
    splitserve doctor --against URL          a running cluster

Exit status: 0 no problem, 1 problems, 2 the doctor couldn't look (wrong options, wrong key, no Splitserve endpoint).
"""

import argparse
import json
import signal
import socket
import tempfile
from collections.abc import Callable, Collection, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec

from splitserve import __version__
from splitserve.common.errors import SplitserveError
from splitserve.orchestration.cli.client import LocalClient, status_of
from splitserve.orchestration.cli.options import cluster_spec, flag_of
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.cluster.roster import WorkerPhase
from splitserve.orchestration.control.requests import ClusterStatus
from splitserve.orchestration.control.state_folder import known_clusters
from splitserve.orchestration.doctor.cluster import settled_report, shows_right_secret
from splitserve.orchestration.doctor.cluster_checks import (
    check_connections,
    check_integrity,
    check_workers,
    cluster_checks,
)
from splitserve.orchestration.doctor.http import Endpoint, UnreachableError
from splitserve.orchestration.doctor.machine import look_at_machine, port_user, versions_of, with_torch
from splitserve.orchestration.doctor.machine_checks import check_port, machine_checks, quick_checks, torch_checks
from splitserve.orchestration.doctor.model import look_at_cache, look_at_model
from splitserve.orchestration.doctor.overview import check_bottleneck, read_overview
from splitserve.orchestration.doctor.plan import spec_checks
from splitserve.orchestration.doctor.probe import look_by_probe
from splitserve.orchestration.doctor.report import Check, Diagnosis, Problem, check, skipped
from splitserve.orchestration.doctor.transport_checks import check_transports
from splitserve.orchestration.spec.cluster_spec import SECRET_VARIABLE, ClusterSpec, PoolSpec
from splitserve.orchestration.spec.expansion import read_operators_key, read_secret, resolve_secrets
from splitserve.orchestration.spec.hub import with_local_model
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig, ProtocolConfig

EXIT_PROBLEMS = 1
THIS_MACHINE = "this machine"
_VERSIONS = ("torch", "nixl-cu13", "nixl-cu12", "triton", "flashinfer-python", "transformers", "ray")
_KV_MEMORY_BYTES = 64 << 20
_PATIENT = ProtocolConfig(dead_after_seconds=15.0, read_deadline_seconds=15.0)
"""Timeouts of the probe's own cluster: long, since the load of this machine isn't being tested."""

Show = Callable[[Check], None]


def run_doctor(options: argparse.Namespace) -> int:
    """Run all checks and print them; returns the exit status. Raises :class:`SplitserveError` if it can't look."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the probe's cluster in order, as on Ctrl-C
    show: Show = _be_silent if options.json else _print_check
    diagnosis = Diagnosis(__version__, options.against or THIS_MACHINE)
    looks = _running_cluster(options, diagnosis) if options.against else _this_machine(options, diagnosis)
    for each in looks:
        diagnosis.checks.append(each)
        show(each)
    if options.json:
        print(json.dumps(diagnosis.as_json(), indent=2))
    else:
        print(f"\n{diagnosis.summary()}", flush=True)
    return EXIT_PROBLEMS if diagnosis.problems else 0


def _print_check(each: Check) -> None:
    print("\n".join(each.lines()), flush=True)


def _be_silent(_each: Check) -> None:
    pass


# ---- a running cluster ----


def _running_cluster(options: argparse.Namespace, diagnosis: Diagnosis) -> Iterator[Check]:
    endpoint = Endpoint(options.against, read_operators_key(options.api_key_file))
    try:
        report = settled_report(endpoint)
        ready = endpoint.get("/ready")
    except UnreachableError as error:
        advice = "check the URL: `splitserve status` shows a local cluster's; see also `splitserve logs router`"
        yield check("endpoint", "", [Problem("no_endpoint", str(error), advice)])
        return
    problems = []
    if ready.status != HTTPStatus.OK:
        problems.append(Problem("not_ready", f"it can't serve: {ready.words()}", "see the findings below"))
    yield check("endpoint", f"{endpoint.url} serves {report.served_model_name}", problems)
    secret = read_secret(options.secret_file, SECRET_VARIABLE)
    fits = shows_right_secret(report.membership, secret) if secret else None
    yield check_bottleneck(read_overview(endpoint))
    yield from cluster_checks(report, options.transport, fits)
    here = socket.gethostname()
    if report.machine == here:
        versions = {worker.info.layout.weights_version for worker in report.workers}
        yield from _on_same_machine(endpoint.url, report.model, versions)
    else:
        yield skipped("model files", f"{report.model} is on {report.machine}: run the doctor there")
    if options.probe and not problems:
        checks, diagnosis.probe = look_by_probe(endpoint, report, here)
        yield from checks


def _on_same_machine(url: str, model: str, versions: Collection[str]) -> Iterator[Check]:
    """Run the further checks of a cluster on this machine. ``versions``: identities of the weights that workers
    have."""
    facts = look_at_machine()  # the cluster's workers have loaded PyTorch already
    if facts.gpus:
        facts = with_torch(facts)
    names = ("packages", "devices", "peer access", "shared memory", "NUMA")
    yield from (each for each in machine_checks(facts, versions_of(*_VERSIONS)) if each.name in names)
    if Path(model).is_dir():
        yield look_at_model(model, served_versions=versions)
    status = _status_of_cluster(url)
    if status is not None:
        yield check("launcher", f"cluster {status.name}: {status.state}", _launcher_problems(status))


def _status_of_cluster(url: str) -> ClusterStatus | None:
    """Return the status of this user's cluster with the endpoint ``url``."""
    for folder in known_clusters():
        record = folder.read_if_readable()
        if folder.is_claimed() and record is not None and not record.ray:
            try:
                status = status_of(LocalClient(folder))
            except SplitserveError:
                continue
            if _port_of(status.url) == _port_of(url):
                return status
    return None


def _port_of(url: str) -> str:
    return url.rpartition(":")[2].strip("/")


def _launcher_problems(status: ClusterStatus) -> Iterator[Problem]:
    logs = f"see `splitserve logs --name {status.name} {{worker}}`"
    for worker in status.workers:
        if worker.phase is not WorkerPhase.READY and worker.last_words:
            yield Problem(
                "worker_restarts",
                f"{worker.name} is {worker.phase}; it was started again {worker.num_restarts} times, and ended: "
                f"{worker.last_words}",
                logs.format(worker=worker.name),
            )


# ---- this machine ----


def _this_machine(options: argparse.Namespace, diagnosis: Diagnosis) -> Iterator[Check]:
    spec = _wanted_spec(options)
    facts = look_at_machine()
    yield from quick_checks(facts)
    yield from torch_checks(with_torch(facts), versions_of(*_VERSIONS))
    router = spec.router if spec is not None else None
    host, port = (router.host, router.port) if router else (options.host, options.port)
    asked_for = spec is not None or port != options.spec_parser.get_default("port")
    yield check_port(host, port, port_user(host, port), asked_for=asked_for)
    if spec is not None:
        yield look_at_model(spec.model.path, spec.model.load_format, spec.model.backend)
        yield look_at_cache(
            spec.engine_config(spec.pools[0]),
            has_gpu=bool(facts.gpus) and not isinstance(facts.gpus, str),
            available_bytes=facts.memory_bytes,
        )
        plan = list(spec_checks(spec, facts, str if options.spec else flag_of))
        yield from plan
        if any(each.name == "plan" and each.problems for each in plan):
            yield skipped("probe", "the plan above can't be started")
            return
    if not options.probe:
        yield skipped("probe", "as asked")
        return
    yield from _probe_here(spec, options.transport, diagnosis)


def _wanted_spec(options: argparse.Namespace) -> ClusterSpec | None:
    """Return the spec that the options describe, with 1 prefill and 1 decode worker unless they give counts; None
    without a model."""
    if not options.model and not options.spec:
        return None
    if not options.spec and not (options.prefill or options.decode or options.mixed):
        options.prefill = options.decode = 1
    return with_local_model(cluster_spec(options))


def _probe_here(spec: ClusterSpec | None, transport: str, diagnosis: Diagnosis) -> Iterator[Check]:
    """Serve a small checkpoint of our own with 1 prefill and 1 decode worker, connected as in ``spec``."""
    from splitserve.models.demo.checkpoint import write_demo_model

    with tempfile.TemporaryDirectory(prefix="splitserve-doctor-") as scratch:
        model = str(write_demo_model(Path(scratch) / "demo-model"))
        log_folder = Path(scratch) / "logs"
        log_folder.mkdir()
        try:
            small = _probe_spec(model, spec)
            with LocalCluster(small, restart=False, log_folder=log_folder) as cluster:
                endpoint = Endpoint(cluster.url, resolve_secrets(small).api_key)
                yield from _look_at_own(endpoint, transport, diagnosis)
        except SplitserveError as error:
            advice = "the message names what is missing; `splitserve demo --log-level info` does the same and logs more"
            yield check("probe", "", [Problem("probe_failed", f"a small cluster couldn't be started: {error}", advice)])


def _look_at_own(endpoint: Endpoint, transport: str, diagnosis: Diagnosis) -> Iterator[Check]:
    report = settled_report(endpoint)
    yield check_workers(report)
    yield check_connections(report)
    yield check_transports(report, transport)
    checks, diagnosis.probe = look_by_probe(endpoint, report, socket.gethostname())
    yield from checks
    yield check_integrity(settled_report(endpoint))


def _probe_spec(model: str, spec: ClusterSpec | None) -> ClusterSpec:
    """Return ``spec`` with a small model on two workers of one thread; network, connector, secrets, environment
    stay."""
    device = spec.pools[0].device if spec is not None else "auto"
    engine = EngineConfig(model=model, kv_memory_bytes=_KV_MEMORY_BYTES, threads=1, device=device, enforce_eager=True)
    small = simple_spec(engine, num_prefill=1, num_decode=1, port=0, protocol=_PATIENT)
    if spec is None:
        return msgspec.structs.replace(small, devices=msgspec.structs.replace(small.devices, share=True))
    pools = [_like(pool, spec) for pool in small.pools]
    parts: dict[str, Any] = {name: getattr(spec, name) for name in ("network", "connector", "secrets")}
    return msgspec.structs.replace(
        small, pools=pools, devices=msgspec.structs.replace(spec.devices, share=True), **parts
    )


def _like(small: PoolSpec, spec: ClusterSpec) -> PoolSpec:
    """Return ``small`` with the environment and the network device of the pool of its role in ``spec``."""
    for pool in spec.pools:
        if pool.role == small.role:
            affinity = msgspec.structs.replace(small.affinity, nic=pool.affinity.nic)
            return msgspec.structs.replace(small, environment=pool.environment, affinity=affinity)
    return small
