"""Decode's side of hand-overs: reserves, grants, reads what is offered, and keeps what was verified."""

from collections import deque
from collections.abc import Callable

from splitserve.decode.incoming import Incoming
from splitserve.decode.peers import PeerState, PeerTable
from splitserve.decode.reads import ReadsInFlight
from splitserve.engine.effects import Incident
from splitserve.engine.sequence import Sequence
from splitserve.engine.stage import Stage
from splitserve.engine.state import EngineState
from splitserve.protocol.handover.pull import Pull, PullSpan
from splitserve.protocol.handover.reads import ReadResult
from splitserve.protocol.handover.sink import SinkHandover, SinkState, SinkStatistics
from splitserve.protocol.messages.handover import MAX_HASHES, GrantDelayed, Offer, Release, Withdrawn
from splitserve.protocol.messages.marks import MarkKind
from splitserve.protocol.messages.requests import HandoverReport, PeerRef
from splitserve.protocol.request import Party, RequestKey
from splitserve.protocol.step import Draw


class SinkSide:
    """The decode side of all hand-overs.

    Calls ``on_ready(sequence, first_tokens, report, now)`` when all KV is here and verified: the sequence has all but
    the last token. Calls ``on_failed(sequence, reason, now)`` when a hand-over failed, ``on_prefix(sequence, now)``
    when a prefix was read or couldn't be. After a failure it holds no blocks, and no read in flight targets them.
    """

    def __init__(
        self,
        state: EngineState,
        peers: PeerTable,
        on_ready: Callable[[Sequence, Draw, HandoverReport, float], None],
        on_failed: Callable[[Sequence, str, float], None],
        on_prefix: Callable[[Sequence, float], None],
    ) -> None:
        self._state = state
        self._peers = peers
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._on_prefix = on_prefix
        self._waiting: deque[Incoming] = deque()  # for room, in the order in which it was asked for
        self._num_unasked = 0
        self._incoming: dict[RequestKey, Incoming] = {}
        self.reads = ReadsInFlight(state, peers)

    # ---- messages ----

    def add(
        self, sequence: Sequence, peer: PeerRef, now: float, *, is_prefix: bool = False, is_unasked: bool = False
    ) -> None:
        """Pull the sequence's KV from ``peer``; ``is_prefix``: as much as that has of it already; ``is_unasked``: once
        it asks for the grant."""
        sequence.enter(Stage.UNADMITTED)
        self._peers.introduce(peer, now)
        incoming = Incoming(sequence, peer.party, is_prefix, is_unasked=is_unasked)
        self._incoming[sequence.key] = incoming
        self._num_unasked += is_unasked
        if not is_unasked:
            self._waiting.append(incoming)

    def on_asked(self, key: RequestKey, sender: Party, now: float) -> None:
        """Queue a request for room, if it isn't; send a grant again that prefill hasn't received."""
        incoming = self._from_peer(key, sender)
        if incoming is None:
            return
        if incoming.is_unasked:
            incoming.is_unasked = False
            self._num_unasked -= 1
            self._waiting.append(incoming)
            if incoming.sequence.marks is not None:
                incoming.sequence.marks.add(MarkKind.ASKED, now)
        elif incoming.handover is not None:
            incoming.handover.grant_again(now)
            self._advance(incoming, now)

    def answer(self, key: RequestKey) -> None:
        """Tell prefill that a request that it has asked for has no grant, if that is so."""
        incoming = self._incoming.get(key)
        if incoming is not None and incoming.handover is None and not incoming.is_unasked:
            self._state.outbox.send(incoming.peer, GrantDelayed(key))

    def on_offer(self, offer: Offer, sender: Party, now: float) -> None:
        incoming = self._from_peer(offer.key, sender)
        if incoming is not None and incoming.handover is not None:
            peer = self._peers.get(sender)
            if peer is None or not peer.num_blocks:
                return  # its welcome is late; until then nothing can be checked, and the offer comes again
            if problem := incoming.problem_with_tokens(offer, self._state.vocab_size):
                incoming.handover.fail(problem)
            incoming.handover.on_offer(offer, peer.num_blocks, now, has_host_tier=peer.has_host_tier)
            self._advance(incoming, now)

    def on_withdrawn(self, withdrawn: Withdrawn, sender: Party, now: float) -> None:
        incoming = self._from_peer(withdrawn.key, sender)
        if incoming is not None and incoming.handover is not None:
            incoming.handover.was_declined = not incoming.handover.reads_in_flight
            incoming.handover.may_be_elsewhere = incoming.handover.last_offer_seen
            incoming.handover.fail(f"withdrawn by prefill: {withdrawn.reason}")
            self._advance(incoming, now)

    def on_read_result(self, result: ReadResult, now: float) -> None:
        """Continue the hand-over that waited for a read, if it isn't over."""
        incoming = self.reads.end(result)
        if incoming is not None:
            assert incoming.handover is not None
            incoming.handover.on_read_result(result, now)
            self._advance(incoming, now)

    def abort(self, sequence: Sequence) -> None:
        """The request is over: release what prefill holds for it, keep quarantined what a read may still write to."""
        incoming = self._incoming.pop(sequence.key)
        if incoming.handover is None:
            self._num_unasked -= incoming.is_unasked
            if incoming in self._waiting:  # else it isn't asked for, or its blocks are being onboarded from a tier
                self._waiting.remove(incoming)
        else:
            incoming.handover.close()
            self._let_go(incoming)

    def owns(self, sequence: Sequence) -> bool:
        return sequence.key in self._incoming

    def pulls(self, sequence: Sequence, peer: Party) -> bool:
        """Return whether the sequence's KV is to come from ``peer``."""
        return sequence.key in self._incoming and self._incoming[sequence.key].peer == peer

    def read_prefix(self, sequence: Sequence, peer: Party, now: float) -> None:
        """Read the prefix of a prompt that holds its room from a peer, after what tiers have of it."""
        sequence.enter(Stage.PULLING)
        incoming = self._incoming[sequence.key] = Incoming(sequence, peer, is_prefix=True)
        if sequence.load is None:
            self._grant(incoming, now)

    # ---- time ----

    def admit(self, headroom: int, slots: int, now: float) -> None:
        """Reserve room, first come, first served, and grant. At most ``slots`` requests more."""
        while self._waiting and slots > 0:
            incoming = self._waiting[0]
            sequence = incoming.sequence
            pulls = not incoming.is_prefix and incoming.first_tokens is None
            forks = self._state.blocks.fork_headroom(sequence)
            if not self._state.blocks.reserve(sequence, headroom=headroom + forks, pulls=pulls):
                return
            self._waiting.popleft()
            sequence.enter(Stage.PULLING)
            slots -= 1
            if sequence.load is None:
                self._grant(incoming, now)

    def on_loaded(self, sequence: Sequence, now: float) -> None:
        """Continue a sequence whose blocks in tiers are onboarded: prefill must hand over only the rest."""
        self._grant(self._incoming[sequence.key], now)

    def on_late_load(self, sequence: Sequence) -> None:
        """The sequence gave its blocks back: it is the next one to be admitted again."""
        sequence.enter(Stage.UNADMITTED)
        self._waiting.appendleft(self._incoming[sequence.key])

    def poll(self, now: float) -> None:
        self._peers.poll(now)
        for incoming in list(self._incoming.values()):
            if incoming.handover is not None:
                self._advance(incoming, now)
        self.reads.poll(now)

    def next_deadline(self) -> float:
        handovers = (i.handover.next_deadline() for i in self._incoming.values() if i.handover is not None)
        return min(self._peers.next_deadline(), self.reads.next_deadline(), *handovers)

    @property
    def num_reads_in_flight(self) -> int:
        return len(self.reads)

    @property
    def peers_in_use(self) -> set[Party]:
        """Return the peers that a request here reads from, or is to read from."""
        return {incoming.peer for incoming in self._incoming.values()}

    @property
    def num_granted(self) -> int:
        return len(self._incoming) - len(self._waiting) - self._num_unasked

    @property
    def is_landing(self) -> bool:
        return any(each.is_landing for each in self._incoming.values())

    @property
    def has_queue(self) -> bool:
        """Return whether requests wait for room."""
        return bool(self._waiting)

    @property
    def arriving(self) -> list[Sequence]:
        """Return the requests that decode as soon as their KV is here, for which there is room."""
        return [each.sequence for each in self._incoming.values() if each.handover is not None and not each.is_prefix]

    @property
    def waiting(self) -> list[Sequence]:
        """Return the requests whose KV isn't here yet."""
        return [incoming.sequence for incoming in self._incoming.values()]

    def check_invariants(self) -> None:
        """Raise AssertionError unless grants are all or nothing, and the reads in flight are accounted for."""
        for incoming in self._waiting:
            held = incoming.sequence.block_ids
            assert not incoming.is_unasked, f"{incoming.sequence.key} waits for room, but prefill hasn't asked for it"
            assert not held, f"{incoming.sequence.key} waits for room, but holds {len(held)} blocks"
        num_unasked = sum(incoming.is_unasked for incoming in self._incoming.values())
        assert self._num_unasked == num_unasked, f"{self._num_unasked} requests count as unasked for, not {num_unasked}"
        for key, incoming in self._incoming.items():
            stage = Stage.UNADMITTED if incoming.is_unasked or incoming in self._waiting else Stage.PULLING
            assert incoming.sequence.stage is stage, f"{key} is {incoming.sequence.stage}, not {stage}"
        self.reads.check_invariants(self._incoming.values())

    # ---- inside ----

    @property
    def _reads_host_tiers(self) -> bool:
        """Slots are read whole, and hold blocks of the only group."""
        return self._state.layout.tensor_parallel_size == 1 and not self._state.blocks.others

    def _grant(self, incoming: Incoming, now: float) -> None:
        sequence, block_size = incoming.sequence, self._state.blocks.block_size
        first_block, num_tokens = sequence.num_computed // block_size, len(sequence.token_ids)
        local_blocks, hashes = sequence.block_ids[first_block:], []
        if incoming.is_prefix:
            hashes = self._state.blocks.missing_hashes(sequence)[:MAX_HASHES]
            if not hashes:
                self._end_without_read(incoming, now)
                return
            local_blocks = local_blocks[: len(hashes)]
            num_tokens = (first_block + len(hashes)) * block_size
        block_bytes = self._state.group_block_bytes
        others = zip(sequence.other_tables, block_bytes[1:], strict=True)
        pull = Pull(
            num_prompt_tokens=num_tokens,
            num_cached_tokens=sequence.num_computed,
            block_size=block_size,
            spans=[
                PullSpan(first_block, local_blocks, block_bytes[0]),
                *(PullSpan(table.first_number, table.block_ids, num_bytes) for table, num_bytes in others),
            ],
            hashes=hashes,
            reads_host_tier=self._reads_host_tiers,
        )
        if sequence.marks is not None and not incoming.is_prefix:
            sequence.marks.add(MarkKind.GRANTED, now)
        incoming.handover = SinkHandover(sequence.key, incoming.peer, pull, self._state.protocol, now)
        self._advance(incoming, now)

    def _from_peer(self, key: RequestKey, sender: Party) -> Incoming | None:
        incoming = self._incoming.get(key)
        if incoming is None or incoming.peer != sender:
            self._state.counters.stale_messages += 1
            return None
        return incoming

    def _advance(self, incoming: Incoming, now: float) -> None:
        """Publish what was verified, do what is due, and end the hand-over if it's complete or has failed."""
        handover, sequence = incoming.handover, incoming.sequence
        assert handover is not None
        peer = self._peers.get(incoming.peer)
        if peer is None or peer.state is PeerState.FAILED:
            handover.fail(
                peer.failure if peer else "the peer is unknown: a new incarnation took its place, or there is no room"
            )
        can_read = peer is not None and peer.state is PeerState.READY
        actions = handover.poll(now, can_read=can_read, next_read_id=self.reads.next_id)
        for message in actions.messages:
            self._state.outbox.send(incoming.peer, message)
        for read in actions.reads:
            self.reads.start(read, incoming)
        self._keep_verified(sequence, handover)
        if handover.state is SinkState.COMPLETE:
            self._complete(incoming, handover, now)
        elif handover.state is SinkState.FAILED:
            self._fail(incoming, handover, now)

    def _complete_prefix(self, incoming: Incoming, handover: SinkHandover, now: float) -> None:
        sequence = incoming.sequence
        self._state.counters.peer_prefixes += 1
        self._state.counters.peer_prefix_blocks += handover.statistics.num_blocks
        self._peers.note_prefix(incoming.peer, handover.statistics.num_blocks)
        if incoming.first_tokens is None:
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
            self._on_prefix(sequence, now)
        elif self._state.blocks.missing_hashes(sequence):
            self._state.blocks.give_back(sequence)
            self._state.counters.handover_failures += 1
            self._on_failed(sequence, "the blocks changed before they were read, and are offered nowhere else", now)
        else:
            self._go_on_from_copies(incoming, incoming.first_tokens, handover.statistics, handover.first_block, now)

    def _end_without_read(self, incoming: Incoming, now: float) -> None:
        """End a read of a prefix before it begins: no full block is missing here."""
        sequence = incoming.sequence
        del self._incoming[sequence.key]
        if incoming.first_tokens is None:
            self._on_prefix(sequence, now)
        else:
            first_block = sequence.num_computed // self._state.blocks.block_size
            self._go_on_from_copies(incoming, incoming.first_tokens, SinkStatistics(complete_at=now), first_block, now)

    def _go_on_from_copies(
        self, incoming: Incoming, first_tokens: Draw, statistics: SinkStatistics, first_block: int, now: float
    ) -> None:
        """Complete a hand-over whose full blocks are all here, though the peer's device had lost blocks of it."""
        incoming.sequence.token_ids.pop()  # as after any hand-over, the last token is to be delivered first
        self._state.counters.other_copies += 1
        self._report(incoming, first_tokens, statistics, first_block, now)

    def _ask_for_other_copies(self, incoming: Incoming, first_tokens: Draw) -> None:
        """The peer's device has lost the blocks: maybe its host tier has them. What is verified is found again here."""
        sequence = incoming.sequence
        sequence.enter(Stage.UNADMITTED)
        sequence.token_ids.extend(first_tokens.token_ids)
        again = Incoming(sequence, incoming.peer, is_prefix=True, first_tokens=first_tokens)
        self._incoming[sequence.key] = again
        self._waiting.appendleft(again)

    def _keep_verified(self, sequence: Sequence, handover: SinkHandover) -> None:
        verified_blocks = handover.first_block + handover.num_verified_blocks
        sequence.num_computed = min(verified_blocks * self._state.blocks.block_size, len(sequence.token_ids))
        if self._state.blocks.others:
            self._state.blocks.publish_verified(sequence, handover.verified_ends)
        else:
            self._state.blocks.publish_computed(sequence)

    def _complete(self, incoming: Incoming, handover: SinkHandover, now: float) -> None:
        del self._incoming[handover.key]
        self._state.outbox.send(incoming.peer, Release(key=handover.key, complete=True))
        if incoming.is_prefix:
            self._complete_prefix(incoming, handover, now)
        else:
            draw = handover.first_draw
            incoming.sequence.add_computed(draw.token_ids[:-1])
            self._report(incoming, draw, handover.statistics, handover.first_block, now)

    def _report(
        self, incoming: Incoming, first_tokens: Draw, statistics: SinkStatistics, first_block: int, now: float
    ) -> None:
        """Report a hand-over whose KV has all arrived; the blocks before ``first_block`` were here already."""
        report = HandoverReport(
            prefill=incoming.peer.engine_id,
            transport=self._peers.transport(incoming.peer),
            blocks=statistics.num_blocks,
            bytes=statistics.num_bytes * self._state.layout.tensor_parallel_size,
            cached_tokens=first_block * self._state.blocks.block_size,
            reads=statistics.num_reads,
            read_seconds=statistics.read_seconds,
        )
        marks = incoming.sequence.marks
        if marks is not None:
            for kind, at in statistics.marks():
                marks.add(kind, at)
        self._state.counters.handovers += 1
        self._state.counters.reads_repeated += statistics.num_repeated
        self._state.counters.handover_bytes += report.bytes
        self._on_ready(incoming.sequence, first_tokens, report, now)

    def _fail(self, incoming: Incoming, handover: SinkHandover, now: float) -> None:
        del self._incoming[handover.key]
        if handover.read_was_overdue:
            # The peer is frozen or cut off: only forgetting it makes its reads terminal and their blocks usable again.
            self._peers.fail(incoming.peer, handover.failure)
        if handover.mismatches:
            self._report_mismatches(incoming, handover.mismatches)
        self._let_go(incoming)
        if incoming.is_prefix and incoming.first_tokens is None:
            self._state.counters.peer_prefix_misses += handover.was_declined
            self._state.counters.peer_prefix_failures += not handover.was_declined
            self._on_prefix(incoming.sequence, now)
            return
        peer = self._peers.get(incoming.peer)
        can_ask = peer is not None and peer.has_host_tier and self._reads_host_tiers and not handover.mismatches
        if handover.may_be_elsewhere and can_ask and incoming.first_tokens is None:
            self._ask_for_other_copies(incoming, handover.first_draw)
            return
        self._state.counters.handover_failures += 1
        self._on_failed(incoming.sequence, handover.failure, now)

    def _report_mismatches(self, incoming: Incoming, mismatches: list[str]) -> None:
        self._state.counters.kv_mismatches += len(mismatches)
        key, me, peer = incoming.sequence.key, self._state.me, incoming.peer
        text = f"request {key}: KV read from {peer} by {me} differs from what was offered, in blocks"
        self._state.outbox.put(Incident(f"{text} {', '.join(mismatches)} (theirs -> ours)"))

    def _let_go(self, incoming: Incoming) -> None:
        """Release what prefill holds, and give the blocks back that no read in flight may still write to."""
        handover = incoming.handover
        assert handover is not None
        mismatch = bool(handover.mismatches)
        self._state.outbox.send(incoming.peer, Release(key=handover.key, complete=False, mismatch=mismatch))
        self.reads.abandon(incoming)
        self._state.blocks.give_back(incoming.sequence)
