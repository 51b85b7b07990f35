"""LMCache servers of a cluster on Ray: one on each node with workers that use it, each with an agent of its own.

Server and workers share memory, so a worker uses its own node's server; nodes share a back end. Worker and server
needn't wait for each other, since the first agent of a node chooses the port for both.
"""

from ray.experimental import internal_kv

from splitserve.orchestration.hosts.addresses import LOOPBACK, free_port
from splitserve.orchestration.lmcache.keeper import lmcache_on
from splitserve.orchestration.ray.names import lmcache_key
from splitserve.orchestration.spec.cluster_spec import ClusterSpec, PoolSpec

_NODE_LETTERS = 8


def server_on(node_id: str) -> str:
    """Return the name of the process that keeps the node's server."""
    return lmcache_on(node_id[:_NODE_LETTERS])


def port_on(cluster: str, node_id: str, wanted: int) -> int:
    """Return the port of the node's server, the same at each start; ``wanted`` 0: a port that was free at the first
    start.

    Call it on the node.
    """
    if wanted:
        return wanted
    key = lmcache_key(cluster, node_id)
    if internal_kv._internal_kv_get(key) is None:
        internal_kv._internal_kv_put(key, str(free_port()).encode(), overwrite=False)
    return int(internal_kv._internal_kv_get(key))


def endpoint_on(cluster: str, node_id: str, spec: ClusterSpec, pool: PoolSpec) -> str:
    """Return the endpoint of the node's server for workers of the pool; "" if the cluster starts none for them."""
    config = spec.lmcache_config()
    if config is None or not pool.lmcache:
        return ""
    return f"tcp://{LOOPBACK}:{port_on(cluster, node_id, config.port)}"


def forget_ports(cluster: str) -> None:
    for key in internal_kv._internal_kv_list(lmcache_key(cluster, "")):
        internal_kv._internal_kv_del(key)
