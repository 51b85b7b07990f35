"""Prompts without a grant, and when each is asked for. Pure; no torch, no clock.

Decode's room is empty from the grant until the prompt's KV arrives, so the grant is asked for late: when the prompt is
next or next but one, or would be in the next step. A decode worker that has no room says so; its prompts then keep
their turn, and those behind them, whose decode workers have room, are asked for in their place.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from splitserve.engine.sequence import Sequence
from splitserve.protocol.config import ProtocolConfig
from splitserve.protocol.request import Party, RequestKey

NUM_NEXT = 2
"""Prompts that wait with a grant, or for one that comes soon; and delayed grants of a decode worker at a time."""

_Place = tuple[int, int, "Ungranted | None"]  # number of arrival, tokens, the prompt if it has no grant


@dataclass(slots=True, eq=False)
class Ungranted:
    """A prompt that waits for the grant of its decode worker, ``peer``."""

    sequence: Sequence
    peer: Party
    arrived_at: float
    turn_at: float = float("inf")  # the time from which on it waits for nothing but its decode worker
    is_asked: bool = False  # the decode worker knows that the prompt's turn comes
    is_delayed: bool = False  # it has no room so far, or hasn't answered in time
    ask_due_at: float = float("inf")  # the next repetition
    give_up_at: float = float("inf")  # unless it answers before


class GrantQueue:
    """All prompts of a worker that have no grant. ``step_tokens``: the most tokens of a step."""

    def __init__(self, protocol: ProtocolConfig, step_tokens: int) -> None:
        self._protocol = protocol
        self._step_tokens = step_tokens
        self._prompts: dict[RequestKey, Ungranted] = {}
        self._by_peer: dict[Party, dict[RequestKey, Ungranted]] = {}  # each in the order of arrival
        self._asked: dict[RequestKey, Ungranted] = {}
        self._short_since: dict[Party, float] = {}  # decode workers that have had no room since then

    # ---- prompts come and go ----

    def add(self, sequence: Sequence, peer: Party, now: float, *, is_asked: bool) -> None:
        """Queue a prompt, the last one so far. ``is_asked``: the router has told decode to reserve room at once."""
        prompt = Ungranted(sequence, peer, now)
        self._prompts[sequence.key] = prompt
        self._by_peer.setdefault(peer, {})[sequence.key] = prompt
        if is_asked:
            self._note_asked(prompt, now)

    def pop(self, key: RequestKey) -> Ungranted | None:
        """Forget a prompt, which has got its grant or has ended; None if it isn't here."""
        prompt = self._prompts.pop(key, None)
        if prompt is not None:
            of_peer = self._by_peer[prompt.peer]
            del of_peer[key]
            if not of_peer:
                del self._by_peer[prompt.peer]
            self._asked.pop(key, None)
            if prompt.is_delayed and not any(other.is_delayed for other in of_peer.values()):
                self._short_since.pop(prompt.peer, None)
        return prompt

    def get(self, key: RequestKey) -> Ungranted | None:
        return self._prompts.get(key)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._prompts

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def prompts(self) -> Iterable[Ungranted]:
        """The prompts in the order of their arrival."""
        return self._prompts.values()

    # ---- asking ----

    def choose(self, waiting: Iterable[Sequence], num_tokens: int, now: float) -> list[Ungranted]:
        """Return the prompts that are to be asked for now, and note that they are.

        ``waiting``: the prompts that may begin, in their order. ``num_tokens``: tokens before all of them, of prompts
        that have begun, which no launched step computes.
        """
        chosen: list[Ungranted] = []
        if len(self._asked) == len(self._prompts):
            return chosen
        granted: Iterator[_Place] = (
            (-1 if each.was_admitted else each.number, each.num_remaining, None) for each in waiting
        )
        candidates = map(self._candidates, self._by_peer.values())
        places = heapq.merge(granted, *candidates, key=lambda place: place[0])
        for num_ahead, (_, tokens, prompt) in enumerate(places):
            if num_ahead >= NUM_NEXT and num_tokens >= self._step_tokens:
                break
            num_tokens += tokens
            if prompt is not None and not prompt.is_asked:
                self._note_asked(prompt, now)
                chosen.append(prompt)
        return chosen

    def on_delayed(self, key: RequestKey, sender: Party, now: float) -> None:
        """Take the decode worker's answer that it has no room so far: it keeps the prompt in its queue."""
        prompt = self._prompts.get(key)
        if prompt is not None and prompt.peer == sender and prompt.is_asked:
            self._delay(prompt, now)
            prompt.ask_due_at = now + self._protocol.renew_interval_seconds
            prompt.give_up_at = now + self._protocol.dead_after_seconds

    def take_due(self, now: float) -> list[Ungranted]:
        """Return the prompts to be asked for again, since no grant came. They hold others up no longer."""
        due = [prompt for prompt in self._asked.values() if now >= prompt.ask_due_at]
        for prompt in due:
            self._delay(prompt, now)
            prompt.ask_due_at = now + self._protocol.offer_resend_seconds
        return due

    def overdue(self, now: float) -> list[Ungranted]:
        """Return the prompts whose decode worker doesn't answer."""
        return [prompt for prompt in self._asked.values() if now >= prompt.give_up_at]

    def next_deadline(self) -> float:
        """Return the time at which :meth:`take_due` or :meth:`overdue` has something, if nothing happens before."""
        return min((min(each.ask_due_at, each.give_up_at) for each in self._asked.values()), default=float("inf"))

    def check_invariants(self) -> None:
        """Raise AssertionError unless each prompt is in the one queue of its decode worker."""
        asked = [prompt for prompt in self._prompts.values() if prompt.is_asked]
        assert set(asked) == set(self._asked.values()), "the prompts that were asked for aren't those of the queue"
        assert sum(map(len, self._by_peer.values())) == len(self._prompts), "prompts are in no queue, or in two"

    # ---- inside ----

    def _delay(self, prompt: Ungranted, now: float) -> None:
        prompt.is_delayed = True
        self._short_since.setdefault(prompt.peer, now)

    def _note_asked(self, prompt: Ungranted, now: float) -> None:
        prompt.is_asked = True
        prompt.turn_at = max(prompt.arrived_at, self._short_since.get(prompt.peer, now))
        self._asked[prompt.sequence.key] = prompt
        prompt.ask_due_at = now + self._protocol.offer_resend_seconds
        prompt.give_up_at = now + self._protocol.dead_after_seconds

    def _candidates(self, of_peer: dict[RequestKey, Ungranted]) -> Iterator[_Place]:
        """Yield the prompts of one decode worker that are to be looked at: none behind too many delayed ones, since it
        grants them in order."""
        num_delayed = 0
        for prompt in of_peer.values():
            if prompt.is_delayed:
                num_delayed += 1
                if num_delayed == NUM_NEXT:
                    return
            else:
                yield prompt.sequence.number, len(prompt.sequence.token_ids), prompt
