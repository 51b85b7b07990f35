"""Placement policies of the router: one declaration each. Spec, options, help and router take them from here.

A policy's function is a pure function of a snapshot and a request's shape, as
:data:`splitserve.router.placement.policies.Policy` says. The router alone imports it.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """Declaration of a policy."""

    module: str  # in splitserve.router.placement
    function: str  # in that module
    help: str  # one line, for `--help`


PLACEMENT_POLICIES: Mapping[str, PlacementPolicy] = {
    "cost": PlacementPolicy("cost", "cost", "the route with the smallest predicted excess over the objectives"),
    "least-loaded": PlacementPolicy("policies", "least_loaded", "the workers with the largest free share"),
    "power-of-two": PlacementPolicy("simple", "power_of_two", "the less loaded of two workers drawn at random"),
    "prefix": PlacementPolicy(
        "simple",
        "prefix",
        "the workers with the longest cached part of the prompt, if that is half of it and worth their queue",
    ),
    "round-robin": PlacementPolicy("simple", "round_robin", "workers in turn"),
    "session": PlacementPolicy("simple", "session", "the same workers for all requests of an X-Session-Id"),
}
"""Policies by the names that `router.policy` of a cluster spec and `--policy` have for them."""
DEFAULT_POLICY = "cost"
POLICIES_IN_WORDS = "; ".join(f"{name}: {policy.help}" for name, policy in PLACEMENT_POLICIES.items())
