"""LMCache servers of a cluster on Ray: one on each node that has workers which use it, each with an agent of its own.

Server and workers share memory, so a worker speaks to its own node's server; what nodes share is a back end. Worker and
server needn't wait for each other, since whichever agent of a node comes first chooses the port for both.
"""

from ray.experimental import internal_kv

from splitserve.orchestration.hosts.addresses import LOOPBACK
from splitserve.orchestration.lmcache.keeper import lmcache_on
from splitserve.orchestration.lmcache.server import free_port
from splitserve.orchestration.ray.names import lmcache_key
from splitserve.orchestration.spec.cluster_spec import ClusterSpec, PoolSpec

_NODE_LETTERS = 8


def server_on(node_id: str) -> str:
    """The name of the process that keeps the server there."""
    return lmcache_on(node_id[:_NODE_LETTERS])


def port_on(cluster: str, node_id: str, wanted: int) -> int:
    """Where the server of the node listens, each time that it's started; ``wanted`` 0: at one that was free at first.
    Call it on the node."""
    if wanted:
        return wanted
    key = lmcache_key(cluster, node_id)
    if internal_kv._internal_kv_get(key) is None:
        internal_kv._internal_kv_put(key, str(free_port()).encode(), overwrite=False)
    return int(internal_kv._internal_kv_get(key))


def endpoint_on(cluster: str, node_id: str, spec: ClusterSpec, pool: PoolSpec) -> str:
    """Of the server that workers of the pool use there; "" if they use none that the cluster starts."""
    config = spec.lmcache_config()
    if config is None or not pool.lmcache:
        return ""
    return f"tcp://{LOOPBACK}:{port_on(cluster, node_id, config.port)}"


def forget_ports(cluster: str) -> None:
    for key in internal_kv._internal_kv_list(lmcache_key(cluster, "")):
        internal_kv._internal_kv_del(key)
