"""Prefill's side of the hand-over protocol."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from splitserve.protocol.config import ProtocolConfig
from splitserve.protocol.messages.handover import Grant, Offer, OfferAck, OfferedBlock, OfferedSpan
from splitserve.protocol.messages.logprobs import Logprobs
from splitserve.protocol.request import Party


class SourceState(Enum):
    GRANTED = "granted"
    OFFERING = "offering"
    OFFERED = "offered"
    WITHDRAWN = "withdrawn"
    RELEASED = "released"


@dataclass(slots=True)
class GroupOffers:
    """Offered blocks of one group of the cache, from prompt block ``first_block`` on."""

    first_block: int
    num_acknowledged: int  # prompt blocks, those before the first one included
    blocks: list[OfferedBlock] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first_block + len(self.blocks)


class SourceHandover:
    """Prefill's side of one request, from its grant to its release.

    The owner holds a reference to every offered block until ``state`` is RELEASED. ``tails``: for each group of the
    cache after the first, the first prompt block that decode needs.
    """

    def __init__(
        self,
        grant: Grant,
        peer: Party,
        block_size: int,
        config: ProtocolConfig,
        now: float,
        *,
        tails: Sequence[int] = (),
    ) -> None:
        self.key = grant.key
        self.peer = peer
        self.state = SourceState.GRANTED
        self.release_reason = ""
        self.was_withdrawn = False
        self.attempt_over = False
        self.all_offered_at = float("inf")
        self.reads_host_tier = grant.reads_host_tier
        self._config = config
        self._block_size = block_size
        self.first_block = grant.num_cached_tokens // block_size  # of the first group
        self._groups = [GroupOffers(first, first) for first in (self.first_block, *tails)]
        self._num_tokens = grant.num_cached_tokens
        self._last_acknowledged = False
        self._revision = 0
        self._first_tokens: list[int] = []
        self._first_logprobs: list[Logprobs] = []
        self._second_token: int | None = None
        self._lease_seconds = grant.lease_seconds
        self.lease_expires_at = now + grant.lease_seconds
        self._offer_due_at = now

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def num_offered_blocks(self, group: int = 0) -> int:
        """Return the prompt blocks of a group covered so far, including those before its first one."""
        return self._groups[group].end

    @property
    def has_offered(self) -> bool:
        return any(group.blocks for group in self._groups)

    def renew(self, now: float) -> None:
        """Renew the lease after a repeated grant, and send the current offer again. The lease keeps its length."""
        self.lease_expires_at = now + self._lease_seconds
        self._offer_due_at = now

    def offer(self, blocks: Sequence[Sequence[OfferedBlock]], num_tokens: int, now: float) -> None:
        """Offer more blocks of each group, whose KV writes have completed; those of the first group cover the first
        ``num_tokens`` tokens in total."""
        assert self.state in (SourceState.GRANTED, SourceState.OFFERING), self.state
        assert num_tokens % self._block_size == 0, "only the last offer may end inside a block"
        self._add(blocks)
        self._num_tokens = num_tokens
        self.state = SourceState.OFFERING
        self._offer_due_at = now

    def offer_last(
        self,
        blocks: Sequence[Sequence[OfferedBlock]],
        num_tokens: int,
        first_tokens: list[int],
        now: float,
        *,
        first_logprobs: Sequence[Logprobs] = (),
        second_token: int | None = None,
    ) -> None:
        """The rest of the prompt, which may end inside a block, with the first token of each choice; or the rest of
        prompt and first token, with the second one, too."""
        assert self.state in (SourceState.GRANTED, SourceState.OFFERING), self.state
        self._add(blocks)
        self._num_tokens = num_tokens
        self._first_tokens = first_tokens
        self._first_logprobs = list(first_logprobs)
        self._second_token = second_token
        self.all_offered_at = now
        self.state = SourceState.OFFERED
        self._offer_due_at = now

    def offered_block(self, number: int) -> OfferedBlock:
        """Return the location of prompt block ``number`` of the first group, which was offered."""
        return self._groups[0].blocks[number - self.first_block]

    def move(self, locations: Mapping[int, OfferedBlock], now: float) -> None:
        """Begin a new revision of the offer, in which these prompt blocks of the only group, by number, have other
        locations."""
        assert self.state is SourceState.OFFERED and locations
        (group,) = self._groups
        for number, block in locations.items():
            group.blocks[number - group.first_block] = block
        group.num_acknowledged = min(group.num_acknowledged, *locations)
        self._last_acknowledged = False
        self._revision += 1
        self._offer_due_at = now

    def acknowledge(self, ack: OfferAck) -> None:
        """Note the offers that decode has received: they need not be sent again."""
        if self._can_be(ack) and ack.revision == self._revision:
            for group, num_blocks in zip(self._groups, ack.num_blocks, strict=True):
                group.num_acknowledged = max(group.num_acknowledged, num_blocks)
            self._last_acknowledged |= ack.last and self.state is SourceState.OFFERED
        if not self._unacknowledged():
            self._offer_due_at = float("inf")

    def withdraw(self, reason: str, *, attempt_over: bool) -> None:
        """Make no more offers; offered blocks stay until decode releases them or the lease runs out.

        ``attempt_over`` as in :class:`splitserve.protocol.messages.handover.Withdrawn`, which may have to be sent
        again.
        """
        self.state = SourceState.WITHDRAWN
        self.was_withdrawn = True
        self.attempt_over = attempt_over
        self.release_reason = reason

    def release(self, reason: str) -> None:
        self.state = SourceState.RELEASED
        self.release_reason = reason

    def poll(self, now: float) -> Offer | None:
        """The offer that is due, if any; ends the hand-over when its lease has run out."""
        if self.state is SourceState.RELEASED:
            return None
        if now >= self.lease_expires_at:
            self.release("lease expired")
            return None
        if now < self._offer_due_at or self.state is SourceState.WITHDRAWN:
            return None
        self._offer_due_at = now + self._config.offer_resend_seconds if self._unacknowledged() else float("inf")
        return Offer(
            key=self.key,
            spans=[self._unacknowledged_span(number) for number in range(len(self._groups))],
            num_tokens=self._num_tokens,
            last=self.state is SourceState.OFFERED,
            first_tokens=self._first_tokens,
            first_logprobs=self._first_logprobs,
            second_token=self._second_token,
            revision=self._revision,
        )

    def next_deadline(self) -> float:
        """Return when :meth:`poll` has something to do, if nothing happens before."""

        if self.state is SourceState.RELEASED:
            return float("inf")
        if self.state is SourceState.WITHDRAWN:
            return self.lease_expires_at
        return min(self.lease_expires_at, self._offer_due_at)

    def _unacknowledged(self) -> bool:
        if self.state is SourceState.OFFERED:
            return not self._last_acknowledged
        return any(group.num_acknowledged < group.end for group in self._groups)

    def _add(self, blocks: Sequence[Sequence[OfferedBlock]]) -> None:
        for group, more in zip(self._groups, blocks, strict=True):
            group.blocks += more

    def _can_be(self, ack: OfferAck) -> bool:
        """Return whether no group is acknowledged beyond what was offered of it."""
        ends = [group.end for group in self._groups]
        return len(ack.num_blocks) == len(ends) and all(map(int.__le__, ack.num_blocks, ends))

    def _unacknowledged_span(self, number: int) -> OfferedSpan:
        group = self._groups[number]
        return OfferedSpan(number, group.num_acknowledged, group.blocks[group.num_acknowledged - group.first_block :])
