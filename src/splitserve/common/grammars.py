"""Grammars through llguidance, alike on the router and on workers: the bounds of all, a model's vocabulary."""

import re
import unicodedata
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from splitserve.common.errors import CheckpointError
from splitserve.common.model_files import MAX_TOKENIZER_BYTES, check_file

GRAMMAR_LIMITS: dict[str, Any] = {
    "max_items_in_row": 1200,  # 10 ms a token in the most ambiguous grammars; 300 optional properties of an object
    "initial_lexer_fuel": 1_000_000,  # 20 ms
    "step_lexer_fuel": 100_000,  # 7 ms, once for each new state of the lexer
    "step_max_items": 50_000,  # 3 ms
    "max_lexer_states": 50_000,  # 1 to 2 KB each
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""Arguments of llguidance.LLParserLimits: what the router has compiled, a worker can compile."""

_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")


def load_grammar_tokenizer(
    model_dir: Path, end_token_ids: Sequence[int], vocab_size: int | None = None
) -> "GrammarTokenizer":
    """Return the vocabulary of tokenizer.json, padded to ``vocab_size`` tokens. Takes 10 us per token.

    Raises :class:`CheckpointError` for a tokenizer that llguidance can't use.
    """
    path = model_dir / "tokenizer.json"
    try:
        check_file(path, MAX_TOKENIZER_BYTES)
        tokenizer = LLTokenizer(str(path), eos_token=list(end_token_ids))
        num_own = tokenizer.vocab_size
        if vocab_size is not None and vocab_size > tokenizer.vocab_size:
            tokenizer = LLTokenizer(str(path), n_vocab=vocab_size, eos_token=list(end_token_ids))
    except CheckpointError:
        raise
    except Exception as error:  # of a binding
        raise CheckpointError(f"{path} can't be used for structured output: {str(error)[:500]}") from error
    return GrammarTokenizer(tokenizer, end_token_ids, num_own)


class GrammarTokenizer:
    """A vocabulary for grammars. llguidance makes tokens of the texts that a grammar forces; where these may hold the
    name of a special token, or text that the tokenizer would normalize, they must be tokens that spell the text.
    ``num_own``: tokens without those that pad the vocabulary."""

    def __init__(self, usual: LLTokenizer, end_token_ids: Sequence[int], num_own: int) -> None:
        self.usual = usual
        self._end_token_ids = list(end_token_ids)
        self._num_own = num_own

    def of(self, grammar: str) -> LLTokenizer:
        """Return the tokenizer to compile a grammar with: the usual one is quicker, since it is no Python code."""
        text = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), grammar).replace("\\", "")
        if self._has_gaps:  # llguidance would take an id between them, without a token, for text
            return self._plain
        if unicodedata.is_normalized("NFC", text) and not any(name in text for name in self._special_names):
            return self.usual
        return self._plain

    @cached_property
    def _has_gaps(self) -> bool:
        return any(self.usual.decode_bytes([each]) == _unused_name(each) for each in range(self._num_own))

    @cached_property
    def _special_ids(self) -> list[int]:
        return [token_id for token_id in range(self.usual.vocab_size) if self.usual.is_special_token(token_id)]

    @cached_property
    def _special_names(self) -> list[str]:
        names = (self.usual.decode_bytes([token_id]) for token_id in self._special_ids)
        return [name.decode(errors="replace") for name in names if name]

    @cached_property
    def _plain(self) -> LLTokenizer:
        return LLTokenizer(
            TokenizerWrapper(_PlainTextTokenizer(self.usual, self._special_ids)), eos_token=self._end_token_ids
        )


class _PlainTextTokenizer:
    """Tokenizer whose tokens always spell the text, as llguidance's TokenizerWrapper needs it."""

    def __init__(self, tokenizer: LLTokenizer, special_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token
        self.bos_token_id = None
        self.tokens = [tokenizer.decode_bytes([token_id]) for token_id in range(tokenizer.vocab_size)]
        unused = (token_id for token_id, name in enumerate(self.tokens) if name == _unused_name(token_id))
        self.special_token_ids = sorted({*special_ids, *unused})
        self._special_ids = frozenset(self.special_token_ids)

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text in UTF-8."""
        token_ids = self._tokenizer.tokenize_bytes(text)
        if self._special_ids.isdisjoint(token_ids) and self._tokenizer.decode_bytes(token_ids) == text:
            return token_ids
        return self._tokenizer.greedy_tokenize(text.decode())


def _unused_name(token_id: int) -> bytes:
    """Return what llguidance decodes an id without a token to."""
    return f"<[{token_id}]>".encode()
