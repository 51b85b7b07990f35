"""Contradictions within a cluster spec: pure checks of a whole document; each problem has its location."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from splitserve.common.errors import ConfigError
from splitserve.orchestration.hosts.topology import parse_list
from splitserve.orchestration.spec.cluster_spec import (
    LOCATIONS,
    SECRET_VARIABLES,
    AffinitySpec,
    ClusterSpec,
    LMCacheSpec,
    MemorySpec,
    PoolSpec,
    SecretRef,
    SecretsSpec,
    num_bytes_of,
    set_fields,
)
from splitserve.protocol.config import LMCacheConfig, protocol_problems
from splitserve.protocol.engine_config import DEVICE_DEFAULTS
from splitserve.protocol.placement.policies import PLACEMENT_POLICIES
from splitserve.protocol.request import Role
from splitserve.protocol.settings import SettingsError, problem_of, problems_of

# Variables that a process gets from its launcher; a document that sets them would contradict it.
MANAGED_VARIABLES = frozenset(
    {*SECRET_VARIABLES, "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "UCX_TLS", "UCX_NET_DEVICES"}
)

MAX_PAIRS = 4096  # of lists of cores that are compared

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s@*]+")
_CORES = re.compile(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*")
_HTTP_URL = re.compile(r"https?://[^/\s]+(/\S*)?")


def contradictions(spec: ClusterSpec) -> Iterator[tuple[str, str]]:
    """Yield each contradiction: its location in the document, and a message."""
    names = [pool.name for pool in spec.pools]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield f"pools[{index}].name", f"is {name!r}, the name of pools[{names.index(name)}]; names must differ"
    if spec.router.workers > 1 and "router" in names:
        yield (
            f"pools[{names.index('router')}].name",
            "is 'router', as the router processes are called; name it otherwise",
        )
    yield from _missing_roles(spec)
    for index, pool in enumerate(spec.pools):
        yield from _pool_problems(spec, pool, f"pools[{index}]")
    yield from _disagreements(spec)
    if spec.network.host and spec.network.interface:
        yield "network", "host and interface are both set; keep one"
    yield from ((f"lmcache{location}", text) for location, text in _lmcache_problems(spec))
    if spec.router.policy not in PLACEMENT_POLICIES:
        yield "router.policy", f"is {spec.router.policy!r}; choose one of {', '.join(PLACEMENT_POLICIES)}"
    for index, origin in enumerate(spec.router.allowed_origins):
        if not _ORIGIN.fullmatch(origin):
            yield f"router.allowed_origins[{index}]", f"must be like https://app.example.com, or *, got {origin!r}"
    if spec.router.otlp_endpoint and not _HTTP_URL.fullmatch(spec.router.otlp_endpoint):
        yield "router.otlp_endpoint", f"must be like http://127.0.0.1:4318, got {spec.router.otlp_endpoint!r}"
    if spec.connector.transports and not {"tcp", "all"} & set(spec.connector.transports):
        yield "connector.transports", "add tcp: UCX needs it to set connections up"
    yield from ((f"protocol.{field}", text) for field, text in protocol_problems(spec.protocol_config()))
    yield from ((f"http.{field}", text) for field, text in problems_of(spec.http_limits()))
    for name in SecretsSpec.__struct_fields__:
        reference: SecretRef | None = getattr(spec.secrets, name)
        if reference is not None and bool(reference.env) == bool(reference.file):
            yield f"secrets.{name}", "give one of env (a variable's name) and file (a path)"


def _lmcache_problems(spec: ClusterSpec) -> Iterator[tuple[str, str]]:
    lmcache = spec.lmcache
    if lmcache is None:
        return
    if lmcache.endpoint and lmcache != LMCacheSpec(endpoint=lmcache.endpoint):
        yield "", "endpoint is that of a server that runs already: leave the other settings to it"
    try:
        if problem := problem_of(LMCacheConfig, "memory_bytes", num_bytes_of(lmcache.memory)):
            yield ".memory", problem
    except ConfigError as error:
        yield ".memory", str(error)
    for number, backend in enumerate(lmcache.backends):
        if not isinstance(backend.get("type"), str):
            yield f".backends[{number}]", "has no type; LMCache knows fs (files), resp (Redis) and others"
    for pool in spec.pools:
        block_size = _block_size(spec, pool)
        if not lmcache.endpoint and lmcache.chunk_tokens % block_size:
            yield ".chunk_tokens", f"{lmcache.chunk_tokens} isn't a multiple of the block size {block_size}"


def _block_size(spec: ClusterSpec, pool: PoolSpec) -> int:
    """Return the size of a pool's KV blocks; the least that is possible where neither it nor the device is set."""
    if size := {**set_fields(spec.engine), **set_fields(pool.engine)}.get("block_size"):
        return int(size)
    return min(each.block_size for name, each in DEVICE_DEFAULTS.items() if pool.device in ("auto", name))


