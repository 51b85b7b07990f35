"""Checks of a machine, and of a cluster to be started on it. Pure, over facts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from splitserve.orchestration.doctor.machine import MachineFacts, PortUser, TorchFacts
from splitserve.orchestration.doctor.report import Check, Problem, check, few, skipped
from splitserve.orchestration.hosts.core_plan import Wanted, plan_workers
from splitserve.orchestration.hosts.topology import Topology, format_list
from splitserve.orchestration.spec.sizes import format_bytes

MIN_MEMLOCK_BYTES = 1 << 20
"""Least memory that io_uring (KV files) and UCX's queues lock. With a network card, all memory that the card reads is
locked as well."""
MIN_OPEN_FILES = 1024
MIN_SHARED_MEMORY_BYTES = 64 << 20


def machine_checks(facts: MachineFacts, versions: Sequence[str]) -> list[Check]:
    """Run all checks of the machine. ``versions``: of the most important packages, as text."""
    return [*torch_checks(facts, versions), *quick_checks(facts)]


def torch_checks(facts: MachineFacts, versions: Sequence[str]) -> list[Check]:
    """Run the checks that depend on PyTorch's facts."""
    return [check_packages(facts, versions), check_devices(facts), check_peer_access(facts.torch)]


def quick_checks(facts: MachineFacts) -> list[Check]:
    return [
        check_limits(facts),
        check_shared_memory(facts),
        check_numa(facts.topology),
        check_clock(facts),
        check_dead_clusters(facts),
    ]


def check_packages(facts: MachineFacts, versions: Sequence[str]) -> Check:
    return check("packages", ", ".join(versions), _package_problems(facts))


def _package_problems(facts: MachineFacts) -> Iterator[Problem]:
    for package in facts.packages:
        if not package.fits:
            there = f"is {package.version}" if package.version else "is not installed"
            yield Problem(
                "package",
                f"{package.name} {there}; {package.wanted or 'any version'} is needed",
                f"pip install '{package.name}{package.wanted}'",
            )
    if isinstance(facts.torch, str):
        yield Problem("package", f"PyTorch can't be loaded: {facts.torch}", "reinstall torch for this Python and CUDA")


def check_devices(facts: MachineFacts) -> Check:
    problems = []
    gpus: Sequence[object] = () if isinstance(facts.gpus, str) else facts.gpus
    if isinstance(facts.gpus, str):
        problems.append(Problem("devices", facts.gpus, "look at the driver (nvidia-smi), or serve with --device cpu"))
    elif isinstance(facts.torch, TorchFacts) and len(facts.torch.gpus) < len(facts.gpus):
        build = f"built for CUDA {facts.torch.cuda}" if facts.torch.cuda else "a build without CUDA"
        problems.append(
            Problem(
                "devices",
                f"nvidia-smi shows {len(facts.gpus)} GPUs and PyTorch ({build}) {len(facts.torch.gpus)}",
                "install a PyTorch build for CUDA that this driver supports, or serve with --device cpu",
            )
        )
    cores = sum(len(core.cpus) for core in facts.topology.cores)
    wake_us = facts.wake_seconds * 1e6
    cpu = f"{facts.num_cores} usable cores ({cores} hardware threads; one that slept runs after {wake_us:.0f} us)"
    names = [] if isinstance(facts.gpus, str) else [gpu.name for gpu in facts.gpus]
    nics = f", RDMA {few(facts.rdma_devices)}" if facts.rdma_devices else ""
    return check("devices", f"{cpu}, {len(gpus)} GPUs{': ' + few(names) if names else ''}{nics}", problems)


def check_peer_access(torch: TorchFacts | str | None) -> Check:
    """Check peer access between GPUs: without it, KV goes from GPU to GPU through host memory."""
    if not isinstance(torch, TorchFacts) or not torch.peer_access:
        return skipped("peer access", "there are no two GPUs")
    missing = [f"{one}->{other}" for one, other, has_access in torch.peer_access if not has_access]
    problems = []
    if missing:
        problems.append(
            Problem(
                "peer_access",
                f"GPUs can't read each other's memory: {few(missing)}",
                "look at `nvidia-smi topo -m`; in a virtual machine or with ACS on, PCIe peer access is off; place "
                "workers that exchange KV on GPUs with NVLink",
            )
        )
    return check("peer access", f"{len(torch.peer_access) - len(missing)} of {len(torch.peer_access)} pairs", problems)


def memlock_problem(
    whose: str, memlock_bytes: int | None, rdma_devices: Sequence[str], kv_bytes: int
) -> Problem | None:
    """Return the problem of a low memlock limit, if it is one. ``memlock_bytes`` None: no limit. ``kv_bytes``: KV in
    host memory that a network card reads."""
    needed = max(MIN_MEMLOCK_BYTES, kv_bytes if rdma_devices else 0)
    if memlock_bytes is None or memlock_bytes >= needed:
        return None
    what = f"register {format_bytes(kv_bytes)} of KV memory with {few(rdma_devices)}" if rdma_devices else "work"
    return Problem(
        "low_memlock",
        f"{whose} may lock {format_bytes(memlock_bytes)} of memory, and needs {format_bytes(needed)} to {what}",
        "raise the limit where it is started: `ulimit -l unlimited`, `LimitMEMLOCK=infinity` in a systemd unit, "
        "`--ulimit memlock=-1` for a container; then start it again",
    )


