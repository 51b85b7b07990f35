"""Expansion of a cluster spec to the configs of its processes. Secrets are resolved here, where the processes run."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from secrets import token_hex
from types import MappingProxyType

import msgspec

from splitserve.common.errors import ConfigError
from splitserve.common.security import drawn_secret
from splitserve.orchestration.spec.cluster_spec import (
    ADMIN_KEY_VARIABLE,
    API_KEY_VARIABLE,
    SECRET_VARIABLE,
    ClusterSpec,
    PoolSpec,
    SecretRef,
)
from splitserve.orchestration.spec.small_files import read_small_file
from splitserve.protocol.config import Confidential, CoreAffinity, RouterConfig, WorkerConfig
from splitserve.protocol.request import Role

MAX_SECRET_BYTES = 4096
RANDOM_SECRET_BYTES = 32


class Secrets(Confidential, frozen=True, kw_only=True):
    """Values of a spec's secrets; "" where there is none."""

    secret: str = ""
    api_key: str = ""
    admin_key: str = ""

    def with_some_secret(self) -> "Secrets":
        """Return these with a random shared secret if none is configured, for processes that share one launcher."""
        return self if self.secret else msgspec.structs.replace(self, secret=drawn_secret())


def random_secret() -> str:
    return token_hex(RANDOM_SECRET_BYTES)


def read_secret(path: str, variable: str) -> str:
    """Return the content of the file at ``path``, else of the environment's ``variable``, stripped; "" if neither is
    set.

    Secrets aren't taken from the command line, which every user of the machine can see. A secret has one line of
    printable ASCII, as HTTP headers have; raises :class:`ConfigError` for others, which it doesn't show.
    """
    if not path:
        text = os.environ.get(variable, "").strip()
        _check_secret(text, f"the variable {variable}")
        return text
    try:
        text = read_small_file(path, MAX_SECRET_BYTES).decode().strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"can't read {path}: {error}") from error
    if not text:
        raise ConfigError(f"{path} is empty; write the secret into it, or leave the option away")
    _check_secret(text, path)
    return text


def _check_secret(text: str, source: str) -> None:
    if not (text.isascii() and text.isprintable()):
        kind = "more than one line, or control characters" if text.isascii() else "characters beyond ASCII"
        raise ConfigError(f"{source} has {kind}; a secret is one line of printable ASCII characters")


def read_operators_key(path: str) -> str:
    """Return the key for /admin: the content of the file at ``path``, else that of the environment, where an admin key
    precedes an API key; "" if none is set. Raises :class:`ConfigError`."""
    return read_secret(path, ADMIN_KEY_VARIABLE) or read_secret("", API_KEY_VARIABLE)


def resolve_secrets(spec: ClusterSpec) -> Secrets:
    """Read the spec's secrets on this machine. Raises :class:`ConfigError` for a reference to nothing, and for one key
    in the place of two."""
    secrets = Secrets(
        secret=resolve_shared_secret(spec),
        api_key=_resolve("secrets.api_key", spec.secrets.api_key, API_KEY_VARIABLE),
        admin_key=_resolve("secrets.admin_key", spec.secrets.admin_key, ADMIN_KEY_VARIABLE),
    )
    if secrets.admin_key and secrets.admin_key == secrets.api_key:
        raise ConfigError(
            "secrets.admin_key and secrets.api_key are the same: whoever may ask the model could also pause the "
            "server; give another admin key, or none: the API key then opens /admin"
        )
    return secrets


def resolve_shared_secret(spec: ClusterSpec) -> str:
    """Read the shared secret alone: the API key may come through a pipe, which can be read only once."""
    return _resolve("secrets.shared", spec.secrets.shared, SECRET_VARIABLE)


def _resolve(location: str, reference: SecretRef | None, variable: str) -> str:
    if reference is None:
        return read_secret("", variable)
    value = read_secret(reference.file, reference.env)
    if not value:
        raise ConfigError(f"{location}.env: the variable {reference.env} isn't set here; set it, or refer to a file")
    return value


@dataclass(frozen=True, slots=True)
class RouterPorts:
    """Ports of a router that replaces another one; 0: the spec's, else any free port."""

    http: int = 0
    membership: int = 0


ANY_PORTS = RouterPorts()
ANYWHERE = CoreAffinity()
ROUTER = "router"
NO_PEERS: Mapping[str, str] = MappingProxyType({})


def router_names(spec: ClusterSpec) -> list[str]:
    """Return the names of the router processes: ``router``, ``router-1``, ..."""
    return [ROUTER, *(f"{ROUTER}-{index}" for index in range(1, spec.router.workers))]


def router_config(
    spec: ClusterSpec,
    secrets: Secrets,
    host: str,
    ports: RouterPorts = ANY_PORTS,
    *,
    name: str = ROUTER,
    peers: Mapping[str, str] = NO_PEERS,
) -> RouterConfig:
    """Return a router's config; ``host`` is the address on which membership listens. ``peers``: the membership
    endpoints of the other router processes, by name."""
    settings = spec.router_settings()
    settings["port"] = ports.http or settings["port"]
    return RouterConfig(
        model=spec.model.path,
        served_model_name=spec.served_model_name,
        on_awake_cores=any(spec.engine_config(pool).keep_cores_awake for pool in spec.pools),
        name=name,
        peers=dict(peers),
        membership_host=host,
        membership_port=ports.membership,
        secret=secrets.secret,
        api_key=secrets.api_key,
        admin_key=secrets.admin_key,
        protocol=spec.protocol_config(),
        http=spec.http_limits(),
        **settings,
    )


def worker_config(
    spec: ClusterSpec,
    pool: PoolSpec,
    name: str,
    secrets: Secrets,
    *,
    membership: str,
    host: str,
    threads: int,
    affinity: CoreAffinity = ANYWHERE,
    lmcache_endpoint: str = "",
) -> WorkerConfig:
    """Return the config of worker ``name``, which binds ``host`` and computes on ``threads`` threads.

    ``lmcache_endpoint``: endpoint of the server that was started for the cluster, if one was.
    """
    engine = msgspec.structs.replace(spec.engine_config(pool), threads=threads)
    if lmcache_endpoint and pool.lmcache:
        engine = msgspec.structs.replace(engine, lmcache_endpoint=lmcache_endpoint)
    return WorkerConfig(
        engine_id=name,
        role=Role(pool.role),
        engine=engine,
        membership=membership,
        host=host,
        secret=secrets.secret,
        protocol=spec.protocol_config(),
        affinity=affinity,
        request_log=spec.router.request_log,
    )


def worker_environment(spec: ClusterSpec, pool: PoolSpec) -> dict[str, str]:
    """Return the variables that the spec adds to the environment of the pool's workers."""
    environment = dict(pool.environment)
    if spec.connector.transports:
        environment["UCX_TLS"] = ",".join(spec.connector.transports)
    devices = [pool.affinity.nic] if pool.affinity.nic else spec.connector.devices
    if devices:
        environment["UCX_NET_DEVICES"] = ",".join(devices)
    return environment


def worker_names(spec: ClusterSpec) -> Mapping[str, PoolSpec]:
    """Return the workers at the start, ``prefill-0``, ``prefill-1``, ..., with their pools."""
    return {f"{pool.name}-{index}": pool for pool in spec.pools for index in range(pool.count)}
