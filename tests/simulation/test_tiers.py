"""Small tiers under every fault that the simulator knows: right tokens, each block in one state, every count back."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planted import WRONG_TOKENS, Plant, find
from schedules import SHORT_LEASES, Schedule, num_schedules, run_schedule
from splitserve.engine.block_manager import BlockManager, HeldPrefix
from splitserve.engine.sequence import Sequence
from splitserve.kvconnector.tiers.commands import Copy
from splitserve.kvconnector.tiers.index import TierIndex
from splitserve.kvconnector.tiers.loads import BlockLoad, TierLoads
from splitserve.kvconnector.tiers.stores import TierStores
from splitserve.kvconnector.tiers.tier import ServedSlots
from splitserve.kvconnector.tiers.tiers import Tiers
from splitserve.prefill.prefix_source import PrefixSource
from splitserve.protocol.messages.handover import PrefixGrant
from splitserve.protocol.request import Party
from splitserve.simulation.faults import Faults, Shape
from splitserve.simulation.worker.driver import SimWorker
from splitserve.simulation.worker.tiers import SHARED

SHAPES = [
    Shape(num_blocks=14, tier_slots=6),
    Shape(num_blocks=16, tier_slots=40),
    Shape(prefill=0, decode=0, mixed=1, num_blocks=14, tier_slots=12),
    Shape(prefill=2, decode=2, num_blocks=16, prefill_blocks=12, tier_slots=10),
    Shape(prefill=0, decode=0, mixed=2, num_blocks=12, tier_slots=40),
    Shape(prefill=0, decode=0, mixed=3, num_blocks=12, tier_slots=40),
]
FEW_SLOTS = Shape(num_blocks=14, tier_slots=3)
FEW_PEER_SLOTS = Shape(prefill=0, decode=0, mixed=3, num_blocks=12, tier_slots=6)
WITH_SHARED = [
    Shape(prefill=0, decode=0, mixed=2, num_blocks=14, shared_chunk=1),
    Shape(prefill=2, decode=1, num_blocks=16, prefill_blocks=12, shared_chunk=2),
    Shape(prefill=2, decode=2, num_blocks=16, prefill_blocks=12, shared_chunk=2, tier_slots=6),
    Shape(prefill=0, decode=0, mixed=2, num_blocks=14, shared_chunk=3, tier_slots=3),
]
FAULTS = {
    "none": Faults(),
    "copies fail": Faults(copy_error=0.3),
    "copies are late": Faults(copy_late=0.4, copy_seconds=0.4),
    "aborts": Faults(abort=0.6, copy_seconds=0.4, copy_late=0.2),
    "steps fail": Faults(step_error=0.1, copy_error=0.1),
    "workers die": Faults(kills=3, freezes=1, drains=1, copy_error=0.1, step_seconds=0.1),
    "bytes change": Faults(damage=0.1, copy_error=0.1),
    "everything": Faults(
        drop=0.1, duplicate=0.1, max_delay=0.3, read_error=0.1, read_late=0.1, abort=0.3, step_error=0.03, partitions=1,
        kills=1, freezes=1, copy_error=0.2, copy_late=0.2, copy_seconds=0.3,
    ),
}  # fmt: skip

seeds = st.integers(0, 2**32)
bounded = settings(max_examples=num_schedules(4))


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
@given(seed=seeds, shape=st.sampled_from(SHAPES + WITH_SHARED), leases=st.sampled_from([{}, SHORT_LEASES]))
@bounded
def test_tokens_and_counts_survive(faults: Faults, seed: int, shape: Shape, leases: dict[str, float]) -> None:
    run_schedule(Schedule(seed=seed, faults=faults, shape=shape, protocol=leases, num_requests=20))


def test_the_schedules_do_load_from_tiers_and_have_steps_that_wait_for_loads() -> None:
    """Else the tests above say nothing. Some loads come to nothing: what was computed isn't used."""
    faults = Faults(copy_error=0.2)
    for shape in SHAPES:
        loaded = num_waits = 0
        seed = 10  # the next ones load often
        while loaded <= 10 or num_waits <= 2:
            sim = run_schedule(Schedule(seed=seed, shape=shape, faults=faults, num_requests=30))
            loaded += sum(worker.core.load().tier_loaded_blocks for worker in sim.workers.values())
            num_waits += sum(worker.below.num_waits for worker in sim.workers.values())
            seed += 1
            assert seed < 60, shape