def _missing_roles(spec: ClusterSpec) -> Iterator[tuple[str, str]]:
    numbers = Counter(dict.fromkeys(Role, 0))
    for pool in spec.pools:
        numbers[pool.role] += pool.count
    if not spec.num_workers:
        yield "pools", "no workers: raise the count of a pool"
    elif numbers[Role.PREFILL] and not numbers[Role.DECODE]:
        yield (
            "pools",
            f"{numbers[Role.PREFILL]} prefill and no decode worker: no worker would generate tokens; add a decode pool "
            "(--decode N), or use mixed workers alone, which do both (--mixed N)",
        )
    elif numbers[Role.DECODE] and not numbers[Role.PREFILL]:
        yield (
            "pools",
            f"{numbers[Role.DECODE]} decode and no prefill worker: no worker would compute prompts; add a prefill pool "
            "(--prefill N), or use mixed workers alone, which do both (--mixed N)",
        )


def _pool_problems(spec: ClusterSpec, pool: PoolSpec, location: str) -> Iterator[tuple[str, str]]:
    """Yield the problems of a pool; ``location``: of the pool in the document."""
    for name in sorted(MANAGED_VARIABLES & pool.environment.keys()):
        yield f"{location}.environment.{name}", "follows from other parts of the spec; leave it out"
    if pool.affinity.transfer_cores and pool.affinity.num_transfer_cores is not None:
        yield f"{location}.affinity", "transfer_cores and num_transfer_cores are both set; keep one"
    yield from ((f"{location}.affinity.{field}", text) for field, text in _core_problems(pool.affinity))
    sizes: dict[str, int | str] = {name: getattr(pool.memory, name) for name in ("kv", "host", "disk")}
    for name, size in sizes.items():
        try:
            sizes[name] = num_bytes_of(size)
        except ConfigError as error:
            yield f"{location}.memory.{name}", str(error)
            sizes[name] = 0
    memory = MemorySpec(**sizes, gpu_utilization=pool.memory.gpu_utilization)
    readable = msgspec.structs.replace(pool, memory=memory)
    try:
        engine = spec.engine_config(readable)
    except SettingsError as error:
        yield from ((location_of(spec, pool, location, field), text) for field, text in error.problems)
        return
    if engine.keep_cores_awake and engine.device == "cpu":
        where = location_of(spec, pool, location, "keep_cores_awake")
        yield where, "is for workers on GPUs: on a CPU the model needs the cores"
    if engine.keep_cores_awake and not pool.affinity.pin:
        yield (
            f"{location}.affinity.pin",
            "is off, but keep_cores_awake keeps workers on some cores; leave one of them out",
        )


def _core_problems(affinity: AffinitySpec) -> Iterator[tuple[str, str]]:
    """Yield the problems of lists of hardware threads; "" is a worker without a list."""
    lists = {"cores": affinity.cores, "transfer_cores": affinity.transfer_cores}
    threads = {field: [_threads_of(text) for text in texts] for field, texts in lists.items()}
    for field, texts in lists.items():
        for number, text in enumerate(texts):
            if text and not threads[field][number]:
                yield f"{field}[{number}]", f"is {text!r}; write hardware threads like 0-7,16"
    # A worker's number chooses one of each. Successors have numbers beyond the pool's count, so all pairs are checked.
    num_pairs = math.lcm(len(affinity.cores), len(affinity.transfer_cores))
    pairs = {(i % len(affinity.cores), i % len(affinity.transfer_cores)) for i in range(min(num_pairs, MAX_PAIRS))}
    for one, other in sorted(pairs, key=lambda pair: pair[::-1]):
        cores, transfer = threads["cores"][one], threads["transfer_cores"][other]
        if cores and not transfer <= cores:
            yield (
                f"transfer_cores[{other}]",
                f"is {affinity.transfer_cores[other]!r}, but the same worker's cores[{one}] is "
                f"{affinity.cores[one]!r}; choose transfer cores among the worker's cores",
            )


def _threads_of(text: str) -> frozenset[int]:
    """Return the hardware threads in a list like 0-7,16; none if it isn't one."""
    plain = re.sub(r"\s*([,-])\s*", r"\1", text.strip())
    return frozenset(parse_list(plain)) if _CORES.fullmatch(plain) else frozenset()


def location_of(spec: ClusterSpec, pool: PoolSpec, pool_location: str, field: str) -> str:
    """Return where ``field`` of :class:`EngineConfig` is set for ``pool``, which is at ``pool_location``."""
    if field in LOCATIONS:
        return LOCATIONS[field].replace("pools[]", pool_location)
    is_for_all = field in set_fields(spec.engine) and field not in set_fields(pool.engine)
    return f"{'' if is_for_all else f'{pool_location}.'}engine.{field}"


def _disagreements(spec: ClusterSpec) -> Iterator[tuple[str, str]]:
    """Yield differences in settings that all pools must share, since these determine the layout of KV blocks."""
    first = spec.pools[0]
    expected = shared_settings(spec, first)
    for index, pool in enumerate(spec.pools[1:], 1):
        for name, value in shared_settings(spec, pool).items():
            if value != expected[name]:
                yield (
                    f"pools[{index}].{name}",
                    f"{pool.name} has {value or 'none'} and {first.name} has {expected[name] or 'none'}; "
                    "workers that exchange KV must agree",
                )


def shared_settings(spec: ClusterSpec, pool: PoolSpec) -> dict[str, Any]:
    """Return the settings that determine the layout of KV blocks, by location: workers that exchange KV must agree."""
    engine = {**set_fields(spec.engine), **set_fields(pool.engine)}
    return {
        "dtype": pool.dtype,
        "engine.block_size": engine.get("block_size", 0),
        "engine.kv_cache_dtype": engine.get("kv_cache_dtype", "auto"),
    }
