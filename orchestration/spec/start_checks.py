"""Checks before any process starts: problems in spec, files and machine that keep a cluster from starting here. All are
reported at once, each with its location in the spec.
"""

import errno
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import psutil

from splitserve.common.cores import usable_cpus
from splitserve.common.errors import CheckpointError, ConfigError
from splitserve.common.model_files import GENERATION_CONFIG
from splitserve.common.security import check_exposure, check_length
from splitserve.models.config import ModelConfig, load_model_config
from splitserve.models.declared import check_tensor_parallel_size
from splitserve.models.weights.checkpoint import weight_files
from splitserve.models.weights.sizes import activation_bytes, kv_token_bytes, logits_bytes
from splitserve.orchestration.hosts.addresses import LOOPBACK, can_listen, own_address
from splitserve.orchestration.hosts.gpus import Gpu, check_enough_gpus, has_driver
from splitserve.orchestration.spec.cluster_spec import ClusterSpec, PoolSpec, SecretRef, SpecError, set_fields
from splitserve.orchestration.spec.contradictions import location_of
from splitserve.orchestration.spec.expansion import read_secret, resolve_shared_secret
from splitserve.orchestration.spec.model_source import check_model_directory, is_model_id
from splitserve.orchestration.spec.sizes import format_bytes
from splitserve.protocol.config import AUTO, NONE
from splitserve.protocol.engine_config import DEVICE_DEFAULTS, machine_problems

Problem: TypeAlias = tuple[str, str]
"""A location in the spec, and a message."""

MIN_WORKER_BYTES = 256 << 20
"""Resident memory of a worker's rank with only PyTorch loaded."""
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MIN_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources of one machine. ``gpus`` None: there are some, which were not inspected."""

    num_cpus: int
    memory_bytes: int
    gpus: tuple[Gpu, ...] | None


def this_machine() -> Machine:
    return Machine(len(usable_cpus()), psutil.virtual_memory().total, None if has_driver() else ())


def check_start(spec: ClusterSpec) -> None:
    """Raise :class:`SpecError` with all problems that keep ``spec`` from starting here."""
    problems = [*file_problems(spec), *capacity_problems(spec, this_machine()), *address_problems(spec)]
    if problems:
        raise SpecError(problems)


# ---- files ----


def file_problems(spec: ClusterSpec) -> list[Problem]:
    """Return problems of the paths and secrets in the spec, and of settings that the model's config.json rules out."""
    return [*_model_problems(spec), *_secret_problems(spec), *_directory_problems(spec)]


def _model_problems(spec: ClusterSpec) -> Iterator[Problem]:
    if is_model_id(spec.model.path):
        return  # checked once it is downloaded
    if spec.model.revision:
        yield "model.revision", f"is of a model of the Hub, but {spec.model.path} is a directory; leave it out"
    directory = Path(spec.model.path)
    try:
        check_model_directory(spec.model.path)
        model = load_model_config(directory, spec.model.backend)
    except CheckpointError as error:
        yield "model.path", str(error)
        return
    if not (directory / "tokenizer.json").is_file():
        yield "model.path", f"{directory} has no tokenizer.json"
    if spec.model.load_format == "auto":
        problem = _refusal(lambda: weight_files(directory))
        if problem:
            yield "model.path", problem
    if spec.model.max_model_len > model.max_position_embeddings:
        yield (
            "model.max_model_len",
            f"must be at most {model.max_position_embeddings}, where the model's positions end, got "
            f"{spec.model.max_model_len}",
        )
    for index, pool in enumerate(spec.pools):
        size, split = pool.tensor_parallel_size, _expert_parallel(spec, pool)
        problem = _refusal(lambda size=size, split=split: check_tensor_parallel_size(model, size, split))  # type: ignore[misc]
        if problem:
            yield f"pools[{index}].tensor_parallel_size", problem
        yield from _kv_problems(spec, pool, f"pools[{index}]", model)


def _expert_parallel(spec: ClusterSpec, pool: PoolSpec) -> str:
    """Return the pool's setting; "auto" where the document itself is wrong."""
    try:
        return spec.engine_config(pool).expert_parallel
    except ConfigError:
        return "auto"


