"""Decode's side of the hand-over protocol."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import zip_longest

import msgspec

from splitserve.protocol.config import ProtocolConfig
from splitserve.protocol.handover.offered_blocks import DiscardedRead, OfferedBlocks
from splitserve.protocol.handover.pull import Pull, problem_with, problem_with_groups
from splitserve.protocol.handover.reads import ReadCommand, ReadResult
from splitserve.protocol.messages.handover import Grant, Offer, OfferAck, OfferedBlock, PrefixGrant
from splitserve.protocol.messages.logprobs import Logprobs
from splitserve.protocol.messages.marks import MarkKind
from splitserve.protocol.request import Party, RequestKey
from splitserve.protocol.step import Draw


class SinkState(Enum):
    REQUESTED = "requested"
    READING = "reading"
    COMPLETE = "complete"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(slots=True)
class ReadInFlight:
    """A posted read that isn't terminal; ``first_index`` counts from its group's first offered block."""

    group: int
    first_index: int
    remote: Sequence[OfferedBlock]
    local_blocks: Sequence[int]
    deadline: float
    posted_at: float


@dataclass(slots=True)
class SinkStatistics:
    """Figures for the report to the router. Seconds are of the caller's clock."""

    num_reads: int = 0
    num_repeated: int = 0  # of them, because blocks had moved by then
    num_blocks: int = 0
    num_bytes: int = 0  # of those blocks, on one rank
    read_seconds: float = 0.0
    first_read_at: float | None = None
    last_offer_at: float | None = None
    last_read_at: float | None = None  # when it was posted
    last_bytes_at: float | None = None  # when the last read to end had ended on the wire
    complete_at: float | None = None

    def marks(self) -> list[tuple[MarkKind, float]]:
        """Return the events of a complete hand-over, in order of time."""
        found = (
            (MarkKind.READING, self.first_read_at),
            (MarkKind.OFFERED, self.last_offer_at),
            (MarkKind.POSTED, self.last_read_at),
            (MarkKind.READ, self.last_bytes_at),
            (MarkKind.VERIFIED, self.complete_at),
        )
        return sorted([(kind, at) for kind, at in found if at is not None], key=lambda mark: mark[1])


@dataclass(slots=True)
class SinkActions:
    """The actions that are due: messages to prefill, reads to start."""

    messages: list[Grant | PrefixGrant | OfferAck] = field(default_factory=list)
    reads: list[ReadCommand] = field(default_factory=list)


