"""The hand-over protocol: two state machines, one per side and request. No I/O, no clock, no memory, no torch.

Prefill runs a :class:`SourceHandover`, decode a :class:`SinkHandover`:

    sink                              source
    REQUESTED --Grant-------------->  GRANTED      decode has room for the whole prompt
    REQUESTED <------------Offer---   OFFERING     blocks whose KV is complete; cumulative, sent again until
    acknowledged
    READING   --OfferAck----------->
    (read data, then generations)
    READING   <------Offer(last)---   OFFERED      the rest, and the first token
    COMPLETE  --Release------------>  RELEASED     every block was read and verified

Either side can end it earlier: Withdrawn from prefill, Release from decode, or a lease that isn't renewed. A repeated
Grant renews the lease; prefill answers each with its current offer, so a lost message costs time, never the request.

Prefill may move blocks that are all offered to its host tier: the next revision of the offer names their slots. What
decode read of their old places counts only if the generations say so; else it is read again from the new ones.

With a :class:`PrefixGrant` the same machines move blocks that a worker has already: GRANTED goes straight to OFFERED,
and the last offer has no first token, and maybe fewer blocks than were wanted.

Time comes in as ``now`` (seconds of one process's monotonic clock). What is due comes out of ``poll``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum

import msgspec

from splitserve.config import ProtocolConfig
from splitserve.messages import Grant, Offer, OfferAck, OfferedBlock, PrefixGrant
from splitserve.offered_blocks import DiscardedRead, OfferedBlocks
from splitserve.request import Party, RequestKey


class ReadCommand(msgspec.Struct, frozen=True, tag=True):
    """Copy the peer's blocks ``remote_blocks[i]`` into our ``local_blocks[i]``, then read the remote generations."""

    read_id: int
    peer: Party
    local_blocks: Sequence[int]
    remote_blocks: Sequence[int]


class ReadPath(StrEnum):
    """How the data of a read got to its place."""

    DIRECT = "direct"  # whole blocks, straight into ours
    LAYERS = "layers"  # pieces of blocks, a descriptor per layer
    STAGED = "staged"  # whole blocks into a staging area, then the heads that are ours to their place
    GATHERED = "gathered"  # put together by the source, in large pieces into a staging area, then to its place
    MAPPED = "mapped"  # copied straight into place by our GPU, through a mapping of the peer's memory
    KERNEL = "kernel"  # as mapped, but by a kernel of ours instead of by copy engines

    @property
    def is_through_mapping(self) -> bool:
        """Whether our GPU copies from the peer's memory, and nothing is posted to a transport."""
        return self in (ReadPath.MAPPED, ReadPath.KERNEL)


class ReadResult(msgspec.Struct, frozen=True, tag=True):
    """A read is terminal: nothing will write to its local blocks any more.

    ``generations[i]`` is the remote block's generation, read after all data had landed. ``error`` is None on success;
    after an error nothing is known of the local blocks' content. ``seconds`` is what the read took, for metrics.
    ``digests[i]`` is of the bytes that landed in the local block, empty unless they are to be verified. ``path`` is the
    way that the data took.
    """

    read_id: int
    error: str | None
    generations: Sequence[int] = ()
    seconds: float = 0.0
    digests: Sequence[bytes] = ()
    path: ReadPath = ReadPath.DIRECT


class SourceState(Enum):
    GRANTED = "granted"
    OFFERING = "offering"
    OFFERED = "offered"
    WITHDRAWN = "withdrawn"
    RELEASED = "released"


