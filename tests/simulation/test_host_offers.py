"""Blocks on offer that leave prefill's device, in whole simulated clusters: what it costs, and that the checks bite."""

from typing import Any

import msgspec
import pytest

from planted import CHANGED, HANDOVERS_FAILED, WRONG_TOKENS, Plant, find
from schedules import LONG_WAITS, SHORT_LEASES, Schedule, num_schedules, run_schedule
from splitserve.engine.block_manager import BlockManager
from splitserve.engine.sequence import Sequence
from splitserve.kvconnector.tiers.index import TierIndex
from splitserve.protocol.handover.offered_blocks import DiscardedRead, OfferedBlocks
from splitserve.protocol.handover.sink import SinkHandover, SinkState
from splitserve.protocol.handover.source import SourceHandover
from splitserve.protocol.messages.handover import Offer, OfferAck, OfferedBlock
from splitserve.simulation.faults import Faults, Shape
from splitserve.simulation.simulator import Simulator

SHAPE = Shape(decode=2, num_blocks=40, prefill_blocks=14, tier_slots=60)
FEW_SLOTS = msgspec.structs.replace(SHAPE, tier_slots=20)  # they are taken again soon
SLOW_READS = Faults(read_seconds=0.8)
LOSSY = Faults(read_seconds=0.8, drop=0.2, duplicate=0.2, max_delay=0.5)
SOON = {"host_offer_after_seconds": 0.05}


def schedule(seed: int, faults: Faults, protocol: dict[str, float], shape: Shape = SHAPE) -> Schedule:
    return Schedule(seed=seed, faults=faults, shape=shape, protocol=SOON | protocol, num_requests=20)


def num_moved(sim: Simulator) -> int:
    return sum(worker.core.load().host_offered_blocks for worker in sim.workers.values())


