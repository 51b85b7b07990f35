"""Grammars through llguidance, alike on the router and on workers: the bounds of all, a model's vocabulary."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

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
        tokenizer = LLTokenizer(str(path), eos_token=list(end_token_ids))
        if vocab_size is not None and vocab_size > tokenizer.vocab_size:
            tokenizer = LLTokenizer(str(path), n_vocab=vocab_size, eos_token=list(end_token_ids))
    except CheckpointError:
        raise
    except Exception as error:  # of a binding
        raise CheckpointError(f"{path} can't be used for structured output: {str(error)[:500]}") from error
    return tokenizer
