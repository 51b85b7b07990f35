"""Metrics of the LMCache tier."""

import re
import urllib.request

from waiting import PATIENCE_SECONDS

CHUNK_TOKENS = 32


def availability(url: str) -> dict[str, bool]:
    """By worker."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_SECONDS) as response:
        text = response.read().decode()
    lines = re.findall(r'splitserve_tier_available\{[^}]*role="\w+",tier="lmcache",worker="([^"]+)"\} (\S+)', text)
    return {worker: float(value) == 1 for worker, value in lines}


def total(loads: dict[str, dict[str, float]], name: str) -> float:
    return sum(load[name] for load in loads.values())