@pytest.mark.parametrize(
    ("faults", "protocol", "shape"),
    [(SLOW_READS, {}, SHAPE), (SLOW_READS, {}, FEW_SLOTS), (LOSSY, LONG_WAITS, SHAPE)],
    ids=["slow reads", "few slots", "lost messages"],
)
def test_slow_readers_cost_no_handover(
    faults: Faults, protocol: dict[str, float], shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks move while they are read, and before; some reads are repeated; every hand-over ends well."""
    again: list[DiscardedRead] = []
    discard = OfferedBlocks.discard

    def note(self: OfferedBlocks, read: DiscardedRead) -> None:
        again.append(read)
        discard(self, read)

    monkeypatch.setattr(OfferedBlocks, "discard", note)
    moved = handovers = num_run = 0
    while num_run < num_schedules(3) or (num_run < 8 and not (moved > 50 and len(again) > 10 and handovers > 50)):
        sim = run_schedule(schedule(num_run, faults, protocol, shape))
        assert sim.num_handover_failures == 0
        moved, handovers, num_run = moved + num_moved(sim), handovers + sim.num_handovers, num_run + 1
    assert moved > 50 and len(again) > 10 and handovers > 50


@pytest.mark.parametrize(
    ("faults", "protocol"),
    [
        (Faults(freezes=3, kills=1, read_seconds=0.3), {}),
        (Faults(read_late=0.3, copy_seconds=0.3, copy_error=0.2), {}),
        (Faults(partitions=2, read_seconds=1.0), SHORT_LEASES),
        (Faults(drop=0.2, abort=0.4, read_error=0.1, read_seconds=0.5, step_error=0.03), SHORT_LEASES),
        (Faults(drains=2, read_seconds=0.8, copy_late=0.3), {}),
    ],
    ids=["freezes", "late", "leases", "everything", "drains"],
)
def test_any_fault_beside_it(faults: Faults, protocol: dict[str, float]) -> None:
    sims = [run_schedule(schedule(seed, faults, protocol)) for seed in range(num_schedules(4))]
    assert sum(map(num_moved, sims)) > 10


def slots_are_released_while_on_offer(patch: pytest.MonkeyPatch) -> None:
    leave = BlockManager.leave_device

    def hasty(self: BlockManager, sequence: Sequence, block_ids: dict[int, int]) -> dict[int, tuple[int, int]]:
        places = leave(self, sequence, block_ids)
        self.tiers.release_slots(sequence.host_slots)
        sequence.host_slots = []
        return places

    patch.setattr(BlockManager, "leave_device", hasty)


def and_their_generations_stay(patch: pytest.MonkeyPatch) -> None:
    slots_are_released_while_on_offer(patch)
    begin = TierIndex.begin_store

    def keep(self: TierIndex, block_hash: bytes) -> object:
        before = None if self._generations is None else self._generations.copy()
        place = begin(self, block_hash)
        if before is not None and self._generations is not None:
            self._generations[:] = before
        return place

    patch.setattr(TierIndex, "begin_store", keep)


def slots_are_kept_for_ever(patch: pytest.MonkeyPatch) -> None:
    give_back = BlockManager.give_back

    def forgetful(self: BlockManager, sequence: Sequence) -> None:
        sequence.host_slots = []
        give_back(self, sequence)

    patch.setattr(BlockManager, "give_back", forgetful)


def discarded_reads_are_trusted(patch: pytest.MonkeyPatch) -> None:
    def trust(self: OfferedBlocks, read: DiscardedRead) -> None:
        self.verify(read.first_index, len(read.remote))

    patch.setattr(OfferedBlocks, "discard", trust)


def read_again_before_the_first_read_is_over(patch: pytest.MonkeyPatch) -> None:
    on_offer = SinkHandover.on_offer

    def hasty(self: SinkHandover, offer: Offer, *arguments: Any, **options: Any) -> None:
        is_new = offer.revision > self._groups[0].revision
        on_offer(self, offer, *arguments, **options)
        if is_new and self.state is SinkState.READING:
            self._groups[0]._again.extend((read.first_index, len(read.remote)) for read in self._reads.values())

    patch.setattr(SinkHandover, "on_offer", hasty)


def any_acknowledgement_counts(patch: pytest.MonkeyPatch) -> None:
    acknowledge = SourceHandover.acknowledge

    def believe(self: SourceHandover, ack: OfferAck) -> None:
        acknowledge(self, OfferAck(ack.key, ack.num_blocks, ack.last, self._revision))

    patch.setattr(SourceHandover, "acknowledge", believe)


def overtaken_offers_are_heard(patch: pytest.MonkeyPatch) -> None:
    on_offer = SinkHandover.on_offer

    def hear(self: SinkHandover, offer: Offer, *arguments: Any, **options: Any) -> None:
        known = self._groups[0].revision
        newer = msgspec.structs.replace(offer, revision=known + 1) if offer.revision < known else offer
        on_offer(self, newer, *arguments, **options)

    patch.setattr(SinkHandover, "on_offer", hear)


def moves_are_not_told(patch: pytest.MonkeyPatch) -> None:
    def keep_quiet(self: SourceHandover, places: dict[int, OfferedBlock], now: float) -> None:
        for number, block in places.items():
            self._groups[0].blocks[number - self.first_block] = block

    patch.setattr(SourceHandover, "move", keep_quiet)


SLOW = (SLOW_READS, {}, SHAPE)
FORGETFUL = (LOSSY, LONG_WAITS, SHAPE)
PLANTS: dict[Plant, tuple[tuple[Faults, dict[str, float], Shape], str]] = {
    slots_are_released_while_on_offer: ((SLOW_READS, {}, FEW_SLOTS), HANDOVERS_FAILED),
    and_their_generations_stay: ((SLOW_READS, {}, FEW_SLOTS), WRONG_TOKENS),
    slots_are_kept_for_ever: (SLOW, "slots of the host tier are held without a holder"),
    discarded_reads_are_trusted: (SLOW, CHANGED),
    read_again_before_the_first_read_is_over: (SLOW, "two reads write to one block"),
    any_acknowledgement_counts: (FORGETFUL, HANDOVERS_FAILED),
    overtaken_offers_are_heard: (FORGETFUL, HANDOVERS_FAILED),
    moves_are_not_told: (SLOW, HANDOVERS_FAILED),
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in these schedules makes a hand-over fail."""
    plant(monkeypatch)
    options, words = PLANTS[plant]
    schedules = (schedule(seed, *options) for seed in range(60))
    find(schedules, words, is_handover_sure=lambda schedule: True, plant=plant.__name__)
