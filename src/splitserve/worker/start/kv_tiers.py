"""The tiers that a worker's config asks for, on one of its ranks."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.layout.numa_memory import HostMemory
from splitserve.kvconnector.lmcache.tier import lmcache_tier
from splitserve.kvconnector.tiers.copies import AnyStore
from splitserve.kvconnector.tiers.disk import DISK, keep_common
from splitserve.kvconnector.tiers.load_gates import LoadGates
from splitserve.kvconnector.tiers.registry import BuiltTier, TierContext, build_tiers, wanted_tiers
from splitserve.kvconnector.tiers.shared import NO_SHARED_TIER, SharedTier
from splitserve.kvconnector.tiers.tier import Tier
from splitserve.protocol.cache_layout import CacheGroup
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.memory_records import HostTierMemory

logger = logging.getLogger(__name__)

Found = Mapping[str, Sequence[tuple[bytes, int]]]
"""Hashes and slots, by the names of their tiers."""


@dataclass(slots=True)
class RankTiers:
    """``tiers``, cheapest first, and ``shared`` decide, on rank 0 alone; ``stores``, by the names of their tiers, carry
    out what is decided, on each rank. ``served`` is what peers may read of them, ``host`` the host tier's memory."""

    tiers: list[Tier] = field(default_factory=list)
    shared: SharedTier = field(default_factory=lambda: NO_SHARED_TIER)
    stores: dict[str, AnyStore] = field(default_factory=dict)
    served: HostTierMemory | None = None
    host: HostMemory | None = None
    _descriptions: dict[str, str] = field(default_factory=dict)

    def add(self, built: BuiltTier) -> None:
        self.tiers.append(built.tier)
        self.stores[built.tier.name] = built.store
        self._descriptions[built.tier.name] = built.description
        self.served = self.served or built.served
        self.host = self.host or built.host

    def share(self, tier: SharedTier, store: AnyStore, description: str) -> None:
        self.shared = tier
        self.stores[tier.name] = store
        self._descriptions[tier.name] = description

    def found(self) -> Found:
        """The blocks that the tiers held already."""
        return {tier.name: contents for tier in self.tiers if (contents := tier.index.contents())}

    def keep_common(self, others: Sequence[Found]) -> None:
        """Forget what the other ranks haven't found."""
        for tier in self.tiers:
            keep_common(tier.index, [other.get(tier.name, ()) for other in others])

    def describe(self) -> Iterator[tuple[str, str]]:
        """Names, and what each holds, for people."""
        for name, description in self._descriptions.items():
            found = next((len(tier.index) for tier in self.tiers if tier.name == name == DISK), None)
            yield name, description if found is None else f"{description}, {found} found there"


def make_tiers(
    engine: EngineConfig, engine_id: str, memory: KVMemory, rank: int = 0, gates: LoadGates | None = None
) -> RankTiers:
    """Make the tiers of the rank that has ``memory``; ``gates`` of its steps. Raises :class:`ConfigError`."""
    made = RankTiers()
    if not engine.enable_prefix_caching:
        if wanted_tiers(engine) or engine.lmcache_endpoint:
            logger.warning("tiers below the device are off: they hold prefixes, and prefix caching is off")
        return made
    if not memory.layout.cache.is_simple:
        if wanted_tiers(engine) or engine.lmcache_endpoint:
            logger.warning(
                "tiers below the device are off: they hold blocks of one full group with one field, and this model's "
                "cache has %s",
                " and ".join(_describe_group(group) for group in memory.layout.cache.groups),
            )
        return made
    for built in build_tiers(TierContext(engine, engine_id, memory, rank, gates)):
        made.add(built)
    if engine.lmcache_endpoint:
        made.share(*lmcache_tier(memory, engine.lmcache_endpoint, engine.kv_load_seconds, rank))
    return made


def _describe_group(group: CacheGroup) -> str:
    fields = ", ".join(field.name for field in group.fields)
    return f"a {group.kind} group of {group.num_layers} layers ({fields})"
