"""Ray's health checks: the time until a dead machine is noticed, and the recommended settings.

Ray's head checks each node's raylet every ``period_ms``. After ``failure_threshold`` failures in a row the node counts
as dead. A raylet that was killed refuses the connection at once; on a machine without power or network each check lasts
``timeout_ms``.
"""

import contextlib
import logging
from dataclasses import dataclass
from typing import Any

RECOMMENDED = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "5",
}
"""Variables for the environment of ``ray start --head``."""

LONG_SECONDS = 30.0  # if the detection of a dead machine takes longer, warn
ASK_SECONDS = 20.0
_HEAD_RESOURCE = "node:__internal_head__"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HealthChecks:
    """Ray's health-check settings, by Ray's names."""

    period_ms: int
    timeout_ms: int
    failure_threshold: int

    @property
    def silent_seconds(self) -> float:
        """Longest time until a machine without power or network is noticed."""
        return self.failure_threshold * (self.period_ms + self.timeout_ms) / 1000

    def advice(self) -> str:
        """Return one line for operators; "" if a dead machine is noticed soon enough."""
        if self.silent_seconds <= LONG_SECONDS:
            return ""
        better = " ".join(f"{name}={value}" for name, value in RECOMMENDED.items())
        return (
            f"this Ray cluster notices a machine without power or network after up to {self.silent_seconds:.0f} s, and "
            f"its workers are restarted after that; start its head with {better} to detect it within "
            f"{_recommended().silent_seconds:.0f} s"
        )


def _recommended() -> HealthChecks:
    return HealthChecks(*(int(value) for value in RECOMMENDED.values()))


def ask_head() -> Any:
    """Start a task on the head's node that reads the settings; returns a reference for :func:`answer_of`.

    Only the head has them: they come from its environment, which its node's processes inherit.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    head = next((node["NodeID"] for node in ray.nodes() if node["Alive"] and _HEAD_RESOURCE in node["Resources"]), None)
    if head is None:
        return None
    strategy = NodeAffinitySchedulingStrategy(head, soft=False)
    options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": strategy}
    return ray.remote(_read_settings).options(**options).remote()


def answer_of(asked: Any) -> HealthChecks | None:
    """Wait for the settings; None if the head couldn't run the task, for example because it lacks our environment."""
    import ray

    if asked is None:
        return None
    with contextlib.suppress(ray.exceptions.RayError):
        return HealthChecks(*ray.get(asked, timeout=ASK_SECONDS))
    _log.debug("the head of the Ray cluster didn't report its health-check settings")
    return None


def _read_settings() -> tuple[int, int, int]:
    import ray

    config = ray._config
    return (
        int(config.health_check_period_ms()),
        int(config.health_check_timeout_ms()),
        int(config.health_check_failure_threshold()),
    )