def test_the_schedules_do_load_from_the_shared_tier() -> None:
    for shape in WITH_SHARED:
        loaded, seed = 0, 0
        while loaded <= 10:
            sim = run_schedule(Schedule(seed=seed, shape=shape, num_requests=40))
            reports = [tier for worker in sim.workers.values() for tier in worker.core.load().tiers]
            loaded += sum(tier.loaded_blocks for tier in reports if tier.name == SHARED)
            seed += 1
            assert seed < 20, shape


def test_the_schedules_do_read_from_other_workers_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads come from their devices and from slots of their host tiers."""
    held: list[HeldPrefix] = []
    original = BlockManager.hold_prefix

    def hold(self: BlockManager, hashes: list[bytes]) -> HeldPrefix:
        held.append(original(self, hashes))
        return held[-1]

    monkeypatch.setattr(BlockManager, "hold_prefix", hold)
    for shape in SHAPES[4:]:
        held.clear()
        read = slots = blocks = seed = 0
        while read <= 10 or slots <= 5 or blocks <= 5:
            sim = run_schedule(Schedule(seed=seed, shape=shape, num_requests=24))
            read += sum(worker.core.load().peer_prefix_blocks for worker in sim.workers.values())
            slots, blocks = sum(len(each.slots) for each in held), sum(len(each.block_ids) for each in held)
            seed += 1
            assert seed < 12, shape


def test_blocks_that_left_prefills_device_are_read_from_its_host_tier() -> None:
    """Leases that run out under their readers; what is verified before, and what isn't, adds up to the right tokens."""
    shape = Shape(prefill=2, decode=2, num_blocks=16, prefill_blocks=12, tier_slots=40)
    faults = Faults(partitions=2, read_seconds=1.0, read_late=0.1, kills=1, freezes=1, drop=0.1, abort=0.2)
    num_others = 0
    for seed in (24, 6, *range(30)):  # today these two have one each
        schedule = Schedule(seed=seed, shape=shape, faults=faults, num_requests=16, protocol=SHORT_LEASES)
        num_others += sum(worker.core.load().other_copies for worker in run_schedule(schedule).workers.values())
        if num_others > 1:
            return
    pytest.fail(f"{num_others} hand-overs continued from another copy")


# ---- the checks bite ----


def load_counts_before_it_lands(patch: pytest.MonkeyPatch) -> None:
    original = BlockManager.reserve

    def hasty(self: BlockManager, sequence: Sequence, headroom: int = 0, *, pulls: bool = False) -> bool:
        reserved = original(self, sequence, headroom, pulls=pulls)
        if sequence.load is not None:
            sequence.load.good = [True] * len(sequence.load.good)
            loads = self.tiers._loads
            loads._by_copy = {k: v for k, v in loads._by_copy.items() if v is not sequence.load}
            self.finish_load(sequence)
        return reserved

    patch.setattr(BlockManager, "reserve", hasty)


def failed_load_is_trusted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockLoad, "num_good", property(lambda self: len(self.good)))


def failed_store_is_found(patch: pytest.MonkeyPatch) -> None:
    original = TierIndex.finish_store
    patch.setattr(
        TierIndex,
        "finish_store",
        lambda self, block_hash, slot, *, is_good: original(self, block_hash, slot, is_good=True),
    )


def slots_are_not_pinned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TierIndex, "pin", lambda self, hashes: [self._ready[block_hash] for block_hash in hashes])
    patch.setattr(TierIndex, "unpin", lambda self, slots: None)
    patch.setattr(TierIndex, "num_in_use", property(lambda self: 0))
    patch.setattr(Tiers, "check_invariants", lambda self: None)


def stores_hold_no_reference(patch: pytest.MonkeyPatch) -> None:
    original = TierStores._start_one

    def careless(self: TierStores, tier: object) -> None:
        before = len(self._work.copies.commands)
        original(self, tier)  # type: ignore[arg-type]
        for command in self._work.copies.commands[before:]:
            self._work.pool.release(command.block_ids)

    def finish(self: TierStores, tier: object, command: object, num_good: int) -> None:
        self._work.pool.reference(command.block_ids)  # type: ignore[attr-defined]
        finish_store(self, tier, command, num_good)  # type: ignore[arg-type]

    finish_store = TierStores.finish
    patch.setattr(TierStores, "_start_one", careless)
    patch.setattr(TierStores, "finish", finish)
    patch.setattr(TierStores, "num_references", lambda self: 0)


def slots_of_peers_are_not_pinned(patch: pytest.MonkeyPatch) -> None:
    """And their generations don't tell."""

    def hold(self: ServedSlots, block_hash: bytes) -> tuple[int, int] | None:
        if self.tier is None or block_hash not in self.tier.index:
            return None
        return self.tier.index._ready[block_hash], 7

    patch.setattr(ServedSlots, "hold", hold)
    patch.setattr(ServedSlots, "release", lambda self, slots: None)
    patch.setattr("splitserve.simulation.worker.driver.SimWorker.generation", steady_slots)


