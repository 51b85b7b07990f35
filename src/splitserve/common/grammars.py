"""Grammars through llguidance, alike on the router and on workers: the bounds of all, a model's vocabulary."""

from collections.abc import Sequence
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


def load_grammar_tokenizer(model_dir: Path, end_token_ids: Sequence[int], vocab_size: int | None = None) -> LLTokenizer:
    """Return the vocabulary of tokenizer.json, padded to ``vocab_size`` tokens. Takes 10 us per token.

    Raises :class:`CheckpointError` for a tokenizer that llguidance can't use.
    """
    path = model_dir / "tokenizer.json"
    try:
        check_file(path, MAX_TOKENIZER_BYTES)
        own = LLTokenizer(str(path), eos_token=list(end_token_ids), slices=[])
        return LLTokenizer(TokenizerWrapper(_PlainTextTokenizer(own, vocab_size or 0)), eos_token=list(end_token_ids))
    except CheckpointError:
        raise
    except Exception as error:  # of a binding
        raise CheckpointError(f"{path} can't be used for structured output: {str(error)[:500]}") from error


class _PlainTextTokenizer:
    """Tokenizer of the texts that a grammar forces, as llguidance's TokenizerWrapper needs it.

    Its tokens always spell the text. Those of tokenizer.json may not: they have a special token for its name, and those
    of a text that is normalized first. A grammar, which allows neither for text, would fail at these.
    """

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token
        self.bos_token_id = None
        self.tokens = [tokenizer.decode_bytes([token_id]) for token_id in range(tokenizer.vocab_size)]
        self.tokens += map(_unused_name, range(tokenizer.vocab_size, vocab_size))
        self.special_token_ids = [
            token_id
            for token_id, name in enumerate(self.tokens)
            if name == _unused_name(token_id) or tokenizer.is_special_token(token_id)
        ]
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
