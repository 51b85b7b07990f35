"""Output tokens that prefill has drawn and not yet offered. Pure; no torch, no clock."""

from itertools import takewhile

from splitserve.engine.scheduling import StepScheduler
from splitserve.engine.sequence import Sequence
from splitserve.engine.state import EngineState
from splitserve.protocol.messages.logprobs import Logprobs
from splitserve.protocol.request import RequestKey
from splitserve.protocol.step import Draw


class FirstTokens:
    """The first tokens of prompts that are computed, until their last offer; and the choice of prompts that draw a
    second one.

    Decode can't draw the second token before it has read the KV, and then waits for its step in flight. Prefill draws
    it in a step of its own, while the KV is read, unless another prompt would have to wait for that step.
    """

    def __init__(self, state: EngineState, scheduler: StepScheduler) -> None:
        self._blocks = state.blocks
        self._scheduler = scheduler
        self._first: dict[RequestKey, Draw] = {}  # until the second one is drawn
        self._complete: dict[RequestKey, Draw] = {}

    @property
    def keys(self) -> set[RequestKey]:
        return {*self._first, *self._complete}

    def goes_on(self, sequence: Sequence, draw: Draw) -> bool:
        """Let a sequence draw its second token; ``draw`` has the first one. False, and nothing changes, if another
        prompt is here, no block for the first token's KV, or no room behind the second one in this worker's context:
        that one would end the answer here, where decode's context may be longer."""
        prompts, is_wanted = self._scheduler.prompts, self._scheduler.budget.draws_second_tokens
        if not is_wanted or sequence.num_choices > 1 or prompts.waiting or prompts.active != [sequence]:
            return False
        if len(sequence.token_ids) + 2 >= sequence.max_length:
            return False
        if not self._blocks.grow(sequence):
            return False
        sequence.token_ids.append(draw.token_id)
        sequence.draws_second = True
        self._first[sequence.key] = draw
        return True

    def add(self, key: RequestKey, draw: Draw) -> None:
        """Take the last token that is drawn here for a request, with those of its other choices."""
        first = self._first.pop(key, None)
        if first is not None:
            parts = [each.logprobs for each in (first, draw) if each.logprobs is not None]
            draw = Draw((first.token_id, draw.token_id), Logprobs.joined(parts) if parts else None)
        self._complete[key] = draw

    def of(self, key: RequestKey) -> list[Draw]:
        """Return the tokens of each choice before the first one that failed; none if they aren't drawn yet."""
        draw = self._complete.get(key)
        return [] if draw is None else [draw, *takewhile(lambda other: not other.error, draw.others)]

    def drop(self, key: RequestKey) -> None:
        """Forget a request: its tokens are offered, or it has ended."""
        self._first.pop(key, None)
        self._complete.pop(key, None)
