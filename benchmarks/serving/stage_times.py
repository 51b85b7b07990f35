"""Mean time of each stage of a load's requests, from the router's metrics before and after the load."""

import re
import urllib.request
from collections.abc import Mapping

_LINE = re.compile(
    r"splitserve_(?P<handover>handover_)?stage_seconds_(?P<which>sum|count)\{(?P<labels>.*)\} (?P<value>\S+)"
)
_STAGE = re.compile(r'stage="([a-z_]+)"')
TIMEOUT_SECONDS = 10.0

Sums = dict[str, tuple[float, float]]
"""Seconds and number of requests, by stage; stages of the hand-over are called ``handover/...``."""


def read_stage_sums(url: str) -> Sums:
    """Read the sums so far from the router at ``url``. Raises OSError where it doesn't answer."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_SECONDS) as answer:  # noqa: S310 -- our own router
        return stage_sums(answer.read().decode())


def stage_sums(metrics: str) -> Sums:
    """Parse the metrics' text; stages of several transports are added up."""
    found: Sums = {}
    for line in _LINE.finditer(metrics):
        stage = _STAGE.search(line["labels"])
        if stage is None:
            continue
        name = f"handover/{stage[1]}" if line["handover"] else stage[1]
        seconds, number = found.get(name, (0.0, 0.0))
        value = float(line["value"])
        found[name] = (seconds + value, number) if line["which"] == "sum" else (seconds, number + value)
    return found


def mean_stages_ms(before: Sums, after: Sums) -> Mapping[str, float]:
    """Return the mean milliseconds of each stage that requests passed between the two readings, longest first."""
    means = {}
    for name, (seconds, number) in after.items():
        earlier_seconds, earlier = before.get(name, (0.0, 0.0))
        if number > earlier:
            means[name] = (seconds - earlier_seconds) / (number - earlier) * 1e3
    return dict(sorted(means.items(), key=lambda item: -item[1]))
