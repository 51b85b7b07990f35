"""Access to a Ray cluster: tests, without credentials, whether the cluster accepts clients without any."""

import os
import subprocess
import sys

PROBE_SECONDS = 15.0
_ACCEPTED, _REFUSED = 10, 11  # exit statuses of no other meaning
_PROBE = f"""
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"splitserve", namespace=None, timeout=5)
except AuthenticationError:
    sys.exit({_REFUSED})
sys.exit({_ACCEPTED})
"""

OPEN_TO_ANYBODY = (
    "the Ray cluster at {address} has no authentication: every client that reaches its ports can run any code on its "
    "nodes. Give all its nodes and clients one token (RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH in the environment "
    "of `ray start` and of splitserve), and keep its ports to a network of your own: docs/guides/security.md"
)


def accepts_strangers(address: str) -> bool:
    """Send the cluster's head a request without a token and without certificates; returns whether it answers.

    Runs in a process of its own: Ray reads a process's credentials once. Returns False as well if no answer comes in
    time.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, address],
            env={**environment, "RAY_AUTH_MODE": "disabled"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == _ACCEPTED