def _kv_problems(spec: ClusterSpec, pool: PoolSpec, location: str, model: ModelConfig) -> Iterator[Problem]:
    """Yield KV memory that can't hold two blocks or one longest sequence, even with the smallest possible elements."""
    try:
        engine = spec.engine_config(pool)
    except ConfigError:  # the document itself is wrong there
        return
    if not engine.kv_memory_bytes:
        return
    element_bytes = 1 if engine.kv_cache_dtype == "fp8" else _ELEMENT_BYTES.get(engine.dtype, 2)
    block_size = engine.block_size or min(defaults.block_size for defaults in DEVICE_DEFAULTS.values())
    num_tokens = max(_MIN_BLOCKS * block_size, engine.max_model_len)
    needed = num_tokens * kv_token_bytes(model, element_bytes, pool.tensor_parallel_size)
    if engine.kv_memory_bytes < needed:
        yield (
            f"{location}.memory.kv",
            f"must be at least {format_bytes(needed)} for {num_tokens} tokens ({_MIN_BLOCKS} blocks of {block_size}, "
            f"and max_model_len), got {format_bytes(engine.kv_memory_bytes)}",
        )


def _secret_problems(spec: ClusterSpec) -> Iterator[Problem]:
    for name in ("shared", "api_key", "admin_key"):
        reference = getattr(spec.secrets, name)
        if reference is None or bool(reference.env) == bool(reference.file) or _is_pipe(reference):
            continue
        part = "file" if reference.file else "env"
        if reference.env and not os.environ.get(reference.env, "").strip():
            yield f"secrets.{name}.env", f"the variable {reference.env} isn't set here; set it, or refer to a file"
        elif problem := _refusal(lambda given=name: _check_secret(spec, given)):  # type: ignore[misc]
            yield f"secrets.{name}.{part}", problem


def _check_secret(spec: ClusterSpec, name: str) -> None:
    """Read a secret. Raises :class:`ConfigError`, also for a shared one that is too short."""
    reference = getattr(spec.secrets, name)
    secret = read_secret(reference.file, reference.env)
    if name == "shared":
        check_length(secret)


def _is_pipe(reference: SecretRef | None) -> bool:
    """Return whether the secret is in a pipe: reading it here would take it from the process that needs it."""
    return reference is not None and bool(reference.file) and Path(reference.file).is_fifo()


def _directory_problems(spec: ClusterSpec) -> Iterator[Problem]:
    """Yield directories that workers can't write to; workers create them below a directory that must exist."""
    for index, pool in enumerate(spec.pools):
        settings = {**set_fields(spec.engine), **set_fields(pool.engine)}
        for field in ("disk_kv_dir", "profile_dir"):
            directory = settings.get(field, "")
            if directory and not _can_be_written(Path(directory)):
                yield location_of(spec, pool, f"pools[{index}]", field), f"can't write to {directory}"
    yield from _router_file_problems(spec)
    environment = spec.lmcache.environment if spec.lmcache is not None else ""
    if environment and not Path(environment).is_dir():
        yield "lmcache.environment", f"no such directory: {environment}"


def _router_file_problems(spec: ClusterSpec) -> Iterator[Problem]:
    router = spec.router
    if router.generation_config not in (AUTO, NONE):
        file = Path(router.generation_config) / GENERATION_CONFIG
        if not file.is_file():
            yield "router.generation_config", f"must be auto, none or a directory with {file.name}: {file} is missing"
    for field in ("chat_template", "tenants"):
        path = getattr(router, field)
        if path and not Path(path).is_file():
            yield f"router.{field}", f"there is no file {path}"


def _can_be_written(directory: Path) -> bool:
    existing = directory.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK) and not _is_kernels(existing)


def _is_kernels(directory: Path) -> bool:
    """Return whether the kernel owns the directory: no process can create files there, whatever its mode allows."""
    return any(directory.is_relative_to(root) for root in ("/proc", "/sys"))


# ---- the machine ----


def capacity_problems(spec: ClusterSpec, machine: Machine) -> list[Problem]:
    """Return the demands that exceed the machine: threads, memory, GPUs."""
    problems: list[Problem] = []
    for index, pool in enumerate(spec.pools):
        location = f"pools[{index}]"
        engine = spec.engine_config(pool)
        found = machine_problems(engine, machine.num_cpus)
        problems += [(location_of(spec, pool, location, field), text) for field, text in found]
        problems += _step_problems(spec, pool, location, machine)
        problems += _gpu_memory_problems(spec, pool, location, machine)
    problems += _host_memory_problems(spec, machine)
    if machine.gpus is not None and (problem := _refusal(lambda: check_enough_gpus(spec, list(machine.gpus or ())))):
        problems.append(("pools", problem))
    return problems


def _is_on_gpus(pool: PoolSpec, machine: Machine) -> bool:
    has_some = machine.gpus is None or bool(machine.gpus)
    return pool.device == "cuda" or (pool.device == "auto" and has_some)


