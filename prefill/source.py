"""Prefill's side of hand-overs: pairs requests with grants, offers what is computed, holds it until decode has
read it.

Prompts without a grant wait in a :class:`splitserve.prefill.grant_queue.GrantQueue`, and hold nothing."""

from collections.abc import Iterable, Mapping

from splitserve.common.bounded import ExpiringMap
from splitserve.engine.effects import Incident, Serve
from splitserve.engine.parts import Handler, Part
from splitserve.engine.requests import NO_PART, Requests
from splitserve.engine.sequence import Sequence
from splitserve.engine.stage import Stage
from splitserve.engine.state import DRAINING_REASON, Tombstone
from splitserve.kvconnector.blocks.digest import LeadingDigests, no_digests
from splitserve.kvconnector.layout.shape import num_blocks_for
from splitserve.kvconnector.transfer.connector import ServedMemory
from splitserve.prefill.first_tokens import FirstTokens
from splitserve.prefill.grant_queue import GrantQueue, Ungranted
from splitserve.prefill.host_offers import HostOffers
from splitserve.prefill.prefix_source import PrefixSource
from splitserve.protocol.handover.reads import Readers
from splitserve.protocol.handover.source import SourceHandover, SourceState
from splitserve.protocol.messages.handover import (
    Grant,
    GrantDelayed,
    GrantRequest,
    OfferAck,
    OfferedBlock,
    PeerHello,
    PeerRefused,
    PeerWelcome,
    PrefixGrant,
    Release,
    Withdrawn,
)
from splitserve.protocol.messages.marks import MarkKind
from splitserve.protocol.messages.requests import FailureCode, PrefillRequest
from splitserve.protocol.request import Party, RequestKey
from splitserve.protocol.step import Draw

_PROBE_SECONDS = 1.0  # a peer that greets us has measured the link by then, unless something is in its way


