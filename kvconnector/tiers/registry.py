"""Tiers with slots, in the order in which they are searched, and the interface by which a worker builds them."""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.layout.numa_memory import HostMemory
from splitserve.kvconnector.tiers.copies import TierStore
from splitserve.kvconnector.tiers.load_gates import LoadGates
from splitserve.kvconnector.tiers.tier import Tier
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.memory_records import HostTierMemory

TIERS: Mapping[str, str] = {
    "host": "host_kv_memory_bytes",
    "disk": "disk_kv_dir",
}
"""Settings of :class:`EngineConfig` that turn tiers on, by the tiers' names. Each name is a module of this folder; its
``build`` takes a :class:`TierContext` and returns a :class:`BuiltTier`, or None for a tier that stays off."""


@dataclass(frozen=True, slots=True)
class TierContext:
    """One rank of a worker, for which tiers are built."""

    engine: EngineConfig
    engine_id: str
    memory: KVMemory  # of the rank's device: what copies go from and to
    rank: int = 0
    gates: LoadGates | None = None  # of the steps that wait for loads on the device


@dataclass(frozen=True, slots=True)
class BuiltTier:
    """A tier of one rank."""

    tier: Tier  # decides, on rank 0
    store: TierStore  # carries copies out
    description: str  # for people
    served: HostTierMemory | None = None  # memory that peers may read
    host: HostMemory | None = None  # host memory, on a NUMA node


def build_tiers(context: TierContext) -> Iterator[BuiltTier]:
    """Build the tiers that the settings turn on, in order. Raises :class:`ConfigError`."""
    for name in wanted_tiers(context.engine):
        built: BuiltTier | None = importlib.import_module(f"splitserve.kvconnector.tiers.{name}").build(context)
        if built is not None:
            yield built


def wanted_tiers(engine: EngineConfig) -> list[str]:
    """Return the names of the tiers that the settings turn on."""
    return [name for name, setting in TIERS.items() if getattr(engine, setting)]
