"""Decode's part of a worker: requests that decode here, with KV from a peer, a prefix of it, or none; and prefixes that
are read from peers for prompts that are to be handed out."""

import itertools
from collections.abc import Mapping

import msgspec

from splitserve.common.bounded import ExpiringMap
from splitserve.decode.peers import PeerState, PeerTable
from splitserve.decode.sink import SinkSide
from splitserve.engine.parts import Handler, Part
from splitserve.engine.requests import Requests
from splitserve.engine.scheduling import MAX_LOADS_AHEAD
from splitserve.engine.sequence import Sequence
from splitserve.kvconnector.layout.shape import num_blocks_for
from splitserve.kvconnector.transfer.connector import PeerConnected
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.handover.reads import ReadResult
from splitserve.protocol.messages.handover import (
    GrantRequest,
    Offer,
    PeerRefused,
    PeerWelcome,
    Release,
    Withdrawn,
)
from splitserve.protocol.messages.marks import MarkKind
from splitserve.protocol.messages.membership import PeerLink
from splitserve.protocol.messages.requests import (
    DecodeRequest,
    FailureCode,
    HandoverReport,
    Introduce,
    LocalRequest,
    PeerGone,
    PeerRef,
    TokenDelta,
)
from splitserve.protocol.request import Party, RequestKey
from splitserve.protocol.step import Draw