def open_files_problem(whose: str, max_open_files: int | None) -> Problem | None:
    if max_open_files is None or max_open_files >= MIN_OPEN_FILES:
        return None
    return Problem(
        "low_open_files",
        f"{whose} may open {max_open_files} files; each client and each peer takes some",
        f"raise the limit where it is started: `ulimit -n {64 * MIN_OPEN_FILES}`, `LimitNOFILE=` in a systemd unit",
    )


def check_limits(facts: MachineFacts) -> Check:
    found = (
        memlock_problem("a process that is started here", facts.memlock_bytes, facts.rdma_devices, 0),
        open_files_problem("a process that is started here", facts.max_open_files),
    )
    memlock = "any amount" if facts.memlock_bytes is None else format_bytes(facts.memlock_bytes)
    files = "any number" if facts.max_open_files is None else str(facts.max_open_files)
    return check("limits", f"memlock {memlock}, open files {files}", filter(None, found))


def check_shared_memory(facts: MachineFacts) -> Check:
    free = facts.shared_memory_bytes
    if free is None:
        return skipped("shared memory", "this platform has no /dev/shm")
    problems = []
    if free < MIN_SHARED_MEMORY_BYTES:
        problems.append(
            Problem(
                "shared_memory",
                f"{format_bytes(free)} are free in /dev/shm; UCX needs some for each pair of workers",
                "`docker run --shm-size=1g`, or remove what fills /dev/shm",
            )
        )
    return check("shared memory", f"{format_bytes(free)} free in /dev/shm", problems)


def check_numa(topology: Topology) -> Check:
    nodes = {node.index: node for node in topology.nodes}
    with_cores = sorted({core.node for core in topology.cores})
    closed = [index for index in with_cores if index in nodes and not nodes[index].may_allocate]
    problems = []
    if closed:
        problems.append(
            Problem(
                "numa",
                f"processes may run on NUMA node {format_list(closed)}, but have no memory there",
                "let the cpuset's memory nodes (cpuset.mems, numactl --membind) include those of its cores",
            )
        )
    text = ", ".join(f"node {index}: {len(topology.cores_of(index))} cores" for index in with_cores)
    return check("NUMA", text or "unknown", problems)


def check_clock(facts: MachineFacts) -> Check:
    """Check that the clock is synchronised. Its offset shows only in a cluster, whose clocks can be compared."""
    if facts.clock_is_synchronised is None:
        return skipped("clock", "the kernel doesn't report whether it is synchronised")
    return check(
        "clock",
        "synchronised" if facts.clock_is_synchronised else "no program reports to the kernel that it sets the clock",
    )


def check_dead_clusters(facts: MachineFacts) -> Check:
    problems = [
        Problem(
            "stale_cluster",
            f"the launcher of cluster {dead.name} is gone; {dead.num_processes} of its processes are still there",
            f"`splitserve down --name {dead.name}` removes what is left of it",
        )
        for dead in facts.dead_clusters
    ]
    return check("left-overs", "" if problems else "none", problems)


# ---- a cluster that is to be started ----


def check_port(host: str, port: int, user: PortUser | str | None, *, asked_for: bool) -> Check:
    """Check that a port can be used. ``user``: result of :func:`.machine.port_user`. ``asked_for``: the port is to be
    used now; otherwise it is no problem that one of our endpoints uses it."""
    if user is None:
        return check("ports", f"{host}:{port} is free" if port else "any free one will do")
    if isinstance(user, str):
        advice = "give an address of this machine as --host (0.0.0.0: all of them), and a --port that this user may use"
        problem = Problem("unusable_address", f"{host} port {port} can't be bound: {user}", advice)
        return check("ports", f"{host}:{port}", [problem])
    who = f"{user.name} (pid {user.pid})" if user.pid else user.name
    if user.is_splitserve and not asked_for:
        return check("ports", f"{host}:{port} is a Splitserve endpoint already; --against http://{host}:{port} asks it")
    ours = ", an endpoint of Splitserve," if user.is_splitserve else ""
    return check(
        "ports",
        f"{host}:{port}",
        [
            Problem(
                "port_taken",
                f"port {port} of {host} is taken: {who}{ours} listens there",
                "choose another --port (0 takes a free one), or end what listens there",
            )
        ],
    )


def check_cores(topology: Topology, num_cores: int, workers: Sequence[Wanted], threads: Mapping[str, int]) -> Check:
    """Check cores against threads. ``workers`` of a spec; ``threads``: configured threads of each, 0 for its share."""
    on_cpu = [worker for worker in workers if not worker.gpus]
    plans = plan_workers(topology, workers, num_cores)
    wanted = sum(max(1, threads.get(worker.name, 0)) for worker in on_cpu)
    text = f"{len(workers)} workers on {num_cores} cores; {plans[workers[0].name].describe()}" if workers else "none"
    problem = oversubscription("this machine", wanted, num_cores)
    return check("cores", text, filter(None, [problem]))


def oversubscription(where: str, num_threads: int, num_cores: int) -> Problem | None:
    if num_threads <= num_cores or not num_cores:
        return None
    return Problem(
        "oversubscribed_cores",
        f"workers compute with {num_threads} threads on {num_cores} cores of {where}: they take turns, and every "
        "step waits for its slowest thread",
        f"use fewer workers, or fewer --threads each, so that they add up to {num_cores} at most",
    )


def check_plan(errors: Iterable[str]) -> Check:
    """Report ``errors`` that keep a spec from being started, in the launcher's words."""
    problems = [Problem("spec", error, "change the spec or the options that the message names") for error in errors]
    return check("plan", "" if problems else "it can be started here", problems)