def _step_problems(spec: ClusterSpec, pool: PoolSpec, location: str, machine: Machine) -> Iterator[Problem]:
    """Yield steps whose logits or activations alone exceed the memory."""
    try:
        model = load_model_config(spec.model.path, spec.model.backend)
    except CheckpointError:
        return
    most = machine.memory_bytes
    if _is_on_gpus(pool, machine):
        if not machine.gpus:
            return
        most = max(gpu.memory_bytes for gpu in machine.gpus)
    engine = spec.engine_config(pool)
    element_bytes = _ELEMENT_BYTES.get(engine.dtype, 2)
    steps = {
        "max_num_seqs": (logits_bytes(model, 1), engine.max_num_seqs),
        "max_num_batched_tokens": (activation_bytes(model, 1, element_bytes), engine.max_num_batched_tokens),
    }
    for field, (each, number) in steps.items():
        if each * number > most:
            yield (
                location_of(spec, pool, location, field),
                f"must be at most {most // each} here (a step takes {format_bytes(each)} for each, of "
                f"{format_bytes(most)} of memory), got {number}",
            )


def _gpu_memory_problems(spec: ClusterSpec, pool: PoolSpec, location: str, machine: Machine) -> Iterator[Problem]:
    if not machine.gpus or not _is_on_gpus(pool, machine):
        return
    on_each = spec.engine_config(pool).kv_memory_bytes // pool.tensor_parallel_size
    most = max(gpu.memory_bytes for gpu in machine.gpus)
    if on_each > most:
        yield (
            f"{location}.memory.kv",
            f"takes {format_bytes(on_each)} of each GPU, and the largest one has {format_bytes(most)}; lower it",
        )


def _host_memory_problems(spec: ClusterSpec, machine: Machine) -> Iterator[Problem]:
    """Yield host memory beyond the machine's, over all workers: their processes and their configured KV memory."""
    takers: dict[str, int] = {}
    for index, pool in enumerate(spec.pools):
        engine = spec.engine_config(pool)
        takers[f"pools[{index}].memory.host"] = pool.count * engine.host_kv_memory_bytes
        if not _is_on_gpus(pool, machine):
            takers[f"pools[{index}].memory.kv"] = pool.count * engine.kv_memory_bytes
    lmcache = spec.lmcache_config()
    takers["lmcache.memory"] = 0 if lmcache is None else lmcache.memory_bytes
    total = format_bytes(machine.memory_bytes)
    if sum(takers.values()) > machine.memory_bytes:
        yield (
            max(takers, key=lambda location: takers[location]),
            f"takes most of the {format_bytes(sum(takers.values()))} that KV of all workers takes of host memory, and "
            f"this machine has {total}; lower it",
        )
    num_ranks = sum(pool.count * pool.tensor_parallel_size for pool in spec.pools)
    if num_ranks * MIN_WORKER_BYTES > machine.memory_bytes:
        most = machine.memory_bytes // MIN_WORKER_BYTES
        yield "pools", f"this machine's {total} of memory hold at most {most} worker processes, got {num_ranks}"


# ---- addresses ----


def address_problems(spec: ClusterSpec) -> Iterator[Problem]:
    """Yield addresses that can't be bound here, or must not be bound without a secret."""
    location = "network.interface" if spec.network.interface else "network.host"
    has_secrets = not list(_secret_problems(spec)) and not _is_pipe(spec.secrets.shared)
    if has_secrets and (
        problem := _refusal(lambda: check_exposure(own_address(spec.network, LOOPBACK), resolve_shared_secret(spec)))
    ):
        yield location, problem
    lmcache = spec.lmcache_config()
    if lmcache is not None and lmcache.port and not can_listen(LOOPBACK, lmcache.port):
        yield (
            "lmcache.port",
            f"can't listen on {LOOPBACK} port {lmcache.port}: another process uses it; choose another one, or 0 for a "
            "free one; if it is an LMCache server, give its `endpoint` instead",
        )
    host, port = spec.router.host, spec.router.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except (OSError, UnicodeError) as error:
            words = getattr(error, "strerror", None) or error
            is_wrong_host = isinstance(error, socket.gaierror | UnicodeError) or error.errno == errno.EADDRNOTAVAIL
            remedy = "give an address of this machine" if is_wrong_host else "choose another one, or 0 for a free one"
            yield (
                f"router.{'host' if is_wrong_host else 'port'}",
                f"can't listen on {host} port {port}: {words}; {remedy}",
            )


def _refusal(attempt: Callable[[], object]) -> str:
    """Return the message of the error that ``attempt`` raises; "" if it raises none."""
    try:
        attempt()
    except (ConfigError, CheckpointError) as error:
        return str(error)
    return ""
