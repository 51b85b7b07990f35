"""Names of a cluster's actors, groups and keys on Ray, so that all of them can be found, and nothing else."""

import secrets

NAMESPACE = "splitserve"
CLUSTER_VARIABLE = "SPLITSERVE_RAY_CLUSTER"  # set in the environment of every process of a cluster
ADDRESS_VARIABLE = "SPLITSERVE_RAY_NODE_ADDRESS"  # of a node: address of its processes, if not Ray's address
HEAD_VARIABLE = "SPLITSERVE_RAY_HEAD"  # folder of the head that was started for the cluster
HEAD_SECRET = "secret"  # noqa: S105 - a file's name in that folder


# Reserved for an actor that takes no processor. Ray lets any node place an actor that reserves nothing, even one that
# doesn't know the target node yet: 5 of 12 landed on another node, just after the target had joined.
SOME_MEMORY_BYTES = 1 << 20


def controller_name(cluster: str) -> str:
    return f"{cluster}/controller"


def unique_agent_name(cluster: str, process: str) -> str:
    """Return the name of an actor and its placement group, unique for each start of a process."""
    return f"{cluster}/agent/{process}/{secrets.token_hex(4)}"


def process_of(agent_name: str, cluster: str) -> str | None:
    """Return the process that an agent of the cluster runs; None for any other name."""
    parts = agent_name.split("/")
    return parts[2] if len(parts) == 4 and parts[:2] == [cluster, "agent"] else None


def lmcache_key(cluster: str, node_id: str) -> str:
    """Return the key of the port of a node's LMCache server; with "" for the node, the common prefix of all of them."""
    return f"splitserve/{cluster}/lmcache/{node_id}"


def memory_key(cluster: str) -> str:
    """Return the key of the state that the controller stores for its successor."""
    return f"splitserve/{cluster}/snapshot"


def order_key(cluster: str) -> str:
    """Return the key of the order that the controller was created with; it stays if the controller is lost for good."""
    return f"splitserve/{cluster}/order"