class SinkPart(Part):
    """Pulls KV, then lets its sequences decode. A hand-over that fails is reported to the router, which owns the
    failure ladder."""

    def __init__(self, requests: Requests, connector: str) -> None:
        self._requests = requests
        self._state = requests.state
        self._scheduler = requests.scheduler
        self.peers = PeerTable(self._state, connector, lambda: self.sink.peers_in_use)
        self._parked_asks: ExpiringMap[RequestKey, Party] = ExpiringMap(
            max_size=self._state.protocol.max_parked, ttl_seconds=self._state.protocol.lease_seconds
        )
        self.sink = SinkSide(self._state, self.peers, self._on_ready, self._on_failed, self._on_prefix_read)

    # ---- messages and events ----

    def handlers(self) -> Mapping[type, Handler]:
        return {
            DecodeRequest: self.on_decode_request,
            LocalRequest: self.on_local_request,
            Introduce: self.on_introduce,
            PeerGone: self.on_peer_gone,
            PeerWelcome: self.peers.on_welcome,
            PeerRefused: self.peers.on_refused,
            GrantRequest: self.on_grant_request,
            Offer: self.sink.on_offer,
            Withdrawn: self.on_withdrawn,
        }

    def on_decode_request(self, request: DecodeRequest, sender: Party, now: float) -> None:
        """Pull the KV of a prompt that another worker computes, once there is room and that worker asks for it."""
        sequence = self._requests.accept(request, sender, now, decodes_here=True)
        asker = self._parked_asks.pop(request.key, now)
        if sequence is not None:
            is_asked = not request.late_grant or asker == request.prefill.party
            self.sink.add(sequence, request.prefill, now, is_unasked=not is_asked)
            self.admit(now)
            self.sink.answer(request.key)

    def on_grant_request(self, request: GrantRequest, sender: Party, now: float) -> None:
        """Grant a prompt whose turn comes soon, or answer that there is no room. A request that has ended here is
        released: prefill needn't compute its prompt."""
        key = request.key
        if key in self._state.tombstones:
            self._state.outbox.send(sender, Release(key=key, complete=False))
        elif key not in self._state.sequences:
            self._parked_asks.put(key, sender, now)
        elif self.sink.pulls(self._state.sequences[key], sender):
            self.sink.on_asked(key, sender, now)
            self.admit(now)
            self.sink.answer(key)

    def on_local_request(self, request: LocalRequest, sender: Party, now: float) -> None:
        """Compute a prompt here, from the prefix on that a peer may have of it."""
        sequence = self._requests.accept(request, sender, now, decodes_here=True)
        if sequence is None:
            return
        if request.prefix is not None and self._can_read_prefix(request.prefix):
            self.sink.add(sequence, request.prefix, now, is_prefix=True)
            self.admit(now)
        else:
            self._scheduler.add(sequence)

    def on_withdrawn(self, withdrawn: Withdrawn, sender: Party, now: float) -> None:
        """End the request, or only the hand-over: siblings that wait for the prompt's KV may go on elsewhere."""
        sequence = self._state.sequences.get(withdrawn.key)
        is_over = withdrawn.attempt_over and sequence is not None and not sequence.siblings
        if is_over and sequence is not None and self.sink.pulls(sequence, sender):
            self._requests.end(sequence, withdrawn.reason, now)
        else:
            self.sink.on_withdrawn(withdrawn, sender, now)

    def on_introduce(self, introduce: Introduce, sender: Party, now: float) -> None:
        """Connect to a peer before the first request that needs it."""
        del sender
        self.peers.introduce(introduce.peer, now)

    def on_peer_gone(self, gone: PeerGone, sender: Party, now: float) -> None:
        """Drop the connection to a peer, once no request here reads from it."""
        del sender, now
        self.peers.on_gone(gone.peer)

    def on_connector_event(self, event: ReadResult | PeerConnected, now: float) -> None:
        if isinstance(event, PeerConnected):
            self.peers.on_connected(event)
            self._state.has_news = True
            self.sink.poll(now)
        else:
            self.sink.on_read_result(event, now)

    # ---- hand-overs ----

    def _on_ready(self, sequence: Sequence, first_tokens: Draw, report: HandoverReport, now: float) -> None:
        """Let a sequence decode, and its siblings begin: its KV is verified, and its first token came with it, or the
        first two, of which it has one already.

        A peer's host tier has full blocks only: what follows them is computed here.
        """
        self._state.counters.prefix_hit_tokens += sequence.num_cached_tokens
        delta = TokenDelta(
            key=sequence.key,
            position=sequence.num_output_tokens - len(first_tokens.token_ids) + 1,
            token_ids=list(first_tokens.token_ids),
            finish_reason=sequence.finish_reason(first_tokens.token_id) if sequence.siblings else None,
            num_cached_tokens=sequence.num_cached_tokens,
            handover=report,
            logprobs=first_tokens.logprobs,
            marks=[] if sequence.marks is None else sequence.marks.take(),
        )
        if not sequence.was_aborted:
            self._state.add_delta(sequence, delta)
        if sequence.siblings:
            sequence.handover = report
            self._requests.fork(sequence, first_tokens, now)
        if sequence.was_aborted or delta.finish_reason is not None:
            self._requests.end(sequence, "its first token was its last one", now)
            return
        sequence.token_ids.append(first_tokens.token_ids[-1])
        if sequence.num_remaining == 1:
            self._scheduler.start_decoding(sequence, handed_over=True)
        else:
            self._scheduler.add_admitted(sequence)

    def _on_prefix_read(self, sequence: Sequence, now: float) -> None:
        """Go on with the prefix that a peer had; a sequence that holds nothing is the next one to begin."""
        if sequence.marks is not None:
            sequence.marks.add(MarkKind.PREFIX, now)
        if sequence.block_ids:
            self._scheduler.add_admitted(sequence)
        else:
            self._scheduler.add(sequence, first=True)

    def _on_failed(self, sequence: Sequence, reason: str, now: float) -> None:
        """End the attempt. The router decides what comes next; verified blocks stay in the prefix index."""
        self._requests.fail(sequence, FailureCode.HANDOVER, reason, now)

    # ---- prefixes ----

    def _can_read_prefix(self, peer: PeerRef) -> bool:
        """Return whether prefixes can be read from a peer: slots of a host tier are read whole, and a prefix of several
        groups can't be read."""
        is_simple = self._state.layout.tensor_parallel_size == 1 and not self._state.blocks.others
        return is_simple and peer.party != self._state.me

    def _read_prefixes(self, now: float) -> None:
        """Let the first prompts of the queue read their prefixes from peers. They hold their room meanwhile, as long as
        there's room for all before them, too."""
        prompts, blocks = self._scheduler.prompts, self._state.blocks
        first = list(itertools.islice(prompts.waiting, MAX_LOADS_AHEAD))
        if all(sequence.prefix is None for sequence in first):
            return
        ahead = self._scheduler.num_running
        slots = self._scheduler.budget.max_num_seqs - ahead - self.sink.num_granted - len(prompts.active)
        for sequence in first:
            if sequence.block_ids:
                continue
            peer = self._prefix_peer(sequence, now) if slots > 0 else None
            if peer is None or not blocks.reserve(sequence, headroom=ahead):
                ahead += num_blocks_for(len(sequence.token_ids), blocks.block_size)
                continue
            prompts.remove(sequence)
            sequence.prefix = None
            self.sink.read_prefix(sequence, peer, now)
            slots -= 1

    def _prefix_peer(self, sequence: Sequence, now: float) -> Party | None:
        """Return the peer that the prefix of a queued prompt is to be read from, if it can be read at once. A prompt
        doesn't wait for a connection: that is made for those after it."""
        ref = sequence.prefix
        if ref is None:
            return None
        peer = self.peers.get(ref.party)
        if peer is not None and peer.state is PeerState.READY:
            return ref.party
        if not self._can_read_prefix(ref) or (peer is not None and peer.state is PeerState.FAILED):
            sequence.prefix = None
        if self._can_read_prefix(ref):
            self.peers.introduce(ref, now)
        return None

    # ---- sequences that it owns ----

    def owns(self, sequence: Sequence) -> bool:
        return self.sink.owns(sequence)

    def on_loaded(self, sequence: Sequence, now: float) -> None:
        self.sink.on_loaded(sequence, now)

    def on_late_load(self, sequence: Sequence) -> None:
        self.sink.on_late_load(sequence)

    def on_end(self, sequence: Sequence, reason: str, now: float, *, attempt_over: bool) -> None:
        del reason, now, attempt_over
        self.sink.abort(sequence)

    # ---- time ----

    def poll(self, now: float) -> None:
        self.sink.poll(now)
        self.peers.drop_gone()
        self._parked_asks.expire(now)

    def admit(self, now: float) -> None:
        """Reserve room and grant, unless a sequence of the scheduler is to get its blocks back first."""
        if not self._scheduler.owes_blocks:
            running = self._scheduler.num_running
            self.sink.admit(running, self._scheduler.budget.max_num_seqs - running - self.sink.num_granted, now)
            self._read_prefixes(now)

    def next_deadline(self) -> float:
        return self.sink.next_deadline()

    # ---- state ----

    @property
    def is_landing(self) -> bool:
        """See :class:`splitserve.engine.parts.Part`."""
        return self.sink.is_landing

    @property
    def arriving(self) -> list[Sequence]:
        """See :class:`splitserve.engine.parts.Part`."""
        return self.sink.arriving

    @property
    def waiting(self) -> list[Sequence]:
        return self.sink.waiting

    def links(self) -> list[PeerLink]:
        return self.peers.links()

    def report(self, load: WorkerLoad) -> WorkerLoad:
        return msgspec.structs.replace(
            load, reads_in_flight=self.sink.num_reads_in_flight, peers_ready=self.peers.num_ready
        )

    def check_invariants(self) -> None:
        self.sink.check_invariants()
        self.peers.check_invariants()
