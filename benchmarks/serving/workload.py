"""Workload of a load: arrival times and prompts of exact length with an exact shared prefix. Pure and seeded."""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Literal

from tokenizers import Tokenizer

from splitserve.common.errors import ConfigError

Arrival = Literal["poisson", "fixed"]
_WORD = re.compile(r" [A-Za-z]+")
_MIN_WORDS = 16


def arrival_seconds(num_requests: int, rate: float, arrival: Arrival, seed: int) -> list[float]:
    """Return the due time of each request, from 0 s on. ``rate`` is in requests per second; infinite means all at
    once."""
    if not rate > 0:
        raise ConfigError(f"request rate is {rate}; it must be above 0 (inf sends all at once)")
    if rate == float("inf"):
        return [0.0] * num_requests
    random = Random(f"arrivals {seed}")
    gaps = [random.expovariate(rate) if arrival == "poisson" else 1.0 / rate for _ in range(num_requests - 1)]
    return list(itertools.accumulate(gaps, initial=0.0)) if num_requests else []


def token_prompts(
    num_prompts: int, num_tokens: int, num_shared_tokens: int, token_ids: Sequence[int], seed: int
) -> list[list[int]]:
    """Make prompts of exactly ``num_tokens`` ids out of ``token_ids``; the first ``num_shared_tokens`` are the same in
    all.

    The ids that follow the shared ones differ between any two prompts as far as there are enough ids, so that the
    shared prefix is exact and not longer by chance. Raises :class:`ConfigError` for impossible lengths.
    """
    if not 0 <= num_shared_tokens <= num_tokens or num_tokens < 1:
        raise ConfigError(
            f"prompts of {num_tokens} tokens with {num_shared_tokens} shared ones: the length must be at least 1 and "
            "the shared prefix must not be longer"
        )
    random = Random(f"prompts {seed}")
    shared = random.choices(token_ids, k=num_shared_tokens)
    distinct = random.sample(list(token_ids), k=len(token_ids))
    prompts = []
    for index in range(num_prompts):
        own = random.choices(token_ids, k=num_tokens - num_shared_tokens)
        own[:1] = [distinct[index % len(distinct)]] if own else []
        prompts.append(shared + own)
    return prompts


def load_tokenizer(directory: str) -> Tokenizer:
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"no {path}; --tokenizer takes a directory with a tokenizer.json")
    return Tokenizer.from_file(str(path))


def plain_token_ids(tokenizer: Tokenizer) -> list[int]:
    """Return all ids except those of special and added tokens, in order."""
    added = tokenizer.get_added_tokens_decoder()
    return sorted(set(tokenizer.get_vocab(with_added_tokens=False).values()) - set(added))


class TextPrompts:
    """Prompts as text that a tokenizer encodes to an exact number of tokens.

    Random ids decoded to text encode to another number of tokens, and a shared prefix breaks if the random part merges
    with it. So prompts are made of whole words that are one token each in any context, and each prompt is checked: the
    server will count exactly the requested tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special_ids = self._encode("")  # added by the server to each prompt, such as a begin-of-text
        self._word_ids = self._single_token_words()
        if len(self._word_ids) < _MIN_WORDS:
            raise ConfigError(
                f"the tokenizer has {len(self._word_ids)} words of one token, too few to make prompts of exact "
                "length; use --prompt-format tokens"
            )

    def make(self, num_prompts: int, num_tokens: int, num_shared_tokens: int, seed: int) -> list[str]:
        """Make prompts that encode, special tokens included, to ``num_tokens`` ids of which the first ones are
        shared."""
        num_special = len(self._special_ids)
        num_shared_words = max(0, num_shared_tokens - num_special)
        words = token_prompts(num_prompts, num_tokens - num_special, num_shared_words, self._word_ids, seed)
        texts = ["".join(self._word_text(word) for word in prompt) for prompt in words]
        for text, prompt in zip(texts, words, strict=True):
            if [token for token in self._encode(text) if token not in self._special_ids] != prompt:
                raise ConfigError("this tokenizer merges across words; use --prompt-format tokens")
        return texts

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=True).ids

    def _word_text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def _single_token_words(self) -> list[int]:
        words = [token for token in plain_token_ids(self._tokenizer) if _WORD.fullmatch(self._word_text(token))]
        return [word for word in words if self._encode(self._word_text(word)) == [*self._special_ids, word]]
