"""Bugs in late grants, planted one at a time. Not a test module."""

from collections.abc import Iterable
from typing import Any

import pytest

from splitserve.decode.sink import SinkSide
from splitserve.engine.sequence import Sequence
from splitserve.engine.stage import Stage
from splitserve.prefill.grant_queue import GrantQueue, Ungranted
from splitserve.prefill.source import SourcePart
from splitserve.protocol.request import Party, RequestKey
from splitserve.router.links.worker_record import WorkerRecord


def all_prompts_are_next(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("splitserve.prefill.grant_queue.NUM_NEXT", 1000)


def whole_steps_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Tokens of the prompts before don't count: each is in the next step."""
    original = GrantQueue.choose

    def choose(self: GrantQueue, waiting: Iterable[Sequence], num_tokens: int, now: float) -> list[Ungranted]:
        return original(self, waiting, -10_000, now)

    patch.setattr(GrantQueue, "choose", choose)


def the_router_sees_no_queue(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerRecord, "begins_soon", property(lambda self: True))


def room_is_reserved_unasked(patch: pytest.MonkeyPatch) -> None:
    original = SinkSide.add

    def add(self: SinkSide, *arguments: Any, is_unasked: bool = False, **options: Any) -> None:
        original(self, *arguments, is_unasked=False, **options)

    patch.setattr(SinkSide, "add", add)


def grants_are_asked_for_once(patch: pytest.MonkeyPatch) -> None:
    def take_due(self: GrantQueue, now: float) -> list[Ungranted]:
        for prompt in self._asked.values():
            prompt.ask_due_at = float("inf")
        return []

    patch.setattr(GrantQueue, "take_due", take_due)


def prompts_without_room_keep_their_place(patch: pytest.MonkeyPatch) -> None:
    """Prompts behind them wait too, whatever room their own decode workers have."""
    on_delayed, take_due = GrantQueue.on_delayed, GrantQueue.take_due

    def delay(self: GrantQueue, key: RequestKey, sender: Party, now: float) -> None:
        on_delayed(self, key, sender, now)
        keep(self)

    def ask_again(self: GrantQueue, now: float) -> list[Ungranted]:
        due = take_due(self, now)
        keep(self)
        return due

    def keep(self: GrantQueue) -> None:
        for prompt in self._asked.values():
            prompt.is_delayed = False

    patch.setattr(GrantQueue, "on_delayed", delay)
    patch.setattr(GrantQueue, "take_due", ask_again)


def ended_prompts_stay_in_line(patch: pytest.MonkeyPatch) -> None:
    """At prefill: they are asked for again, and granted."""
    original = GrantQueue.pop

    def pop(self: GrantQueue, key: RequestKey) -> Ungranted | None:
        prompt = self._prompts.get(key)
        return None if prompt is not None and prompt.sequence.has_ended else original(self, key)

    patch.setattr(GrantQueue, "pop", pop)


def ended_requests_stay_in_line(patch: pytest.MonkeyPatch) -> None:
    """At decode: room is reserved for them once there is some."""
    original = SinkSide.abort

    def abort(self: SinkSide, sequence: Sequence) -> None:
        incoming = self._incoming[sequence.key]
        was_waiting = incoming in self._waiting
        original(self, sequence)
        if was_waiting:
            self._waiting.append(incoming)

    patch.setattr(SinkSide, "abort", abort)


def unasked_requests_take_a_slot(patch: pytest.MonkeyPatch) -> None:
    """The count of requests that hold no slot of the batch isn't kept when one of them ends."""
    original = SinkSide.abort

    def abort(self: SinkSide, sequence: Sequence) -> None:
        num_unasked = self._num_unasked
        original(self, sequence)
        self._num_unasked = num_unasked

    patch.setattr(SinkSide, "abort", abort)


def prompts_hold_room_before_their_grant(patch: pytest.MonkeyPatch) -> None:
    """On prefill, while they wait for room on decode: the deadlock that late grants must not have."""
    ask = SourcePart._ask

    def ask_holding(self: SourcePart, prompts: Iterable[Ungranted]) -> None:
        prompts = list(prompts)
        for prompt in prompts:
            if not prompt.sequence.block_ids:
                self._state.blocks.reserve(prompt.sequence)
        ask(self, prompts)

    patch.setattr("splitserve.engine.sequence._WITHOUT_BLOCKS", frozenset({Stage.NEW, Stage.UNADMITTED}))
    patch.setattr(SourcePart, "_ask", ask_holding)
