"""Bugs that random schedules find: reads of what has changed, lying peers, attempts without end, connections left over.

``scripts/long-tests schedules`` runs the same schedules by the million.
"""

import dataclasses
import itertools
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from typing import Any

import msgspec
import pytest

from peer_scenarios import (
    connecting_peers_fail_quietly,
    each_welcome_connects,
    failed_peers_fail_again,
    forgotten_peers_keep_their_socket,
    late_connections_revive,
)
from planted import CHANGED, Plant, find
from schedules import Schedule, random_schedule
from splitserve.decode.peers import PeerTable
from splitserve.protocol.handover.reads import ReadResult
from splitserve.protocol.handover.sink import SinkHandover
from splitserve.protocol.messages.handover import Offer, OfferedBlock, PeerWelcome
from splitserve.protocol.request import Party
from splitserve.router.placement.policies import Policy, RequestShape, Snapshot
from splitserve.router.requests.ladder import Step, next_step
from splitserve.router.requests.state import FailedAttempt, FailureReason
from splitserve.router.requests.token_sequence import TokenSequence

NUM_SCHEDULES = 300
CONNECTS = "connects don't equal disconnects plus current peers"


def last_generation_unchecked(patch: pytest.MonkeyPatch) -> None:
    believe_generations(patch, lambda peer, blocks: [index == len(blocks) - 1 for index in range(len(blocks))])


def slot_generations_unchecked(patch: pytest.MonkeyPatch) -> None:
    num_device_blocks: dict[Party, int] = {}
    original = PeerTable.on_welcome

    def on_welcome(self: PeerTable, welcome: PeerWelcome, sender: Party, now: float) -> None:
        num_device_blocks[sender] = welcome.ranks[0].region.num_blocks
        original(self, welcome, sender, now)

    patch.setattr(PeerTable, "on_welcome", on_welcome)
    believe_generations(patch, lambda peer, blocks: [block.block_id >= num_device_blocks[peer] for block in blocks])


def believe_generations(
    patch: pytest.MonkeyPatch, is_believed: Callable[[Party, ListLike[OfferedBlock]], list[bool]]
) -> None:
    original = SinkHandover.on_read_result

    def believe(self: SinkHandover, result: ReadResult, now: float) -> None:
        read = self.reads_in_flight.get(result.read_id)
        if read is not None and result.error is None:
            pairs = zip(is_believed(self.peer, read.remote), read.remote, result.generations, strict=True)
            generations = [block.generation if believed else found for believed, block, found in pairs]
            result = msgspec.structs.replace(result, generations=generations)
        original(self, result, now)

    patch.setattr(SinkHandover, "on_read_result", believe)


def other_tokens_believed(patch: pytest.MonkeyPatch) -> None:
    """The router keeps what it has, and ignores what contradicts it."""
    original = TokenSequence._merge

    def merge(self: TokenSequence, position: int, token_ids: ListLike[int], logprobs: Any) -> None:
        known = dict(enumerate(self.output_ids)) | self._held
        kept = [known.get(index, token) for index, token in enumerate(token_ids, start=position)]
        original(self, position, kept, logprobs)

    patch.setattr(TokenSequence, "_merge", merge)


def block_numbers_unchecked(patch: pytest.MonkeyPatch) -> None:
    original = SinkHandover.on_offer

    def on_offer(self: SinkHandover, offer: Offer, num_peer_blocks: ListLike[int], now: float, **options: Any) -> None:
        original(self, offer, [number + 1000 for number in num_peer_blocks], now, **options)

    patch.setattr(SinkHandover, "on_offer", on_offer)


def attempts_without_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("splitserve.router.requests.ladder.MAX_ATTEMPTS", 1000)
    patch.setattr("splitserve.router.requests.ladder.MAX_HANDOVERS", 1000)
    original = next_step

    def shun_nobody(snapshot: Snapshot, shape: RequestShape, policy: Policy, history: list[FailedAttempt]) -> Step:
        return original(snapshot, shape, policy, [excused(attempt) for attempt in history])

    def excused(attempt: FailedAttempt) -> FailedAttempt:
        failure = dataclasses.replace(attempt.failure, reason=FailureReason.WORKER_LOST)
        return dataclasses.replace(attempt, failure=failure)

    patch.setattr("splitserve.router.requests.attempts.next_step", shun_nobody)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (last_generation_unchecked, CHANGED),
        (slot_generations_unchecked, CHANGED),
        (other_tokens_believed, "goes on with tokens"),
        (block_numbers_unchecked, "a read of a missing block"),
        (attempts_without_end, "begins attempt 9"),
        (late_connections_revive, CONNECTS),
        (connecting_peers_fail_quietly, CONNECTS),
        (failed_peers_fail_again, CONNECTS),
        (each_welcome_connects, CONNECTS),
        (forgotten_peers_keep_their_socket, "dials don't equal hang-ups plus peers"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_random_schedules_find_a_planted_bug(plant: Plant, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found = map(random_schedule, itertools.count())
    if plant is slot_generations_unchecked:  # about one in nine
        found = filter(has_lies_and_slots, found)
    find(itertools.islice(found, NUM_SCHEDULES), words, plant=plant.__name__)


def has_lies_and_slots(schedule: Schedule) -> bool:
    return schedule.faults.lies > 0 and schedule.shape.tier_slots > 0
