"""A tokenizer with a vocabulary of usual size, and texts of given length in tokens. Seeded."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from splitserve.models.demo.tokenizer import QWEN_TOKENS, train_tokenizer_on

VOCABULARY = 32_768
_NUM_WORDS = 60_000
_ONSETS = (
    "b",
    "br",
    "c",
    "ch",
    "d",
    "dr",
    "f",
    "fl",
    "g",
    "gr",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "pr",
    "qu",
    "r",
    "s",
)
_NUCLEI = ("a", "ai", "e", "ea", "i", "ie", "o", "oo", "ou", "u")
_CODAS = ("", "", "ck", "l", "ll", "m", "n", "nd", "ng", "r", "rt", "s", "st", "t", "th")
_WORDS_PER_LINE = 12
_NEW_SHARE = 0.02  # numbers among the words: they never come again
_NUMBER_TOKENS = 4  # about


class Language:
    """Words with the frequencies of a natural language (Zipf's law), and a tokenizer that was trained on them."""

    def __init__(self, seed: int = 0) -> None:
        self._words = _lexicon(Random(f"words {seed}"))
        self._cumulative = list(itertools.accumulate(1.0 / (rank + 3) for rank in range(len(self._words))))
        self.tokenizer: Tokenizer = train_tokenizer_on(self._corpus(), VOCABULARY, QWEN_TOKENS)
        batches = self.tokenizer.encode_batch([f" {word}" for word in self._words], add_special_tokens=False)
        self._lengths = dict(zip(self._words, map(len, batches), strict=True))

    def _corpus(self) -> Iterator[str]:
        """Yield lines in which each word occurs as often as in the language, the rarest ones a few times."""
        for start in range(0, len(self._words), _WORDS_PER_LINE):
            line = " ".join(self._words[start : start + _WORDS_PER_LINE])
            yield from itertools.repeat(f" {line}", max(3, 60_000 // (start + 10)))

    def text(self, random: Random, num_tokens: int) -> str:
        """Return words that are about ``num_tokens`` tokens."""
        chosen: list[str] = []
        left = num_tokens
        while left > 0:
            for word in random.choices(self._words, cum_weights=self._cumulative, k=max(16, left // 2)):
                if random.random() < _NEW_SHARE:
                    chosen.append(str(random.randrange(10**8, 10**9)))
                    left -= _NUMBER_TOKENS
                left -= self._lengths[word]
                if left < 0:
                    break
                chosen.append(word)
        return " " + " ".join(chosen)

    def write_model(self, folder: Path) -> None:
        """Write the part of a model that a router needs."""
        self.tokenizer.save(str(folder / "tokenizer.json"))
        config = {"eos_token": QWEN_TOKENS.eos, "chat_template": QWEN_TOKENS.chat_template}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _lexicon(random: Random) -> list[str]:
    words: dict[str, None] = {}
    while len(words) < _NUM_WORDS:
        num_syllables = random.choice((1, 1, 2, 2, 2, 3, 3, 4))
        syllables = (random.choice(part) for _ in range(num_syllables) for part in (_ONSETS, _NUCLEI, _CODAS))
        words["".join(syllables)] = None
    return sorted(words, key=len)
