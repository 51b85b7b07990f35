"""Parameters of sampling features over HTTP: bounds of all that are declared, and their way to the workers."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import inspect

from splitserve.protocol.sampling_features import MAX_BAD_WORD_TOKENS, FeatureParams
from splitserve.router.http.api_error import ApiError
from splitserve.router.http.parsing import parse
from splitserve.router.http.schema import ChatCompletionRequest, CompletionRequest, GenerationRequest
from splitserve.router.text.feature_values import feature_values
from splitserve.router.text.tokenizer import ModelTokenizer

TYPES = {
    field.name: field.type
    for field in inspect.type_info(FeatureParams).fields  # type: ignore[attr-defined]
    if field.name != "constraint"  # made from response_format and tools, not a field of bodies
}
REST: dict[type[GenerationRequest], dict[str, Any]] = {
    CompletionRequest: {"prompt": "a"},
    ChatCompletionRequest: {"messages": [{"role": "user", "content": "a"}]},
}


def parsed(model: type[GenerationRequest], **fields: Any) -> GenerationRequest:
    return parse(model, json.dumps({"model": "m", **REST[model], **fields}).encode())


def bounds(kind: inspect.Type) -> Iterator[tuple[Any, bool]]:
    """Values at the bounds of a parameter and beyond them, and values of other types; True for those allowed."""
    match kind:
        case inspect.Metadata(type=inner):
            yield from bounds(inner)
        case inspect.FloatType(ge=low, gt=above, le=high, lt=below):
            yield from ((bound, True) for bound in (low, high) if bound is not None)
            yield from ((bound, False) for bound in (above, below) if bound is not None)
            yield from ((math.nextafter(bound, -math.inf), False) for bound in (low,) if bound is not None)
            yield from ((math.nextafter(bound, math.inf), False) for bound in (high,) if bound is not None)
            yield from (("1", False), (True, False), ([], False))
        case inspect.IntType(ge=low, lt=high) if low is not None and high is not None:
            yield from ((low, True), (high - 1, True), (low - 1, False), (high, False))
            yield from ((1.5, False), ("1", False), (True, False))
        case inspect.VarTupleType(item_type=inspect.IntType(), max_length=longest) if longest is not None:
            yield from (([7] * longest, True), ([7] * (longest + 1), False), ([-1], False), ([2**31], False))
            yield from ((["1"], False), ([1.5], False), (7, False))
            yield [], kind.min_length in (None, 0)
        case inspect.DictType(max_length=longest, value_type=inspect.FloatType(ge=low, le=high)) if (
            longest is not None and low is not None and high is not None
        ):
            yield from (({str(n): low for n in range(longest)}, True), ({"5": high}, True))
            yield from (({str(n): 0 for n in range(longest + 1)}, False), ({"5": low - 1}, False))
            yield from (
                ({"5": high + 1}, False),
                ({"x": 1}, False),
                ({"-1": 1}, False),
                ({"5": "1"}, False),
                ([], False),
            )
        case inspect.VarTupleType():  # bad_words
            yield from ((["a"] * 128, True), (["x" * 64], True), (["a"] * 129, False), (["x" * 65], False))
            yield from (([""], False), ([7], False), ("a", False))
        case _:
            raise AssertionError(f"no examples for {kind}: add them")


CASES = [(name, value, allowed) for name, kind in TYPES.items() for value, allowed in bounds(kind)]


@pytest.mark.parametrize("model", REST)
def test_values_within_the_bounds_are_accepted_and_others_refused_by_name(model: type[GenerationRequest]) -> None:
    for name, value, is_allowed in CASES:
        if is_allowed:
            assert getattr(parsed(model, **{name: value}), name) is not None
        else:
            with pytest.raises(ApiError) as caught:
                parsed(model, **{name: value})
            assert caught.value.status == 400
            assert (caught.value.param or "").startswith(name), (name, value, caught.value.body())


@pytest.mark.parametrize(
    ("bias", "param", "message"),
    [
        ({"x": 1}, "logit_bias", 'logit_bias: keys must be token ids, got "x"'),
        ({"-1": 1}, "logit_bias", 'logit_bias: keys must be token ids, got "-1"'),
        ({"5": "much"}, "logit_bias.5", 'logit_bias.5 must be a number from -100 to 100, got "much"'),
        ([5], "logit_bias", "logit_bias must be an object of numbers from -100 to 100 (at most 1024 fields), got [5]"),
    ],
)
def test_a_fault_in_a_map_is_described(bias: Any, param: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(CompletionRequest, logit_bias=bias)
    assert (caught.value.param, caught.value.message) == (param, message)


def test_the_most_fields_of_an_object_are_said() -> None:
    with pytest.raises(ApiError, match=r"must be an object \(at most 64 fields\), got an object with 65 fields"):
        parsed(ChatCompletionRequest, chat_template_kwargs=dict.fromkeys(map(str, range(65))))


def test_a_list_of_allowed_tokens_allows_some() -> None:
    with pytest.raises(ApiError) as caught:
        parsed(CompletionRequest, allowed_token_ids=[])
    assert caught.value.param == "allowed_token_ids" and "(1 to 65536 items), got []" in caught.value.message


def test_null_stands_for_the_neutral_value(tiny_qwen3: Path) -> None:
    request = parsed(CompletionRequest, **dict.fromkeys(TYPES))
    tokenizer = ModelTokenizer(tiny_qwen3)
    values = feature_values(request, tokenizer, max_tokens=9, vocab_size=2048)
    assert list(FeatureParams(**values).wanted_params()) == []


def test_values_reach_the_workers(tiny_qwen3: Path) -> None:
    tokenizer = ModelTokenizer(tiny_qwen3)
    request = parsed(
        CompletionRequest, logit_bias={"5": 1, "7": -2.5}, min_p=0.5, allowed_token_ids=[5, 7], min_tokens=9
    )
    values = feature_values(request, tokenizer, max_tokens=9, vocab_size=2048)
    assert values == {"logit_bias": {5: 1.0, 7: -2.5}, "min_p": 0.5, "allowed_token_ids": (5, 7), "min_tokens": 9}


def test_bad_words_are_banned_at_the_beginning_and_after_a_space(tiny_qwen3: Path) -> None:
    tokenizer = ModelTokenizer(tiny_qwen3)
    request = parsed(CompletionRequest, bad_words=["word", " word"])
    values = feature_values(request, tokenizer, max_tokens=9, vocab_size=2048)
    expected = {tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in ("word", " word")}
    assert set(values["bad_words"]) == expected and len(expected) == 2


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"min_tokens": 10}, "min_tokens", "min_tokens is 10; it must be at most max_tokens, which is 9"),
        ({"logit_bias": {"2048": 1}}, "logit_bias", "token id 2048; the vocabulary ends at 2047"),
        ({"allowed_token_ids": [1, 4000]}, "allowed_token_ids", "token id 4000; the vocabulary ends at 2047"),
        ({"bad_words": ["\U0001f600" * 32]}, "bad_words", f"at most {MAX_BAD_WORD_TOKENS} are allowed"),
    ],
)
def test_what_only_the_model_knows_is_checked_too(
    tiny_qwen3: Path, fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        feature_values(parsed(CompletionRequest, **fields), ModelTokenizer(tiny_qwen3), max_tokens=9, vocab_size=2048)
    assert (caught.value.status, caught.value.param) == (400, param)
