"""Bodies of the kinds of requests that a router is measured with."""

import itertools
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from splitserve.benchmarks.router.vocabulary import VOCABULARY, Language

MODEL_ID = "instant"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_SEEN_TENTHS = 9
_NUM_CONVERSATIONS = 32


class Kind(StrEnum):
    IDS = "ids"  # a prompt of token ids, all new
    NEW = "new"  # a chat of one message, all new
    SEEN = "seen"  # a chat of ten messages, of which earlier requests had nine


@dataclass(frozen=True, slots=True)
class Body:
    path: str
    content: bytes


class Bodies:
    """Endless bodies with prompts of ``num_tokens`` tokens; seeded."""

    def __init__(self, language: Language, num_tokens: int, seed: int) -> None:
        self._language = language
        self._num_tokens = num_tokens
        self._seed = seed
        random = Random(f"conversations {seed}")
        share = num_tokens // (_SEEN_TENTHS + 1)
        self._conversations = [
            [language.text(random, share) for _ in range(_SEEN_TENTHS)] for _ in range(_NUM_CONVERSATIONS)
        ]

    @staticmethod
    def with_turn(body: Body, text: str) -> Body:
        """Return the next turn of a conversation: the body of the last one, an answer, and a new text."""
        fields = json.loads(body.content)
        fields["messages"] += [{"role": "assistant", "content": "It does."}, {"role": "user", "content": text}]
        return Body(body.path, json.dumps(fields).encode())

    def of(self, kind: Kind, output_tokens: int, *, salt: int = 0, stream: bool = True) -> Iterator[Body]:
        """Yield bodies; another ``salt`` gives others."""
        random = Random(f"{kind} {self._seed} {salt}")
        options = {"model": MODEL_ID, "max_tokens": output_tokens, "stream": stream, "ignore_eos": True}
        for number in itertools.count():
            if kind is Kind.IDS:
                ids = array("i", random.choices(range(VOCABULARY - 8), k=self._num_tokens)).tolist()
                yield Body(COMPLETIONS, json.dumps(options | {"prompt": ids}).encode())
                continue
            if kind is Kind.NEW:
                texts = [self._language.text(random, self._num_tokens)]
            else:
                earlier = self._conversations[number % _NUM_CONVERSATIONS]
                texts = [*earlier, self._language.text(random, self._num_tokens // (_SEEN_TENTHS + 1))]
            messages = [
                {"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(texts)
            ]
            yield Body(CHAT, json.dumps(options | {"messages": messages}).encode())
