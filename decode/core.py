"""The core of a decode worker, and of a mixed one: pulls KV or computes it, then decodes.

A hand-over that fails is reported to the router, which owns the failure ladder.
"""

import msgspec

from splitserve.counters import WorkerLoad
from splitserve.decode.peers import PeerTable
from splitserve.decode.scheduler import DecodeScheduler
from splitserve.decode.sink import SinkSide
from splitserve.handover import ReadResult
from splitserve.kvconnector.connector import PeerConnected
from splitserve.messages import (
    DecodeRequest,
    FailureCode,
    HandoverReport,
    Introduce,
    LocalRequest,
    Offer,
    PeerLink,
    PeerRefused,
    PeerWelcome,
    TokenDelta,
    Withdrawn,
)
from splitserve.prefill.core import PrefillCore
from splitserve.prefill.engine_state import EngineState
from splitserve.prefill.sequence import Sequence
from splitserve.prefill.source import SourceSide
from splitserve.request import Party


class DecodeCore(PrefillCore):
    """Joins both sides: a request may come with KV from a peer, or be computed here from its first token on."""

    def __init__(
        self,
        state: EngineState,
        scheduler: DecodeScheduler,
        source: SourceSide,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        connector: str,
    ) -> None:
        super().__init__(state, scheduler, source, max_num_batched_tokens=max_num_batched_tokens)
        self._decode_scheduler = scheduler
        self._max_num_seqs = max_num_seqs
        self.peers = PeerTable(state, connector)
        self.sink = SinkSide(state, self.peers, self._on_handover_ready, self._on_handover_failed, self._on_prefix_read)
        self._handlers |= {
            DecodeRequest: self._on_decode_request,
            LocalRequest: self._on_local_request,
            Introduce: self._on_introduce,
            PeerWelcome: self.peers.on_welcome,
            PeerRefused: self.peers.on_refused,
            Offer: self.sink.on_offer,
            Withdrawn: self._on_withdrawn,
        }

    # ---- messages ----

    def _on_decode_request(self, request: DecodeRequest, sender: Party, now: float) -> None:
        sequence = self._accept(request, sender, now)
        if sequence is not None:
            self.sink.on_request(request, sequence, now)
            self._admit(now)

    def _on_local_request(self, request: LocalRequest, sender: Party, now: float) -> None:
        sequence = self._accept(request, sender, now)
        if sequence is None:
            return
        is_alone = self.state.layout.tensor_parallel_size == 1  # slots of a host tier are read whole
        if request.prefix is not None and request.prefix.party != self.state.me and is_alone:
            self.sink.on_prefix_request(request.prefix, sequence, now)
            self._admit(now)
            return
        self.state.sequences[sequence.key] = sequence
        self._decode_scheduler.add(sequence)

    def _on_withdrawn(self, withdrawn: Withdrawn, sender: Party, now: float) -> None:
        sequence = self.state.sequences.get(withdrawn.key)
        if withdrawn.attempt_over and sequence is not None and self.sink.pulls(sequence, sender):
            self._end(sequence, withdrawn.reason, now)
        else:
            self.sink.on_withdrawn(withdrawn, sender, now)

    def _on_introduce(self, introduce: Introduce, sender: Party, now: float) -> None:
        del sender
        self.peers.introduce(introduce.peer, now)

    # ---- hand-overs ----

    def _on_handover_ready(self, sequence: Sequence, first_token: int, report: HandoverReport) -> None:
        """KV is here and verified. The first token came with it: decode starts with a decode step. Of what a peer's
        host tier had, the last block is missing, unless it's full: it is computed here."""
        self.state.counters.prefix_hit_tokens += sequence.num_cached_tokens
        delta = TokenDelta(
            key=sequence.key,
            position=sequence.num_output_tokens,
            token_ids=[first_token],
            num_cached_tokens=sequence.num_cached_tokens,
            handover=report,
        )
        sequence.token_ids.append(first_token)
        self.state.add_delta(sequence, delta)
        if sequence.num_remaining == 1:
            self._decode_scheduler.add_running(sequence)
        else:
            self._decode_scheduler.add_admitted(sequence)

    def _on_prefix_read(self, sequence: Sequence) -> None:
        """What a peer had of it is here, and it goes on; or it holds nothing, and is the next one to begin."""
        if sequence.block_ids:
            self._decode_scheduler.add_admitted(sequence)
        else:
            self._decode_scheduler.add(sequence, first=True)

    def _on_handover_failed(self, sequence: Sequence, reason: str, now: float) -> None:
        """The router decides what comes next; what was verified stays in the prefix index."""
        self.state.fail(sequence, FailureCode.HANDOVER, reason)
        self._end(sequence, reason, now, attempt_over=False)

    # ---- steps ----

    def _before_plan(self, now: float) -> None:
        self._admit(now)

    def _admit(self, now: float) -> None:
        waiting = self._decode_scheduler.prefill.waiting
        if waiting and waiting[0].was_admitted and not waiting[0].block_ids:
            return  # it ran before and lost its blocks: newcomers would keep it from ever getting them back
        running = len(self._decode_scheduler.running)
        self.sink.admit(running, self._max_num_seqs - running - self.sink.num_granted, now)

    def _continue(self, sequence: Sequence, token_id: int, now: float) -> None:
        """A sequence that was handed out goes to its decode worker; any other goes on here."""
        if not sequence.decodes_here:
            super()._continue(sequence, token_id, now)
            return
        sequence.token_ids.append(token_id)
        if sequence not in self._decode_scheduler.running:
            self._decode_scheduler.prefill.remove(sequence)
            self._decode_scheduler.add_running(sequence)

    def _end(self, sequence: Sequence, reason: str, now: float, *, attempt_over: bool = True) -> None:
        if self.sink.owns(sequence):
            self.sink.abort(sequence)
        super()._end(sequence, reason, now, attempt_over=attempt_over)

    # ---- the connector, time ----

    def handle_connector_event(self, event: ReadResult | PeerConnected, now: float) -> None:
        if isinstance(event, PeerConnected):
            self.peers.on_connected(event)
            self.has_news = True
            self.sink.poll(now)
        else:
            self.sink.on_read_result(event, now)
        self.state.flush_deltas()

    def _on_loaded(self, sequence: Sequence, now: float) -> None:
        if self.sink.owns(sequence):
            self.sink.on_loaded(sequence, now)

    def _on_late_load(self, sequence: Sequence) -> None:
        if self.sink.owns(sequence):
            self.sink.on_late_load(sequence)
        else:
            super()._on_late_load(sequence)

    def tick(self, now: float) -> None:
        super().tick(now)
        self.sink.poll(now)
        self._admit(now)
        self.state.blocks.tiers.start_clocks(now)
        self.state.flush_deltas()

    def next_deadline(self) -> float:
        return min(super().next_deadline(), self.sink.next_deadline())

    def load(self) -> WorkerLoad:
        return msgspec.structs.replace(
            super().load(),
            reads_in_flight=self.sink.num_reads_in_flight,
            peers_ready=self.peers.num_ready,
            preemptions=self._decode_scheduler.num_preemptions,
        )

    def links(self) -> list[PeerLink]:
        return self.peers.links()

    def check_invariants(self) -> None:
        super().check_invariants()
        self.sink.check_invariants()
        self.peers.check_invariants()

    def _queues(self) -> tuple[list[Sequence], list[Sequence]]:
        prefill = self._decode_scheduler.prefill
        return [*self.sink.waiting, *prefill.waiting, *prefill.active], list(self._decode_scheduler.running)