class SinkHandover:
    """Decode's side of one request, from its grant to the last verified block.

    A block counts as verified once the generation that was read *after* its data equals the one that was offered. The
    hand-over is complete when the blocks of every group are verified, and fails as a whole. Groups are read in their
    order.
    """

    def __init__(self, key: RequestKey, peer: Party, pull: Pull, config: ProtocolConfig, now: float) -> None:
        self.key = key
        self.peer = peer
        self.state = SinkState.REQUESTED
        self.failure = ""
        self.read_was_overdue = False
        self.was_declined = False  # the peer has nothing for us
        self.may_be_elsewhere = False  # the peer's device has lost the blocks; its host tier may have them
        self.mismatches: list[str] = []
        self.first_tokens: list[int] = []
        self.first_logprobs: list[Logprobs] = []
        self.second_token: int | None = None
        self.statistics = SinkStatistics()
        self.first_block = pull.spans[0].first_block  # of the first group
        self._pull = pull
        self._config = config
        self._may_move = False
        self._groups = [OfferedBlocks(len(span.local_blocks)) for span in pull.spans]
        self._last_offer_seen = False
        self._ack_due = False
        self._reads: dict[int, ReadInFlight] = {}
        self._grant_due_at = now
        self._last_heard_at = now

    # ---- events ----

    def on_offer(
        self, offer: Offer, num_peer_blocks: Sequence[int], now: float, *, has_host_tier: bool = False
    ) -> None:
        """Learn of offered blocks. An offer that contradicts itself or an earlier one fails the hand-over.

        ``num_peer_blocks``: how many the peer has, by group. ``has_host_tier``: it has one that may be read; its slots
        are among the blocks of the first group.
        """
        if self.state not in (SinkState.REQUESTED, SinkState.READING):
            return
        self._last_heard_at = now
        self._may_move = has_host_tier and self._pull.reads_host_tier and not self._pull.hashes
        problem = problem_with_groups(offer, self._pull)
        if not problem:
            if self._is_early_or_late(offer):
                return  # an earlier offer was lost, and will be sent again; or this one was overtaken
            problem = self._problem_with(offer, num_peer_blocks)
        if problem:
            self.fail(f"prefill sent an offer that can't be right: {problem}")
            return
        for span, wanted, offered in zip(offer.spans, self._pull.spans, self._groups, strict=True):
            offered.learn(span.first_block - wanted.first_block, span.blocks, offer.revision)
        self._ack_due = True
        self.state = SinkState.READING
        if offer.last and not self._last_offer_seen:
            self._last_offer_seen = True
            self.first_tokens = offer.first_tokens
            self.first_logprobs = offer.first_logprobs
            self.second_token = offer.second_token
            self.statistics.last_offer_at = now
        self._complete_if_all_verified(now)

    def on_read_result(self, result: ReadResult, now: float) -> None:
        """A read is terminal: its blocks are verified, or the hand-over has failed."""
        read = self._reads.pop(result.read_id)
        self.statistics.read_seconds += result.seconds
        self.statistics.last_bytes_at = min(now, read.posted_at + result.seconds)
        if self.state is not SinkState.READING:
            return
        if result.error is not None:
            self.fail(f"reading {len(read.remote)} blocks failed: {result.error}")
            return
        offered = [block.generation for block in read.remote]
        if list(result.generations) != offered:
            self._discard(read, result.generations, now)
            return
        if any(result.digests) and not self._digests_agree(read, result.digests):
            return
        self._groups[read.group].verify(read.first_index, len(read.remote))
        self._complete_if_all_verified(now)

    def grant_again(self, now: float) -> None:
        """Send the grant at once: prefill, which asks for it, hasn't received it."""
        self._grant_due_at = now

    def fail(self, reason: str) -> None:
        """Give the hand-over up; reads in flight go on, and so does the ban on reusing their blocks."""
        if self.state in (SinkState.REQUESTED, SinkState.READING):
            self.state = SinkState.FAILED
            self.failure = reason

    def close(self) -> None:
        """The owner needs it no more (aborted)."""
        self.state = SinkState.CLOSED

    # ---- what is due ----

    def poll(self, now: float, *, can_read: bool, next_read_id: int) -> SinkActions:
        """Messages and reads that are due. Reads are numbered from ``next_read_id``; none start unless ``can_read``."""
        actions = SinkActions()
        if self.state not in (SinkState.REQUESTED, SinkState.READING):
            return actions
        if self._fail_if_overdue(now):
            return actions
        if self._ack_due:
            self._ack_due = False
            actions.messages.append(self._make_ack())
        if now >= self._grant_due_at:
            self._grant_due_at = now + self._config.renew_interval_seconds
            actions.messages.append(self._make_grant())
        while can_read and self._can_post():
            actions.reads.append(self._post_read(next_read_id + len(actions.reads), now))
        return actions

    def next_deadline(self) -> float:
        """Return when :meth:`poll` has something to do, if nothing happens before."""
        if self.state not in (SinkState.REQUESTED, SinkState.READING):
            return float("inf")
        deadlines = [self._grant_due_at, *(read.deadline for read in self._reads.values())]
        deadlines += [read.deadline for read in self._discarded()]
        if not self._last_offer_seen:
            deadlines.append(self._last_heard_at + self._config.dead_after_seconds)
        return min(deadlines)

    @property
    def num_verified_blocks(self) -> int:
        """Verified prompt blocks of the first group without a gap from ``first_block`` on."""
        return self._groups[0].num_verified

    @property
    def verified_ends(self) -> list[int]:
        """The end, in each group, of the verified prompt blocks that have no gap from the group's first one on."""
        pairs = zip(self._pull.spans, self._groups, strict=True)
        return [span.first_block + offered.num_verified for span, offered in pairs]

    def is_verified(self, index: int, group: int = 0) -> bool:
        """Return whether the block was read and verified; ``index`` counts from the group's first block."""
        return self._groups[group].is_verified(index)

    @property
    def last_offer_seen(self) -> bool:
        return self._last_offer_seen

    @property
    def reads_in_flight(self) -> dict[int, ReadInFlight]:
        """Unfinished reads by their ids: they may still write to their local blocks."""
        return self._reads

    # ---- inside ----

    @property
    def first_draw(self) -> Draw:
        """The first token, with those of the other choices, or with the second one, as the last offer brought them."""
        pairs = zip_longest(self.first_tokens, self.first_logprobs[: len(self.first_tokens)])
        first, *others = (Draw((token_id,), logprobs) for token_id, logprobs in pairs)
        if self.second_token is not None:
            return Draw((first.token_id, self.second_token), first.logprobs)
        return msgspec.structs.replace(first, others=tuple(others))

    def _make_grant(self) -> Grant | PrefixGrant:
        if self._pull.hashes:
            return PrefixGrant(self.key, self.first_block, list(self._pull.hashes), self._config.lease_seconds)
        tokens = self._pull.num_prompt_tokens, self._pull.num_cached_tokens
        return Grant(self.key, *tokens, self._config.lease_seconds, self._pull.reads_host_tier)

    def _make_ack(self) -> OfferAck:
        ends = [span.first_block + len(had) for span, had in zip(self._pull.spans, self._groups, strict=True)]
        return OfferAck(self.key, ends, self._last_offer_seen, self._groups[0].revision)

    def _is_early_or_late(self, offer: Offer) -> bool:
        """Return whether the offer leaves a gap in some group, or has an older revision than a received one."""
        starts = zip(offer.spans, self._pull.spans, self._groups, strict=True)
        has_gap = any(span.first_block - wanted.first_block > len(had) for span, wanted, had in starts)
        return has_gap or offer.revision < self._groups[0].revision

    def _problem_with(self, offer: Offer, num_peer_blocks: Sequence[int]) -> str | None:
        problem = problem_with(offer, self._pull, num_peer_blocks)
        if problem:
            return problem
        triples = zip(offer.spans, self._pull.spans, self._groups, strict=True)
        problems = (
            had.problem_with(span.first_block - wanted.first_block, span.blocks, offer.revision)
            for span, wanted, had in triples
        )
        return next((problem for problem in problems if problem), None)

    def _discard(self, read: ReadInFlight, generations: Sequence[int], now: float) -> None:
        """Discard a read some of whose blocks were overwritten meanwhile. If the peer has moved them, its current offer
        names their new locations."""
        pairs = zip(read.remote, generations, strict=False)
        positions = [position for position, (block, found) in enumerate(pairs) if block.generation != found]
        discarded = DiscardedRead(read.first_index, read.remote, positions, now + self._config.dead_after_seconds)
        if self._may_move and positions:
            self._groups[read.group].discard(discarded)
            self._grant_due_at = now
        else:
            self._fail_discarded(discarded)

    def _fail_discarded(self, read: DiscardedRead) -> None:
        self.may_be_elsewhere = self._last_offer_seen
        self.fail(f"{len(read.positions)} of {len(read.remote)} blocks changed while they were read")

    def _digests_agree(self, read: ReadInFlight, digests: Sequence[bytes]) -> bool:
        """Return whether the bytes that landed are those that were offered; fail the hand-over if not."""
        if not all(block.digest for block in read.remote):
            self.fail("prefill's offers have no digests to verify: start it with --verify-kv, too")
            return False
        pairs = zip(read.remote, read.local_blocks, digests, strict=True)
        self.mismatches = [f"{block.block_id} -> {local}" for block, local, found in pairs if block.digest != found]
        if self.mismatches:
            self.fail(f"{len(self.mismatches)} of {len(digests)} blocks arrived with other bytes than were offered")
        return not self.mismatches

    def _fail_if_overdue(self, now: float) -> bool:
        if any(now >= read.deadline for read in self._reads.values()):
            self.read_was_overdue = True
            self.fail("a read missed its deadline")
        elif (late := next((read for read in self._discarded() if now >= read.deadline), None)) is not None:
            self._fail_discarded(late)
        elif now >= self._last_heard_at + self._config.dead_after_seconds and not self._last_offer_seen:
            self.fail(f"prefill was silent for {now - self._last_heard_at:.1f} s")
        else:
            return False
        return True

    def _can_post(self) -> bool:
        is_some_due = any(offered.can_post for offered in self._groups)
        return is_some_due and len(self._reads) < self._config.max_reads_in_flight_per_request

    def _discarded(self) -> list[DiscardedRead]:
        return [read for offered in self._groups for read in offered.discarded]

    def _post_read(self, read_id: int, now: float) -> ReadCommand:
        group = next(number for number, offered in enumerate(self._groups) if offered.can_post)
        span, offered = self._pull.spans[group], self._groups[group]
        num_repeated = offered.num_repeated
        first, remote = offered.next_range(self._config.max_blocks_per_read)
        local = list(span.local_blocks[first : first + len(remote)])
        num_bytes = len(remote) * span.block_bytes
        deadline = now + self._config.read_deadline_seconds + num_bytes / self._config.min_read_bytes_per_second
        self._reads[read_id] = ReadInFlight(group, first, remote, local, deadline, now)
        self.statistics.num_reads += 1
        if offered.num_repeated > num_repeated:
            self.statistics.num_repeated += 1
        else:
            self.statistics.num_blocks += len(remote)
            self.statistics.num_bytes += num_bytes
        if self.statistics.first_read_at is None:
            self.statistics.first_read_at = now
        self.statistics.last_read_at = now
        return ReadCommand(read_id, self.peer, local, [block.block_id for block in remote], group)

    def _complete_if_all_verified(self, now: float) -> None:
        if self._last_offer_seen and all(map(self._is_group_verified, range(len(self._groups)))):
            self.state = SinkState.COMPLETE
            self.statistics.complete_at = now

    def _is_group_verified(self, group: int) -> bool:
        offered = self._groups[group]
        if self._pull.hashes:
            return offered.num_verified == len(offered)
        end = self._pull.end_block(has_second_token=self.second_token is not None)
        return offered.num_verified == end - self._pull.spans[group].first_block
