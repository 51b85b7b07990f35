"""The tiers that a worker's config asks for, on one of its ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from splitserve.block_hash import shard_root
from splitserve.config import EngineConfig
from splitserve.kvconnector.disk_tier import DISK, disk_tier, keep_common
from splitserve.kvconnector.host_tier import host_tier
from splitserve.kvconnector.lmcache import lmcache_tier
from splitserve.kvconnector.load_gates import LoadGates
from splitserve.kvconnector.memory import KVMemory
from splitserve.kvconnector.shared_tier import NO_SHARED_TIER, SharedTier
from splitserve.kvconnector.tier_copies import AnyStore
from splitserve.kvconnector.tiers import Tier
from splitserve.memory_records import HostTierMemory

Found = Mapping[str, Sequence[tuple[bytes, int]]]
"""Hashes and slots, by the names of their tiers."""


@dataclass(slots=True)
class RankTiers:
    """``tiers``, cheapest first, and ``shared`` decide, on rank 0 alone; ``stores``, by the names of their tiers, carry
    out what is decided, on each rank. ``served`` is what peers may read of them."""

    tiers: list[Tier] = field(default_factory=list)
    shared: SharedTier = field(default_factory=lambda: NO_SHARED_TIER)
    stores: dict[str, AnyStore] = field(default_factory=dict)
    served: HostTierMemory | None = None
    _descriptions: dict[str, str] = field(default_factory=dict)

    def add(self, tier: Tier, store: AnyStore, description: str) -> None:
        self.tiers.append(tier)
        self.stores[tier.name] = store
        self._descriptions[tier.name] = description

    def share(self, tier: SharedTier, store: AnyStore, description: str) -> None:
        self.shared = tier
        self.stores[tier.name] = store
        self._descriptions[tier.name] = description

    def found(self) -> Found:
        """What was there already."""
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
    """The tiers of the rank that has ``memory``; ``gates`` of its steps. Raises :class:`ConfigError`."""
    made = RankTiers()
    if engine.host_kv_memory_bytes:
        tier, store, description, made.served = host_tier(memory, engine.host_kv_memory_bytes, gates)
        made.add(tier, store, description)
    root = shard_root(memory.layout, rank)
    if engine.disk_kv_dir:
        folder = Path(engine.disk_kv_dir) / engine_id
        made.add(*disk_tier(memory, folder, engine.disk_kv_bytes, root, engine.disk_kv_backend, rank=rank))
    if engine.lmcache_endpoint and engine.enable_prefix_caching:
        made.share(*lmcache_tier(memory, engine.lmcache_endpoint, engine.kv_load_seconds, rank))
    return made