def slots_keep_their_generation(patch: pytest.MonkeyPatch) -> None:
    """And a lease that is over is no reason to look."""
    original = TierIndex.begin_store

    def begin(self: TierIndex, block_hash: bytes) -> object:
        before = None if self._generations is None else self._generations.copy()
        place = original(self, block_hash)
        if before is not None and self._generations is not None:
            self._generations[:] = before
        return place

    patch.setattr(TierIndex, "begin_store", begin)
    give_back = PrefixSource.on_grant

    def hasty(self: PrefixSource, grant: PrefixGrant, sender: Party, now: float) -> None:
        give_back(self, grant, sender, now)
        for _, held in self._held.values():
            self._state.blocks.tiers.release_slots(held.slots)
            held.slots.clear()

    patch.setattr(PrefixSource, "on_grant", hasty)


def steady_slots(self: SimWorker, block_id: int, group: int = 0) -> int:
    return int(self.all_generations[group][block_id]) if block_id < self.num_blocks else 7


def late_load_frees_its_blocks(patch: pytest.MonkeyPatch) -> None:
    original_abandon, original_land = TierLoads.abandon, TierLoads._land

    def abandon(self: TierLoads, load: BlockLoad) -> list[int]:
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(self._work.pool, "quarantine", lambda block_ids: None)
            original_abandon(self, load)
        return []

    def land(self: TierLoads, command: Copy, num_good: int) -> BlockLoad | None:
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(self._work.pool, "lift_quarantine", lambda block_ids: None)
            return original_land(self, command, num_good)

    patch.setattr(TierLoads, "abandon", abandon)
    patch.setattr(TierLoads, "_land", land)


def device_does_not_wait_for_loads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("splitserve.simulation.worker.tiers.SimTiers.seconds_until_moved", lambda self, copy_ids: 0.0)


def token_of_a_failed_load_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("splitserve.engine.core._lacks_its_load", lambda sequence, chunk: False)


def waiting_steps_hold_no_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequence, "is_touched", property(lambda self: self.load is not None))


def loads_of_waiting_steps_are_given_up(patch: pytest.MonkeyPatch) -> None:
    original = TierLoads._deadlines

    def hasty(self: TierLoads) -> Iterator[tuple[BlockLoad, float]]:
        for load in self._by_copy.values():
            load.holds_step = False
        return original(self)

    patch.setattr(TierLoads, "_deadlines", hasty)


PLANTS: dict[Plant, tuple[Faults, str]] = {
    load_counts_before_it_lands: (Faults(copy_seconds=0.4), "the copies of loads differ from the loads in flight"),
    failed_load_is_trusted: (Faults(copy_error=0.3), WRONG_TOKENS),
    failed_store_is_found: (Faults(copy_error=0.3), WRONG_TOKENS),
    slots_are_not_pinned: (Faults(copy_seconds=0.4), WRONG_TOKENS),
    stores_hold_no_reference: (Faults(copy_seconds=0.4), "was freed under a copy"),
    late_load_frees_its_blocks: (Faults(copy_late=0.5), "was freed under a copy"),
    slots_of_peers_are_not_pinned: (Faults(read_seconds=0.3), "slots of the host tier are held without a holder"),
    slots_keep_their_generation: (Faults(read_seconds=0.3), WRONG_TOKENS),
    device_does_not_wait_for_loads: (Faults(copy_seconds=0.4), WRONG_TOKENS),
    token_of_a_failed_load_counts: (Faults(copy_error=0.3), "isn't computed"),
    waiting_steps_hold_no_blocks: (Faults(abort=0.6, copy_seconds=0.4), "was freed under a step"),
    loads_of_waiting_steps_are_given_up: (Faults(copy_late=0.5), "that a step or a load still touches"),
}

SLOTS_TAKEN_AGAIN: dict[Plant, tuple[list[Shape], int]] = {
    slots_are_not_pinned: ([FEW_SLOTS], 20),
    slots_keep_their_generation: ([FEW_PEER_SLOTS], 40),
}
"""Shapes and numbers of requests with which slots are taken again soon."""


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    faults, words = PLANTS[plant]
    shapes, num_requests = SLOTS_TAKEN_AGAIN.get(plant, (SHAPES, 20))
    pairs = zip(range(150), itertools.cycle(shapes), strict=False)
    schedules = (Schedule(seed=seed, faults=faults, shape=shape, num_requests=num_requests) for seed, shape in pairs)
    find(schedules, words, plant=plant.__name__)
