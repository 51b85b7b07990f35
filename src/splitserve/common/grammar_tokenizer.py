"""The vocabulary of a model directory as llguidance needs it, on the router and on workers."""

from collections.abc import Sequence
from pathlib import Path

from llguidance import LLTokenizer

from splitserve.common.errors import CheckpointError
from splitserve.common.model_files import MAX_TOKENIZER_BYTES, check_file


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