class SourceHandover:
    """Prefill's side of one request, from its grant to its release.

    The owner holds a reference to every offered block until ``state`` is RELEASED.
    """

    def __init__(self, grant: Grant, peer: Party, block_size: int, config: ProtocolConfig, now: float) -> None:
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
        self.first_block = grant.num_cached_tokens // block_size
        self._blocks: list[OfferedBlock] = []  # of prompt blocks first_block, first_block + 1, ...
        self._num_tokens = grant.num_cached_tokens
        self._num_acknowledged = self.first_block
        self._last_acknowledged = False
        self._revision = 0
        self._first_tokens: list[int] = []
        self._lease_seconds = grant.lease_seconds
        self.lease_expires_at = now + grant.lease_seconds
        self._offer_due_at = now

    @property
    def num_offered_blocks(self) -> int:
        """Blocks of the prompt covered so far, those that decode had cached included."""
        return self.first_block + len(self._blocks)

    def renew(self, now: float) -> None:
        """A repeated grant: decode is alive and wants to know where we stand. The lease keeps its length."""
        self.lease_expires_at = now + self._lease_seconds
        self._offer_due_at = now

    def offer(self, blocks: Sequence[OfferedBlock], num_tokens: int, now: float) -> None:
        """More blocks whose KV writes have completed, covering the prompt's first ``num_tokens`` tokens in total."""
        assert self.state in (SourceState.GRANTED, SourceState.OFFERING), self.state
        assert num_tokens % self._block_size == 0, "only the last offer may end inside a block"
        self._blocks += blocks
        self._num_tokens = num_tokens
        self.state = SourceState.OFFERING
        self._offer_due_at = now

    def offer_last(self, blocks: Sequence[OfferedBlock], num_tokens: int, first_tokens: list[int], now: float) -> None:
        """The rest of the prompt, which may end inside a block, with the first token of each choice."""
        assert self.state in (SourceState.GRANTED, SourceState.OFFERING), self.state
        self._blocks += blocks
        self._num_tokens = num_tokens
        self._first_tokens = first_tokens
        self.all_offered_at = now
        self.state = SourceState.OFFERED
        self._offer_due_at = now

    def offered_block(self, number: int) -> OfferedBlock:
        """The place of prompt block ``number``, which was offered."""
        return self._blocks[number - self.first_block]

    def move(self, places: Mapping[int, OfferedBlock], now: float) -> None:
        """Prompt blocks that have another place from now on, by their number: a new revision of the offer."""
        assert self.state is SourceState.OFFERED and places
        for number, block in places.items():
            self._blocks[number - self.first_block] = block
        self._num_acknowledged = min(self._num_acknowledged, *places)
        self._last_acknowledged = False
        self._revision += 1
        self._offer_due_at = now

    def acknowledge(self, ack: OfferAck) -> None:
        """Decode knows some offers: they need not be sent again."""
        if ack.num_blocks <= self.num_offered_blocks and ack.revision == self._revision:
            self._num_acknowledged = max(self._num_acknowledged, ack.num_blocks)
            self._last_acknowledged |= ack.last and self.state is SourceState.OFFERED
        if not self._unacknowledged():
            self._offer_due_at = float("inf")

    def withdraw(self, reason: str, *, attempt_over: bool) -> None:
        """No more offers; what was offered stays until decode releases it or the lease runs out.

        ``attempt_over`` as in :class:`splitserve.messages.Withdrawn`, which may have to be said again.
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
        start = self._num_acknowledged - self.first_block
        return Offer(
            key=self.key,
            first_block=self._num_acknowledged,
            blocks=self._blocks[start:],
            num_tokens=self._num_tokens,
            last=self.state is SourceState.OFFERED,
            first_tokens=self._first_tokens,
            revision=self._revision,
        )

    def next_deadline(self) -> float:
        """When :meth:`poll` has something to do, if nothing happens before."""
        if self.state is SourceState.RELEASED:
            return float("inf")
        if self.state is SourceState.WITHDRAWN:
            return self.lease_expires_at
        return min(self.lease_expires_at, self._offer_due_at)

    def _unacknowledged(self) -> bool:
        if self.state is SourceState.OFFERED:
            return not self._last_acknowledged
        return self._num_acknowledged < self.num_offered_blocks


class SinkState(Enum):
    REQUESTED = "requested"
    READING = "reading"
    COMPLETE = "complete"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(slots=True)
class ReadInFlight:
    """A posted read that isn't terminal; ``first_index`` counts from the hand-over's first offered block."""

    first_index: int
    remote: Sequence[OfferedBlock]
    local_blocks: Sequence[int]
    deadline: float


@dataclass(slots=True)
class SinkStatistics:
    """For the report to the router. Seconds are of the caller's clock."""

    num_reads: int = 0
    num_repeated: int = 0  # of them, since blocks had another place by then
    num_blocks: int = 0
    read_seconds: float = 0.0
    first_read_at: float | None = None
    last_offer_at: float | None = None
    complete_at: float | None = None


