"""What of a cluster spec can't be started on this machine, as the doctor sees it without starting anything."""

from collections.abc import Iterator, Mapping

from splitserve.errors import CheckpointError, ConfigError
from splitserve.models.config import load_model_config
from splitserve.models.shard import check_tensor_parallel_size
from splitserve.orchestration.addresses import LOOPBACK, own_address
from splitserve.orchestration.core_plan import wanted_place
from splitserve.orchestration.doctor_machine import MachineFacts
from splitserve.orchestration.doctor_machine_checks import check_cores, check_plan
from splitserve.orchestration.doctor_report import Check, skipped
from splitserve.orchestration.expansion import resolve_secrets, worker_names
from splitserve.orchestration.gpus import Gpu, check_enough_gpus, device_of
from splitserve.orchestration.sizes import format_bytes
from splitserve.orchestration.spec import ClusterSpec, PoolSpec
from splitserve.security import check_exposure


def spec_checks(spec: ClusterSpec, facts: MachineFacts) -> Iterator[Check]:
    """The plan, and the cores of those workers that are on CPU."""
    gpus = [] if isinstance(facts.gpus, str) else list(facts.gpus)
    pools = worker_names(spec)
    on_cpu = {name: pool for name, pool in pools.items() if device_of(pool.device, gpus) == "cpu"}
    problems = [*_start_problems(spec, gpus), *_rank_problems(spec), *_memory_problems(spec, pools, gpus, facts)]
    yield check_plan(problems)
    if not on_cpu:
        yield skipped("cores", "workers are on GPUs")
        return
    try:
        wanted = [wanted_place(name, pool, ()) for name, pool in on_cpu.items()]
        threads = {name: spec.engine_config(pool).threads for name, pool in on_cpu.items()}
        yield check_cores(facts.topology, facts.num_cores, wanted, threads)
    except ConfigError as error:
        yield check_plan([str(error)])


def _start_problems(spec: ClusterSpec, gpus: list[Gpu]) -> Iterator[str]:
    try:
        check_enough_gpus(spec, gpus)
    except ConfigError as error:
        yield str(error)
    try:
        check_exposure(own_address(spec.network, LOOPBACK), resolve_secrets(spec).secret)
    except ConfigError as error:
        yield str(error)


def _rank_problems(spec: ClusterSpec) -> Iterator[str]:
    """A checkpoint that can't be read is the check of its files to tell."""
    try:
        model = load_model_config(spec.model.path)
    except CheckpointError:
        return
    for pool in spec.pools:
        try:
            check_tensor_parallel_size(model, pool.tensor_parallel_size)
        except ConfigError as error:
            yield f"pool {pool.name}: {error}"


def _memory_problems(
    spec: ClusterSpec, pools: Mapping[str, PoolSpec], gpus: list[Gpu], facts: MachineFacts
) -> Iterator[str]:
    """What the spec asks for, against all that there is; what it leaves open fits."""
    in_host = 0
    for name, pool in pools.items():
        engine = spec.engine_config(pool)
        in_host += engine.host_kv_memory_bytes
        if device_of(pool.device, gpus) == "cpu":
            in_host += engine.kv_memory_bytes
            continue
        on_each = engine.kv_memory_bytes // pool.tensor_parallel_size
        most = max((gpu.memory_bytes for gpu in gpus), default=on_each)
        if on_each > most:
            yield (
                f"{name}'s KV memory takes {format_bytes(on_each)} of a GPU, and the largest one has "
                f"{format_bytes(most)}; lower --kv-memory"
            )
    if in_host > facts.memory_bytes:
        yield (
            f"KV takes {format_bytes(in_host)} of host memory in all workers together, and this machine has "
            f"{format_bytes(facts.memory_bytes)}; lower --kv-memory or --host-kv-memory"
        )
