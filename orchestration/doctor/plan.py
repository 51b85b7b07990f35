"""Checks of a cluster spec against this machine, without starting anything."""

from collections.abc import Callable, Iterator

from splitserve.common.cores import usable_cpus
from splitserve.common.errors import ConfigError
from splitserve.orchestration.doctor.machine import MachineFacts
from splitserve.orchestration.doctor.machine_checks import check_cores, check_plan
from splitserve.orchestration.doctor.report import Check, skipped
from splitserve.orchestration.hosts.core_plan import wanted_affinity
from splitserve.orchestration.hosts.gpus import Gpu, device_of
from splitserve.orchestration.spec.cluster_spec import ClusterSpec
from splitserve.orchestration.spec.expansion import worker_names
from splitserve.orchestration.spec.start_checks import Machine, address_problems, capacity_problems, file_problems

_CHECKED_BY_ITSELF = ("model.path", "router.host", "router.port")


def spec_checks(spec: ClusterSpec, facts: MachineFacts, name: Callable[[str], str] = str) -> Iterator[Check]:
    """Yield checks of the plan and of the cores of CPU workers. ``name``: translates a location in the spec for the
    user."""
    gpus: list[Gpu] = [] if isinstance(facts.gpus, str) else list(facts.gpus)
    machine = Machine(len(usable_cpus()), facts.memory_bytes, tuple(gpus))
    problems = [*file_problems(spec), *capacity_problems(spec, machine), *address_problems(spec)]
    yield check_plan(f"{name(location)}: {text}" for location, text in problems if location not in _CHECKED_BY_ITSELF)
    on_cpu = {name: pool for name, pool in worker_names(spec).items() if device_of(pool.device, gpus) == "cpu"}
    if not on_cpu:
        yield skipped("cores", "workers are on GPUs")
        return
    try:
        wanted = [wanted_affinity(name, pool, ()) for name, pool in on_cpu.items()]
        threads = {name: spec.engine_config(pool).threads for name, pool in on_cpu.items()}
        yield check_cores(facts.topology, facts.num_cores, wanted, threads)
    except ConfigError as error:
        yield check_plan([str(error)])