@dataclass(slots=True)
class SinkActions:
    """What is due: messages to prefill, reads to start."""

    messages: list[Grant | PrefixGrant | OfferAck] = field(default_factory=list)
    reads: list[ReadCommand] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Pull:
    """The blocks that a hand-over is to read, and their destinations."""

    num_prompt_tokens: int  # known to both sides
    num_cached_tokens: int  # of whole blocks, which are here already; fewer than the prompt's
    local_blocks: Sequence[int]  # destinations of the blocks after those, held by the request and written by its reads
    block_size: int  # tokens
    block_bytes: int  # of one block on one rank
    hashes: Sequence[bytes] = ()  # of the same blocks: reads what the peer has of them already, and nothing more
    reads_host_tier: bool = False  # the peer may move what it offers to its host tier, if it has one

    def __post_init__(self) -> None:
        assert self.num_cached_tokens % self.block_size == 0 and self.num_cached_tokens < self.num_prompt_tokens
        assert not self.hashes or len(self.hashes) == len(self.local_blocks)


class SinkHandover:
    """Decode's side of one request, from its grant to the last verified block.

    A block counts as verified once the generation that was read *after* its data equals the one that was offered.
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
        self.statistics = SinkStatistics()
        self.first_block = pull.num_cached_tokens // pull.block_size
        self._pull = pull
        self._config = config
        self._may_move = False
        self._offered = OfferedBlocks(len(pull.local_blocks))
        self._last_offer_seen = False
        self._ack_due = False
        self._reads: dict[int, ReadInFlight] = {}
        self._grant_due_at = now
        self._last_heard_at = now

    # ---- events ----

    def on_offer(self, offer: Offer, num_peer_blocks: int, now: float, *, has_host_tier: bool = False) -> None:
        """Learn of offered blocks. An offer that contradicts itself or an earlier one fails the hand-over.

        ``has_host_tier``: the peer has one that may be read; its slots are among the ``num_peer_blocks``.
        """
        if self.state not in (SinkState.REQUESTED, SinkState.READING):
            return
        self._last_heard_at = now
        self._may_move = has_host_tier and self._pull.reads_host_tier and not self._pull.hashes
        start = offer.first_block - self.first_block
        if start > len(self._offered) or offer.revision < self._offered.revision:
            return  # an earlier offer was lost, and will be sent again; or this one was overtaken
        problem = self._problem_with(offer, start, num_peer_blocks)
        if problem:
            self.fail(f"prefill sent an offer that can't be right: {problem}")
            return
        self._offered.learn(start, offer.blocks, offer.revision)
        self._ack_due = True
        self.state = SinkState.READING
        if offer.last and not self._last_offer_seen:
            self._last_offer_seen = True
            self.first_tokens = offer.first_tokens
            self.statistics.last_offer_at = now
        self._complete_if_all_verified(now)

    def on_read_result(self, result: ReadResult, now: float) -> None:
        """A read is terminal: its blocks are verified, or the hand-over has failed."""
        read = self._reads.pop(result.read_id)
        self.statistics.read_seconds += result.seconds
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
        self._offered.verify(read.first_index, len(read.remote))
        self._complete_if_all_verified(now)

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
            num_blocks = self.first_block + len(self._offered)
            actions.messages.append(OfferAck(self.key, num_blocks, self._last_offer_seen, self._offered.revision))
        if now >= self._grant_due_at:
            self._grant_due_at = now + self._config.renew_interval_seconds
            actions.messages.append(self._make_grant())
        while can_read and self._can_post():
            actions.reads.append(self._post_read(next_read_id + len(actions.reads), now))
        return actions

    def next_deadline(self) -> float:
        """When :meth:`poll` has something to do, if nothing happens before."""
        if self.state not in (SinkState.REQUESTED, SinkState.READING):
            return float("inf")
        deadlines = [self._grant_due_at, *(read.deadline for read in self._reads.values())]
        deadlines += [read.deadline for read in self._offered.discarded]
        if not self._last_offer_seen:
            deadlines.append(self._last_heard_at + self._config.dead_after_seconds)
        return min(deadlines)

    @property
    def num_verified_blocks(self) -> int:
        """Verified prompt blocks without a gap from ``first_block`` on."""
        return self._offered.num_verified

    def is_verified(self, index: int) -> bool:
        """Whether the block was read and verified; ``index`` counts from ``first_block``."""
        return self._offered.is_verified(index)

    @property
    def last_offer_seen(self) -> bool:
        return self._last_offer_seen

    @property
    def reads_in_flight(self) -> dict[int, ReadInFlight]:
        """Unfinished reads by their ids: they may still write to their local blocks."""
        return self._reads

    # ---- inside ----

    def _make_grant(self) -> Grant | PrefixGrant:
        if self._pull.hashes:
            return PrefixGrant(self.key, self.first_block, list(self._pull.hashes), self._config.lease_seconds)
        tokens = self._pull.num_prompt_tokens, self._pull.num_cached_tokens
        return Grant(self.key, *tokens, self._config.lease_seconds, self._pull.reads_host_tier)

    def _problem_with(self, offer: Offer, start: int, num_peer_blocks: int) -> str | None:
        if start < 0:
            return f"it starts at block {offer.first_block}, before the granted one, {self.first_block}"
        end_block = offer.first_block + len(offer.blocks)
        if end_block > self.first_block + len(self._pull.local_blocks):
            return f"it names {end_block} blocks of a prompt of {self._pull.num_prompt_tokens} tokens"
        end_tokens = end_block * self._pull.block_size
        if offer.last and not self._pull.hashes:
            if offer.num_tokens != self._pull.num_prompt_tokens:
                return f"the last one covers {offer.num_tokens} of {self._pull.num_prompt_tokens} prompt tokens"
            if not offer.first_tokens:
                return "the last one lacks the first token"
            end_tokens = min(end_tokens, self._pull.num_prompt_tokens)
        if end_tokens != offer.num_tokens or offer.num_tokens > self._pull.num_prompt_tokens:
            return f"its blocks hold {end_tokens} tokens, but it says {offer.num_tokens}"
        if any(not 0 <= block.block_id < num_peer_blocks for block in offer.blocks):
            return f"it names a block outside the {num_peer_blocks} that prefill registered"
        return self._offered.problem_with(start, offer.blocks, offer.revision)

    def _discard(self, read: ReadInFlight, generations: Sequence[int], now: float) -> None:
        """Some blocks were taken while they were read. If the peer has moved them, its current offer says where to."""
        pairs = zip(read.remote, generations, strict=False)
        positions = [position for position, (block, found) in enumerate(pairs) if block.generation != found]
        discarded = DiscardedRead(read.first_index, read.remote, positions, now + self._config.dead_after_seconds)
        if self._may_move and positions:
            self._offered.discard(discarded)
            self._grant_due_at = now
        else:
            self._fail_discarded(discarded)

    def _fail_discarded(self, read: DiscardedRead) -> None:
        self.may_be_elsewhere = self._last_offer_seen
        self.fail(f"{len(read.positions)} of {len(read.remote)} blocks changed while they were read")

    def _digests_agree(self, read: ReadInFlight, digests: Sequence[bytes]) -> bool:
        """Whether the bytes that landed are those that were offered; fails the hand-over if not."""
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
        elif (late := next((read for read in self._offered.discarded if now >= read.deadline), None)) is not None:
            self._fail_discarded(late)
        elif now >= self._last_heard_at + self._config.dead_after_seconds and not self._last_offer_seen:
            self.fail(f"prefill was silent for {now - self._last_heard_at:.1f} s")
        else:
            return False
        return True

    def _can_post(self) -> bool:
        return self._offered.can_post and len(self._reads) < self._config.max_reads_in_flight_per_request

    def _post_read(self, read_id: int, now: float) -> ReadCommand:
        first, remote = self._offered.next_range(self._config.max_blocks_per_read)
        local = list(self._pull.local_blocks[first : first + len(remote)])
        num_bytes = len(remote) * self._pull.block_bytes
        deadline = now + self._config.read_deadline_seconds + num_bytes / self._config.min_read_bytes_per_second
        self._reads[read_id] = ReadInFlight(first, remote, local, deadline)
        self.statistics.num_reads += 1
        self.statistics.num_blocks = self._offered.num_posted
        self.statistics.num_repeated = self._offered.num_repeated
        if self.statistics.first_read_at is None:
            self.statistics.first_read_at = now
        return ReadCommand(read_id, self.peer, local, [block.block_id for block in remote])

    def _complete_if_all_verified(self, now: float) -> None:
        num_wanted = len(self._offered) if self._pull.hashes else len(self._pull.local_blocks)
        if self._last_offer_seen and self._offered.num_verified == num_wanted:
            self.state = SinkState.COMPLETE
            self.statistics.complete_at = now
