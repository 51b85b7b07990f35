"""Parameters of sampling features in token terms, from a validated body."""

from typing import Any

from splitserve.protocol.sampling_features import MAX_BAD_WORD_TOKENS, FeatureParams
from splitserve.router.http.api_error import ApiError
from splitserve.router.http.sampling_fields import sampling_values
from splitserve.router.http.schema import GenerationRequest
from splitserve.router.text.tokenizer import ModelTokenizer


def feature_values(
    request: GenerationRequest, tokenizer: ModelTokenizer, *, max_tokens: int, vocab_size: int
) -> dict[str, Any]:
    """Return the parameters that the body sets, for :class:`FeatureParams`. Raises :class:`ApiError` 400."""
    values = sampling_values(request)
    if not values:
        return values
    if values.get("min_tokens", 0) > max_tokens:
        message = f"min_tokens is {values['min_tokens']}; it must be at most max_tokens, which is {max_tokens}"
        raise ApiError(400, message, param="min_tokens", code="invalid_value")
    if request.bad_words:
        values["bad_words"] = bad_word_ids(request.bad_words, tokenizer)
    for name, token_ids in FeatureParams(**values).token_ids():
        highest = max(token_ids)
        if highest >= vocab_size:
            message = f"{name} holds token id {highest}; the vocabulary ends at {vocab_size - 1}"
            raise ApiError(400, message, param=name, code="invalid_token_id")
    return values


def bad_word_ids(words: list[str], tokenizer: ModelTokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the words' tokens, at the beginning of a text and after a space."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word.lstrip()}"):
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
            if len(token_ids) > MAX_BAD_WORD_TOKENS:
                message = (
                    f"bad_words holds a word of {len(token_ids)} tokens; at most {MAX_BAD_WORD_TOKENS} are allowed"
                )
                raise ApiError(400, message, param="bad_words", code="invalid_value")
            if token_ids:
                sequences[token_ids] = None
    return tuple(sequences)
