"""State of a cluster in Ray's key-value store, which outlives the cluster's controller: what the controller remembers
for its successor, and the order that a successor is created with if the controller is lost for good."""

import msgspec
from ray.experimental import internal_kv

from splitserve.common.errors import ConfigError
from splitserve.orchestration.cluster.host import Memory
from splitserve.orchestration.lmcache.on_ray import forget_ports
from splitserve.orchestration.ray.names import memory_key, order_key


def remember(cluster: str, memory: Memory) -> None:
    internal_kv._internal_kv_put(memory_key(cluster), msgspec.json.encode(memory))


def recall(cluster: str) -> Memory | None:
    """Return the state that a cluster's controller stored. Raises :class:`ConfigError` if this code can't read it."""
    data = internal_kv._internal_kv_get(memory_key(cluster))
    try:
        return None if data is None else msgspec.json.decode(data, type=Memory)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"the state of cluster {cluster} is one of another version of Splitserve ({error}): end the cluster with "
            "`splitserve down` and start it anew, or take that version"
        ) from error


def remember_order(cluster: str, order: bytes) -> None:
    """Store a controller's order (``ControllerOrder`` as JSON) once it is created, and before an upgrade removes it."""
    internal_kv._internal_kv_put(order_key(cluster), order)


def order_of(cluster: str) -> bytes | None:
    """Return the order of the cluster's last controller; None if there is no cluster."""
    stored: bytes | None = internal_kv._internal_kv_get(order_key(cluster))
    return stored


def stored_keys(cluster: str) -> list[str]:
    """Return the keys under which something of the cluster is stored."""
    keys = (memory_key(cluster), order_key(cluster))
    return [key for key in keys if internal_kv._internal_kv_exists(key)]


def forget(cluster: str) -> None:
    """Remove everything that a cluster has stored."""
    for key in (memory_key(cluster), order_key(cluster)):
        internal_kv._internal_kv_del(key)
    forget_ports(cluster)
