"""Next turns of conversations: how often their prompts begin with the ids that decode wrote, and why not else. Pure.

The next turn's prompt is text again: it is found by the ids of the last one's prompt, which it begins with. Where its
ids then differ from the output's, the KV that decode has beyond that place is of no use. Text is looked at for the
reason alone; no KV is ever matched by it.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from enum import StrEnum

import msgspec

from splitserve.router.placement.prefix_view import PromptHashes

MAX_TURNS = 4096
MAX_KEPT_TOKENS = 1 << 20
MAX_OUTPUT_TOKENS = 1 << 13
"""Tokens of an output that are compared; what follows them is not known."""
MAX_SEARCHED_BLOCKS = 64
MAX_COMPARED_TOKENS = 64
HALF_A_CHARACTER = "\ufffd"
JOIN_TOKENS = 2
"""Last tokens of an output, which the tokenizer may join with what follows."""


class TurnReason(StrEnum):
    """The difference between an output and the next turn's prompt."""

    SAME = "same"  # the prompt has all ids of the output
    TEMPLATE = "template"  # the template has rewritten the prompt, or left out a part that special tokens begin
    JOIN = "join"  # the same text; the end of the output is tokenised together with what follows
    TOKENISATION = "tokenisation"  # the same text is tokenised in another way
    TRUNCATED = "truncated"  # the answer ends earlier
    TEXT = "text"  # the answer's text differs


class Texts(msgspec.Struct, frozen=True):
    """The tokenizer, as far as reasons need it: ``of`` returns the text of tokens, special ones included."""

    of: Callable[[Sequence[int]], str]
    special_ids: Collection[int] = ()


def _no_text(token_ids: Sequence[int]) -> str:
    return ",".join(map(str, token_ids))


class _Turn(msgspec.Struct, frozen=True, gc=False):
    """A turn that has ended: what follows the full blocks of its prompt."""

    rest: "array[int]"  # the prompt's last tokens, then the output's
    num_prompt_tokens: int  # of ``rest``
    session: str


class NextTurns:
    """Memory of ended turns, the last ones of bounded number and size. ``texts`` are set once a tokenizer is there."""

    def __init__(self) -> None:
        self.texts = Texts(_no_text)
        self._turns: OrderedDict[bytes, _Turn] = OrderedDict()  # by the hash of the prompt's last full block
        self._num_tokens = 0

    def remember(self, prompt: PromptHashes, token_ids: Sequence[int], output_ids: Sequence[int], session: str) -> None:
        """Remember a turn that has ended. One whose prompt was not hashed, or has no full block, is not followed."""
        found = prompt.longest_computed()
        if found is None or not found[0] or not output_ids:
            return
        chain, block_size = found
        rest = array("i", token_ids[len(chain) * block_size :])
        turn = _Turn(rest + array("i", output_ids[:MAX_OUTPUT_TOKENS]), len(rest), session)
        self._forget(chain[-1])
        self._turns[chain[-1]] = turn
        self._num_tokens += len(turn.rest)
        while len(self._turns) > MAX_TURNS or self._num_tokens > MAX_KEPT_TOKENS:
            self._forget(next(iter(self._turns)))

    def reason(
        self, prompt: PromptHashes, token_ids: Sequence[int], num_known_tokens: int | None, session: str
    ) -> TurnReason | None:
        """Return how a new prompt differs from the turn that it continues; None if it continues none that is known.
        ``num_known_tokens``: tokens with which an earlier prompt began."""
        found = prompt.longest_computed()
        if found is None or not num_known_tokens:
            return None
        chain, block_size = found
        end = min(len(chain), num_known_tokens // block_size)
        for number in range(end, max(0, end - MAX_SEARCHED_BLOCKS), -1):
            turn = self._turns.get(chain[number - 1])
            if turn is not None:
                return self._compare(turn, token_ids[number * block_size :], session)
        return None

    def _compare(self, turn: _Turn, actual: Sequence[int], session: str) -> TurnReason | None:
        expected = turn.rest
        most = min(len(expected), len(actual))
        place = next((index for index in range(most) if expected[index] != actual[index]), most)
        if place < turn.num_prompt_tokens:  # another conversation with the same beginning, unless the client says so
            is_same = bool(session) and session == turn.session and len(actual) > turn.num_prompt_tokens
            return TurnReason.TEMPLATE if is_same else None
        if place == len(actual):
            return TurnReason.TRUNCATED if place > turn.num_prompt_tokens and place < len(expected) else None
        if place >= len(expected) - 1:  # the last token may be the end of the turn, which has another form there
            return self._at_the_end(expected, actual, place)
        return self._within(expected, actual, place)

    def _at_the_end(self, expected: Sequence[int], actual: Sequence[int], place: int) -> TurnReason:
        special = self.texts.special_ids
        if place == len(expected) or expected[place] in special or actual[place] in special:
            return TurnReason.SAME if place == len(expected) or expected[place] in special else TurnReason.TRUNCATED
        return self._within(expected, actual, place)

    def _within(self, expected: Sequence[int], actual: Sequence[int], place: int) -> TurnReason:
        special, of = self.texts.special_ids, self.texts.of
        if expected[place] in special:
            return TurnReason.TEMPLATE
        if actual[place] in special:
            return TurnReason.TRUNCATED
        written = of(expected[place : place + MAX_COMPARED_TOKENS]).rstrip(HALF_A_CHARACTER)
        given = of(actual[place : place + 2 * MAX_COMPARED_TOKENS])
        if given.startswith(written):
            is_end = len(expected) - place <= JOIN_TOKENS
            return TurnReason.JOIN if is_end else TurnReason.TOKENISATION
        stop = next((at for at in range(place, len(actual)) if actual[at] in special), len(actual))
        is_short = written.startswith(of(actual[place:stop])) if stop - place < MAX_COMPARED_TOKENS else False
        return TurnReason.TRUNCATED if is_short else TurnReason.TEXT

    def _forget(self, key: bytes) -> None:
        turn = self._turns.pop(key, None)
        if turn is not None:
            self._num_tokens -= len(turn.rest)
