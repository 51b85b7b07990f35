"""Turns of prompts in a simulated worker: when their grants are asked for, and that none is held up without need.

The prompts that are held up are found here from messages and times alone: not from what the worker thinks of them.
"""

from typing import TYPE_CHECKING

from splitserve.engine.effects import Send
from splitserve.engine.sequence import Sequence
from splitserve.engine.stage import Stage
from splitserve.protocol.messages.envelope import Envelope
from splitserve.protocol.messages.handover import Grant, GrantDelayed, GrantRequest
from splitserve.protocol.messages.requests import DecodeRequest, FailureCode, PrefillRequest, RequestFailed
from splitserve.protocol.request import Party, RequestKey

if TYPE_CHECKING:
    from splitserve.simulation.worker.driver import SimWorker

NUM_NEXT = 2  # a prompt that is next, and one that is next but one


class Turns:
    """The observer of one worker, which reports its messages."""

    def __init__(self, worker: "SimWorker") -> None:
        self._worker = worker
        self._decode: dict[RequestKey, Party] = {}  # of each prompt
        self._asked_at: dict[RequestKey, float] = {}  # prompts that prefill, or the router in its place, asked for
        self._without_room: set[RequestKey] = set()  # decode has said so, or prefill has asked again
        self.num_given_up = 0  # hand-overs that this worker gave up as prefill
        self._may_grant: set[RequestKey] = set()  # requests that were asked for here

    # ---- messages ----

    def on_message(self, envelope: Envelope) -> None:
        """Take note of a message to the worker, before the worker does."""
        body = envelope.body
        match body:
            case PrefillRequest():
                self._decode[body.key] = body.decode.party
                if not body.late_grant:
                    self._asked_at.setdefault(body.key, self._worker.clock)
            case DecodeRequest() if not body.late_grant:
                self._may_grant.add(body.key)
            case GrantRequest():
                self._may_grant.add(body.key)
            case GrantDelayed() if envelope.sender == self._decode.get(body.key) and body.key in self._asked_at:
                self._without_room.add(body.key)

    def on_sent(self, effect: Send) -> None:
        """Check a message of the worker."""
        if isinstance(effect.body, RequestFailed) and effect.body.key in self._decode:
            self.num_given_up += effect.body.code is FailureCode.HANDOVER
        key = effect.body.key if isinstance(effect.body, GrantRequest | Grant) else None
        if isinstance(effect.body, Grant):
            assert key in self._may_grant, f"{self._worker.party} grants {key}, which was not asked for"
        elif key is not None and key in self._asked_at:
            self._without_room.add(key)
        elif key is not None:
            self._check_turn(self._worker.core.state.sequences[key])
            self._asked_at[key] = self._worker.clock

    # ---- invariants ----

    def check(self) -> None:
        """Check that an idle worker has asked for every prompt that could begin. A frozen one begins none."""
        core = self._worker.core
        if core.state.is_frozen:
            return
        prompts = core.scheduler.prompts
        if core._steps or prompts.active or prompts.waiting or self._worker.drain_clock.has_begun:
            return
        ungranted = self._in_stages(Stage.UNGRANTED)
        awaited = [each for each in ungranted if each.key in self._asked_at and not self._is_held_up(each)]
        for sequence in ungranted:
            is_asked = sequence.key in self._asked_at
            may_wait = is_asked or self._is_full(sequence) or len(awaited) >= NUM_NEXT
            assert may_wait, f"{sequence.key} waits behind prompts whose decode workers have no room"

    def _check_turn(self, sequence: Sequence) -> None:
        waiting = self._in_stages(Stage.UNGRANTED, Stage.QUEUED)
        ahead = [
            each
            for each in waiting
            if each.number < sequence.number and not self._is_held_up(each) and not self._is_full(each)
        ]
        begun = self._in_stages(Stage.PREFILLING)
        num_tokens = sum(each.num_unplanned for each in (*begun, *ahead))
        budget = self._worker.core.scheduler.budget.max_num_batched_tokens
        assert len(ahead) < NUM_NEXT or num_tokens < budget, (
            f"{sequence.key} is asked for too early: {len(ahead)} prompts come first"
        )

    def _in_stages(self, *stages: Stage) -> list[Sequence]:
        sequences = self._worker.core.state.sequences.values()
        return [each for each in sequences if each.stage in stages]

    def _is_held_up(self, sequence: Sequence) -> bool:
        """Return whether a prompt has no grant although its decode worker has answered, or had time to answer."""
        return sequence.stage is Stage.UNGRANTED and sequence.key in self._without_room

    def _is_full(self, sequence: Sequence) -> bool:
        """Return whether a prompt's decode worker has no room for several others, which it will grant first."""
        decode = self._decode.get(sequence.key)
        others = [
            each
            for each in self._in_stages(Stage.UNGRANTED)
            if each.number < sequence.number and self._decode[each.key] == decode and self._is_held_up(each)
        ]
        return sequence.stage is Stage.UNGRANTED and len(others) >= NUM_NEXT
