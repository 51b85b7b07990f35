"""Transports of KV: which one two workers should use, and whether another one is of that kind. Pure."""

from splitserve.protocol.messages.membership import WorkerSetup

UNKNOWN_TRANSPORT = "unknown"
"""Name of a transport that UCX's environment keeps it from reporting."""
_WITHIN_A_MACHINE = frozenset({"cma", "xpmem", "knem", "sysv", "posix"})
_RDMA_PREFIXES = ("rc", "dc", "ud", "gga", "srd")


def expected_transport(one: WorkerSetup, other: WorkerSetup) -> str:
    """Return the transport that two workers should use: a name of UCX's, ``shared memory`` or ``rdma`` for a group of
    them, "" for any."""
    if not one.machine or not other.machine:
        return ""
    on_gpus = one.device.startswith("cuda") and other.device.startswith("cuda")
    if one.machine == other.machine:
        return "cuda_ipc" if on_gpus else "" if "cuda" in one.device + other.device else "shared memory"
    return "rdma" if one.rdma_devices and other.rdma_devices else ""


def is_by(transport: str, expected: str) -> bool:
    """Return whether UCX's transports, like ``rc_mlx5+cuda_ipc``, are of the expected kind."""
    names = transport.partition(" ")[0].split("+")
    if expected == "shared memory":
        return bool(_WITHIN_A_MACHINE & set(names))
    if expected == "rdma":
        return any(name.startswith(_RDMA_PREFIXES) for name in names)
    return expected in names