class SourcePart(Part):
    """Prefill's side of hand-overs: a prompt is computed once both its request and decode's grant are here."""

    def __init__(self, requests: Requests, served: ServedMemory, leading_digests: LeadingDigests) -> None:
        self._requests = requests
        self._state = state = requests.state
        self._scheduler = requests.scheduler
        self._served = served
        self._leading_digests = leading_digests
        self._undigested: set[RequestKey] = set()  # hand-overs with computed blocks that wait for their digests
        self._first_tokens = FirstTokens(state, self._scheduler)
        self._ungranted = GrantQueue(state.protocol, self._scheduler.budget.max_num_batched_tokens)
        self._handovers: dict[RequestKey, SourceHandover] = {}
        self._parked_grants: ExpiringMap[RequestKey, tuple[Grant, Party]] = ExpiringMap(
            max_size=state.protocol.max_parked, ttl_seconds=state.protocol.lease_seconds
        )
        why_not = ""
        if state.blocks.others:
            why_not = f"prefixes of a cache of {len(state.blocks.pools)} groups are computed, not read from others"
        elif leading_digests is not no_digests:
            why_not = "with --verify-kv prefixes are computed, not read from others"
        self.prefixes = PrefixSource(state, why_not)
        # A copy may be of another computation of the same tokens, and its bytes differ from those of the digest.
        self._host_offers = HostOffers(state, is_on=leading_digests is no_digests)
        self._readers = Readers.NONE
        self._probed_until = self._connected_until = 0.0  # of the last peer that greeted us

    # ---- messages ----

    def handlers(self) -> Mapping[type, Handler]:
        return {
            PrefillRequest: self.on_request,
            PeerHello: self.on_hello,
            Grant: self.on_grant,
            GrantDelayed: self.on_grant_delayed,
            PrefixGrant: self.on_prefix_grant,
            OfferAck: self.on_ack,
            Release: self.on_release,
        }

    def on_hello(self, hello: PeerHello, sender: Party, now: float) -> None:
        """Answer a decode worker that asks to read from here: welcome it if its cache layout fits ours."""
        difference = self._state.layout.mismatch(hello.layout)
        if difference:
            reason = f"{self._state.me.engine_id} and {sender.engine_id} differ in {difference}"
            self._state.outbox.send(sender, PeerRefused(reason=reason))
            return
        self._connected_until = now + self._state.protocol.dead_after_seconds
        self._probed_until = min(now + _PROBE_SECONDS, self._connected_until)
        self._serve(Readers.READING)  # the peer's connector may need our progress to connect, and reads to measure it
        self._state.outbox.send(
            sender,
            PeerWelcome(
                layout=self._state.layout,
                connector=self._served.connector,
                generations_addresses=list(self._served.generations_addresses),
                ranks=list(self._served.ranks),
            ),
        )

    def on_request(self, request: PrefillRequest, sender: Party, now: float) -> None:
        """Accept a prompt, which is computed once its decode worker grants it."""
        sequence = self._requests.accept(request, sender, now, decodes_here=False)
        if sequence is None:
            return
        key = sequence.key
        sequence.prefix = request.prefix
        sequence.enter(Stage.UNGRANTED)
        self._ungranted.add(sequence, request.decode.party, now, is_asked=not request.late_grant)
        if (parked := self._parked_grants.pop(key, now)) is not None:
            self.on_grant(*parked, now)

    def on_grant(self, grant: Grant, sender: Party, now: float) -> None:
        """A new grant starts its request; a repeated one renews the lease."""
        key = grant.key
        tombstone = self._state.tombstones.get(key, now)
        handover = self._handovers.get(key)
        if handover is not None and handover.peer == sender:
            handover.renew(now)
            if handover.was_withdrawn:  # the message that says so hasn't reached decode yet
                over = handover.attempt_over
                self._state.outbox.send(sender, Withdrawn(key=key, reason=handover.release_reason, attempt_over=over))
        elif tombstone is not None:
            self._state.outbox.send(sender, Withdrawn(key, tombstone.reason, tombstone.attempt_over))
        elif handover is not None:
            self._state.outbox.send(sender, Withdrawn(key=key, reason="granted by another worker"))
        elif (ungranted := self._ungranted.get(key)) is not None:
            if ungranted.peer == sender:
                self._ungranted.pop(key)
                self._start(ungranted.sequence, grant, sender, now)
            else:
                self._state.counters.stale_messages += 1
        elif self._state.is_draining:  # its request, if it still comes, will be refused
            self._state.outbox.send(sender, Withdrawn(key=key, reason=DRAINING_REASON))
        else:
            self._parked_grants.put(key, (grant, sender), now)

    def on_grant_delayed(self, delayed: GrantDelayed, sender: Party, now: float) -> None:
        """Let prompts behind this one come first, as long as its decode worker has no room."""
        self._ungranted.on_delayed(delayed.key, sender, now)

    def on_prefix_grant(self, grant: PrefixGrant, sender: Party, now: float) -> None:
        """Offer a peer the blocks of a prefix that are here."""
        self.prefixes.on_grant(grant, sender, now)
        if self.prefixes.num_live:
            self._serve(Readers.READING)

    def on_ack(self, ack: OfferAck, sender: Party, now: float) -> None:
        del now
        if self.prefixes.on_ack(ack, sender):
            return
        handover = self._handovers.get(ack.key)
        if handover is not None and handover.peer == sender:
            handover.acknowledge(ack)
        else:
            self._state.counters.stale_messages += 1

    def on_release(self, release: Release, sender: Party, now: float) -> None:
        if self.prefixes.on_release(release, sender):
            return
        handover = self._handovers.get(release.key)
        if handover is not None and handover.peer == sender:
            handover.release("complete" if release.complete else "given up by decode")
            if release.mismatch:  # other blocks may be damaged, too, or computed from damaged ones
                self._state.forget_prefixes()
                text = f"{sender} read other bytes than were offered for {release.key}: the prefix cache is dropped"
                self._state.outbox.put(Incident(text))
            self._finish(handover, now)
        elif (ungranted := self._ungranted.get(release.key)) is not None and ungranted.peer == sender:
            self._ungranted.pop(release.key)  # its grant was lost, or it has ended at decode
            self._requests.forget(ungranted.sequence, "given up by decode", now)
        else:
            self._parked_grants.pop(release.key, now)
            is_known = release.key in self._state.sequences or release.key in self._state.tombstones
            if not is_known:  # its request hasn't arrived yet
                self._state.tombstones.put(release.key, Tombstone("given up by decode", False), now)

    # ---- the engine's progress ----

    def on_computed(self, sequence: Sequence, now: float) -> None:
        """A step has completed: offer the prompt's full blocks, unless the last offer comes right after."""
        handover = self._handovers.get(sequence.key)
        if handover is not None and handover.state in (SourceState.GRANTED, SourceState.OFFERING):
            self._offer(sequence, handover, now)

    def goes_on(self, sequence: Sequence, draw: Draw, now: float) -> bool:
        """Let a prompt draw its second token here, if no other one waits, and offer the rest of its full blocks."""
        if self._ungranted or not self._first_tokens.goes_on(sequence, draw):
            return False
        self._offer(sequence, self._handovers[sequence.key], now)
        return True

    def on_token(self, sequence: Sequence, draw: Draw, now: float) -> None:
        """Offer the rest, with the tokens drawn here, and keep the blocks until decode releases them."""
        sequence.enter(Stage.OFFERED)
        self._first_tokens.add(sequence.key, draw)
        self._offer(sequence, self._handovers[sequence.key], now)

    def on_end(self, sequence: Sequence, reason: str, now: float, *, attempt_over: bool) -> None:
        """Withdraw the hand-over. What was offered stays until decode releases it or its lease runs out."""
        self._ungranted.pop(sequence.key)
        self._stop_offering(sequence.key)
        handover = self._handovers.get(sequence.key)
        if handover is None:
            return
        withdrawn = Withdrawn(key=sequence.key, reason=reason, attempt_over=attempt_over)
        self._state.outbox.send(handover.peer, withdrawn)
        handover.withdraw(reason, attempt_over=attempt_over)
        if handover.has_offered:
            self._state.tombstones.put(sequence.key, Tombstone(reason, attempt_over), now)
        else:
            del self._handovers[sequence.key]

    def admit(self, now: float) -> None:
        """Ask for the grants of the prompts whose turn comes soon."""
        if self._ungranted:
            prompts = self._scheduler.prompts
            num_begun = sum(sequence.num_unplanned for sequence in prompts.active)
            self._ask(self._ungranted.choose(prompts.waiting, num_begun, now))

    def after_plan(self, now: float) -> None:
        """Ask for the grants of the prompts that may be in the step after the one just planned."""
        self.admit(now)

    def before_plan(self, now: float) -> None:
        """Make room if the next prompt lacks blocks: offer other prompts' blocks from the host tier, not the device."""
        if self._host_offers.is_on and self._handovers:
            shortage = self._scheduler.shortage()
            for handover in self._host_offers.make_room(self._handovers.values(), shortage, now):
                self._poll(handover, now)

    def drain(self) -> None:
        """Accept no new requests: withdraw the grants whose requests haven't arrived; granted requests continue."""
        for grant, sender in self._parked_grants.take_all():
            self._state.outbox.send(sender, Withdrawn(key=grant.key, reason=DRAINING_REASON))

    # ---- time ----

    def poll(self, now: float) -> None:
        """Send the offers that are due, end hand-overs whose leases weren't renewed; rest when no reads are left."""
        for key in list(self._undigested):
            self._offer(self._state.sequences[key], self._handovers[key], now)
        for handover in list(self._handovers.values()):
            self._poll(handover, now)
        for silent in self._ungranted.overdue(now):
            self._state.counters.handover_failures += 1
            reason = f"{silent.peer.engine_id} was asked for room, and doesn't answer"
            self._requests.fail(silent.sequence, FailureCode.HANDOVER, reason, now)
        self._ask(self._ungranted.take_due(now))
        self.prefixes.poll(now)
        self._host_offers.poll(now)
        self._parked_grants.expire(now)
        if not self._handovers and not self.prefixes.num_live and now >= self._probed_until:
            self._serve(Readers.CONNECTING if now < self._connected_until else Readers.NONE)

    def next_deadline(self) -> float:
        deadlines = [handover.next_deadline() for handover in self._handovers.values()]
        if self._readers is not Readers.NONE and not self._handovers and not self.prefixes.num_live:
            deadlines.append(self._probed_until if self._readers is Readers.READING else self._connected_until)
        deadlines.append(self._ungranted.next_deadline())
        return min(self.prefixes.next_deadline(), self._host_offers.next_deadline(), *deadlines, float("inf"))

    def owns(self, sequence: Sequence) -> bool:
        return sequence.key in self._handovers or sequence.key in self._ungranted

    @property
    def waiting(self) -> list[Sequence]:
        """Return the prompts that have no grant."""
        return [prompt.sequence for prompt in self._ungranted.prompts]

    @property
    def num_live(self) -> int:
        """Requests, hand-overs, parked grants, prefixes that are read: zero when idle."""
        return len(self._handovers) + len(self._ungranted) + len(self._parked_grants) + self.prefixes.num_live

    @property
    def num_references(self) -> int:
        return self.prefixes.num_references

    @property
    def num_slots(self) -> int:
        return self.prefixes.num_slots

    def check_invariants(self) -> None:
        """Raise AssertionError unless the sequences of hand-overs are in the stages that go with them."""
        self._ungranted.check_invariants()
        for sequence in self.waiting:
            assert sequence.stage is Stage.UNGRANTED, f"{sequence.key} waits for its grant, but is {sequence.stage}"
        stray = self._undigested | self._first_tokens.keys
        assert stray <= self._handovers.keys(), f"{stray} are to be offered without a hand-over"
        for key, handover in self._handovers.items():
            stage = self._state.sequences[key].stage
            is_over = handover.state is SourceState.WITHDRAWN
            assert is_over == (stage is Stage.ENDED), f"{key} is {stage}, its hand-over {handover.state}"

    # ---- inside ----

    def _poll(self, handover: SourceHandover, now: float) -> None:
        offer = handover.poll(now)
        if offer is not None:
            self._state.outbox.send(handover.peer, offer)
        if handover.state is SourceState.RELEASED:
            self._finish(handover, now)

    def _ask(self, prompts: Iterable[Ungranted]) -> None:
        for prompt in prompts:
            if prompt.sequence.marks is not None and not prompt.is_delayed:
                prompt.sequence.marks.add(MarkKind.ASKED, prompt.turn_at)
            self._state.outbox.send(prompt.peer, GrantRequest(prompt.sequence.key))

    def _start(self, sequence: Sequence, grant: Grant, peer: Party, now: float) -> None:
        num_tokens, block_size = len(sequence.token_ids), self._state.blocks.block_size
        if (
            grant.num_prompt_tokens != num_tokens
            or not 0 <= grant.num_cached_tokens < num_tokens
            or grant.num_cached_tokens % block_size
            or not 0 < grant.lease_seconds <= self._state.protocol.request_deadline_seconds
        ):
            held = f"{grant.num_cached_tokens} of {grant.num_prompt_tokens} tokens for {grant.lease_seconds} s"
            reason = f"decode's grant ({held}) doesn't fit a prompt of {num_tokens} tokens"
            self._state.outbox.send(peer, Withdrawn(key=grant.key, reason=reason))
            self._state.fail(sequence, FailureCode.HANDOVER, reason)
            self._requests.forget(sequence, reason, now)
            return
        tails = self._state.blocks.tails(num_tokens)
        self._handovers[sequence.key] = SourceHandover(grant, peer, block_size, self._state.protocol, now, tails=tails)
        if sequence.marks is not None:
            sequence.marks.add(MarkKind.GRANTED, now)
        self._scheduler.add(sequence)
        self._serve(Readers.READING)

    def _finish(self, handover: SourceHandover, now: float) -> None:
        del self._handovers[handover.key]
        self._stop_offering(handover.key)
        sequence = self._state.sequences[handover.key]
        if handover.release_reason == "lease expired":
            # Prefill doesn't report it. If decode is alive and cut off from prefill alone, it reports the failure to
            # the router itself; if it died, membership informs the router.
            self._state.counters.handover_failures += 1
            self._state.outbox.send(handover.peer, Withdrawn(key=handover.key, reason="the lease expired"))
        if self._requests.owner(sequence) is NO_PART:
            self._scheduler.remove(sequence)
            self._requests.forget(sequence, handover.release_reason, now, attempt_over=handover.attempt_over)
        else:  # a prefix is being read into its blocks
            self._requests.end(sequence, handover.release_reason, now, attempt_over=handover.attempt_over)

    def _offer(self, sequence: Sequence, handover: SourceHandover, now: float) -> None:
        """Offer what is computed, as far as its digests are known; :meth:`poll` tries again with the rest."""
        block_size, key = self._state.blocks.block_size, sequence.key
        draws = self._first_tokens.of(key)
        num_full = min(sequence.num_computed, len(sequence.token_ids) - 1) // block_size
        end = num_blocks_for(sequence.num_computed, block_size) if draws else num_full
        blocks, is_whole = self._digested(sequence, handover, end)
        if draws and not is_whole:  # one group may be: its last block still goes with the last offer
            blocks, _ = self._digested(sequence, handover, num_full)
        (self._undigested.discard if is_whole else self._undigested.add)(key)
        if draws and is_whole:
            handover.offer_last(
                blocks,
                sequence.num_computed,
                [draw.token_ids[0] for draw in draws],
                now,
                first_logprobs=[draw.logprobs for draw in draws if draw.logprobs is not None],
                second_token=next(iter(draws[0].token_ids[1:]), None),
            )
            self._first_tokens.drop(key)
        elif any(blocks):
            handover.offer(blocks, (handover.num_offered_blocks() + len(blocks[0])) * block_size, now)

    def _digested(
        self, sequence: Sequence, handover: SourceHandover, end: int
    ) -> tuple[list[list[OfferedBlock]], bool]:
        """Return each group's blocks before number ``end`` that are to be offered, as far as their digests are known;
        and whether those are all. No group is offered further than the first one."""
        spans: list[list[OfferedBlock]] = []
        is_whole = True
        blocks = self._state.blocks
        for group, (table, pool) in enumerate(zip(blocks.tables(sequence), blocks.pools, strict=True)):
            start = handover.num_offered_blocks(group)
            new = table.between(start, end)
            digests = self._leading_digests(new, group)
            is_whole = is_whole and len(digests) == len(new)
            spans.append([OfferedBlock(i, pool.generation(i), digest) for i, digest in zip(new, digests, strict=False)])
            if group == 0:
                end = min(end, start + len(digests))
        return spans, is_whole

    def _stop_offering(self, key: RequestKey) -> None:
        self._undigested.discard(key)
        self._first_tokens.drop(key)

    def _serve(self, readers: Readers) -> None:
        if readers is not self._readers:
            self._readers = readers
            self._state.outbox.put(Serve(readers))
