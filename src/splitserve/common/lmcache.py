"""Addresses of LMCache servers. Pure."""

_BEGINNINGS = ("tcp://127.", "tcp://localhost:", "tcp://[::1]:", "ipc://")


def endpoint_problem(endpoint: str) -> str:
    """Return why workers can't use a server at this address; "" if they can."""
    if endpoint.startswith(_BEGINNINGS):
        return ""
    return (
        "an LMCache server shares memory with its workers, so it must be on this machine, like tcp://127.0.0.1:5555, "
        f"got {endpoint!r}; servers of several machines share a back end"
    )
