"""Names of what a cluster has on Ray, so that everything of it can be found, and nothing else."""

import secrets

NAMESPACE = "splitserve"
CLUSTER_VARIABLE = "SPLITSERVE_RAY_CLUSTER"  # in the environment of every process of a cluster
ADDRESS_VARIABLE = "SPLITSERVE_RAY_NODE_ADDRESS"  # of a node: where its processes are reached, if not at Ray's address
HEAD_VARIABLE = "SPLITSERVE_RAY_HEAD"  # the folder of the head that was started for the cluster
HEAD_SECRET = "secret"  # noqa: S105 - a file's name in that folder


# Reserved for an actor that takes no processor. Ray has one that takes nothing at all placed by any node, which may not
# know yet the one that it shall be on: 5 of 12 came to lie on another one, just after that had joined.
SOME_MEMORY_BYTES = 1 << 20


def controller_name(cluster: str) -> str:
    return f"{cluster}/controller"


def unique_agent_name(cluster: str, process: str) -> str:
    """Of the actor and its placement group: each start of a process has ones of its own."""
    return f"{cluster}/agent/{process}/{secrets.token_hex(4)}"


def process_of(agent_name: str, cluster: str) -> str | None:
    """The process that an agent of the cluster runs; None for the name of anything else."""
    parts = agent_name.split("/")
    return parts[2] if len(parts) == 4 and parts[:2] == [cluster, "agent"] else None


def lmcache_key(cluster: str, node_id: str) -> str:
    """Where the port of its LMCache server on a node is kept; "" for the node: what all of these begin with."""
    return f"splitserve/{cluster}/lmcache/{node_id}"


def memory_key(cluster: str) -> str:
    """Where its controller keeps what another one would need to go on."""
    return f"splitserve/{cluster}/snapshot"
