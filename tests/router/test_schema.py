"""Request bodies: what is accepted, and how what isn't is named."""

import json
from array import array
from typing import Any

import pydantic
import pytest

from splitserve.router.http.api_error import ApiError
from splitserve.router.http.parsing import MAX_ISSUES, parse
from splitserve.router.http.schema import ChatCompletionRequest, CompletionRequest
from splitserve.router.output.catalog import choose_format
from splitserve.router.text.chat import ChatForm


def completion(**fields):
    return parse(CompletionRequest, json.dumps({"model": "m", "prompt": "a"} | fields).encode())


def chat(*messages, **fields):
    messages = messages or ({"role": "user", "content": "a"},)
    return parse(ChatCompletionRequest, json.dumps({"model": "m", "messages": list(messages)} | fields).encode())


def refused(call, **fields):
    with pytest.raises(ApiError) as caught:
        call(**fields)
    error = caught.value
    assert error.status == 400
    assert set(error.body()["error"]) == {"message", "type", "param", "code"}
    return error


def test_all_parameters():
    request = completion(
        max_tokens=3,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        seed=-5,
        stop=["a", "b"],
        stop_token_ids=[1],
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True},
        user="u",
        return_token_ids=True,
        return_route=True,
    )
    assert request.temperature == 0.0 and request.stop_strings == ["a", "b"] and request.include_usage
    assert completion(stop="x").stop_strings == ["x"] and completion(stop=None).stop_strings == []
    assert completion(temperature=None, max_tokens=None).max_tokens is None


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_the_four_forms_of_a_prompt(prompt, prompts):
    assert [p if isinstance(p, str) else list(p) for p in completion(prompt=prompt).prompts()] == prompts


@pytest.mark.parametrize("text", ["[1,2]", " [ 1 ,\n\t2 ] ", "[2147483647]", "[0, 0]"])
def test_a_list_of_token_ids_is_packed(text):
    body = f'{{"model": "m", "prompt": {text}, "max_tokens": 3, "logprobs": null, "n": 1}}'.encode()
    request = parse(CompletionRequest, body)
    [prompt] = request.prompts()
    assert prompt == array("i", json.loads(text)) and request.max_tokens == 3


@pytest.mark.parametrize("separators", [(",", ":"), (" ,\n ", ": ")])
def test_long_lists_of_token_ids_are_packed_piece_by_piece(separators):
    token_ids = [number * 7919 % 128_000 for number in range(30_000)]
    request = parse(CompletionRequest, json.dumps({"model": "m", "prompt": token_ids}, separators=separators).encode())
    assert request.prompt == array("i", token_ids)
    for wrong in (-1, 1.5, "1", [1]):
        error = refused(completion, prompt=[*token_ids, wrong])
        assert error.param == "prompt" and str(error).startswith("prompt[30000]")


def outcome(body):
    try:
        request = parse(CompletionRequest, body)
    except ApiError as error:
        return error.status, error.body()
    return dict(request) | {"prompt": list(request.prompt)}


@pytest.mark.parametrize(
    "rest", ["", ', "max_tokens": 3, "n": 1', ', "n": 2', ', "typo": 1', ', "stop": [1]', ', "user": "\\ud8"']
)
@pytest.mark.parametrize(
    "prompt",
    [
        "[1, 2]",
        "[]",
        "[01]",
        "[1.0]",
        "[1e2]",
        "[-0]",
        "[-1]",
        "[1 2]",
        "[[1]]",
        "[2147483648]",
        f"[{10**30}]",
        "1",
        "[1",
    ],
)
def test_packed_or_not_the_answer_is_the_same(prompt, rest, monkeypatch):
    """Errors of a body have the same words, wherever in it the prompt is."""
    bodies = [f'{{"model": "m", "prompt": {prompt}{rest}}}', f'{{"prompt": {prompt}, "model": "m"{rest}}}']
    outcomes = [outcome(body.encode()) for body in bodies]
    monkeypatch.setattr("splitserve.router.http.parsing.take_token_ids", lambda _body, _field: None)
    assert outcomes == [outcome(body.encode()) for body in bodies]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"model": 5}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stream": 1}, "stream"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"nope": 1}}, "stream_options.nope"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"surprise": 1}, "surprise"),
        ({"stop": [1]}, "stop"),
        ({"stop": {}}, "stop"),
        ({"messages": []}, "messages"),
    ],
)
def test_bad_values_name_their_field(fields, param):
    assert refused(completion, **fields).param == param


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("best_of", 3, 1),
        ("suffix", "x", ""),
    ],
)
def test_unsupported_parameters_are_refused_by_name_unless_neutral(name, value, neutral):
    error = refused(completion, **{name: value})
    assert error.param == name and error.code == "unsupported_parameter" and name in error.message
    assert completion(**{name: neutral}).model == "m"
    assert completion(**{name: None}).model == "m"


def test_a_bad_value_is_named_beside_a_neutral_unsupported_one():
    assert refused(completion, n=1, max_tokens=0).param == "max_tokens"
    assert refused(completion, n=True).param == "n"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b'{"model": "m", "prompt": "\xff"}', b'{"prompt": "\\ud800", "model": "m"}', b"[" * 5000],
)
def test_bodies_that_are_no_json_object(body):
    with pytest.raises(ApiError) as caught:
        parse(CompletionRequest, body)
    assert caught.value.status == 400 and caught.value.code == "invalid_json"
    assert len(caught.value.message) < 300


def test_not_a_number_is_refused():
    with pytest.raises(ApiError) as caught:
        parse(CompletionRequest, b'{"model": "m", "prompt": "a", "temperature": NaN}')
    assert caught.value.param == "temperature"


def test_messages():
    request = chat(
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "eve"},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": [], "annotations": []},
    )
    assert ChatForm(None, frozenset()).messages(request) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "eve"},
        {"role": "assistant", "content": "c"},
    ]


CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ARGUMENTS = "messages[0].tool_calls[0].function.arguments"
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def test_messages_of_a_tools_loop():
    called = {"role": "assistant", "content": None, "tool_calls": [CALL | {"index": 0}], "reasoning_content": "hm"}
    request = chat(called, {"role": "tool", "content": "5", "tool_call_id": "x"}, tools=[TOOL])
    template_call = CALL | {"function": {"name": "f", "arguments": {}}}
    assert ChatForm(None, frozenset()).messages(request) == [
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [template_call]},
        {"role": "tool", "content": "5", "tool_call_id": "x"},
    ]
    deepseek = ChatForm(choose_format("deepseek-v3", "t", None, "m"), frozenset())
    assert deepseek.messages(request)[0] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [CALL],
    }


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL | {"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [TOOL] * 513}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"enable_thinking": "yes"}, "enable_thinking"),
        ({"chat_template_kwargs": {str(number): 1 for number in range(65)}}, "chat_template_kwargs"),
    ],
)
def test_bad_tools_name_their_place(fields, param):
    assert refused(lambda: chat({"role": "user", "content": "a"}, **fields)).param == param


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "robot", "content": "a"}, "messages[0].role"),
        ({"role": "tool", "content": "a"}, "messages[0].tool_call_id"),
        ({"role": "tool", "tool_call_id": "x"}, "messages[0].content"),
        ({"role": "user", "content": "a", "tool_call_id": "x"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "assistant"}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f"}}]}, ARGUMENTS),
        ({"role": "assistant", "tool_calls": [CALL | {"type": "robot"}]}, "messages[0].tool_calls[0].type"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
        ({"role": "assistant", "content": "a", "tool_calls": [{"id": "x"}]}, "messages[0].tool_calls[0].function"),
        ({"role": "user", "content": "a", "mood": "good"}, "messages[0].mood"),
        ("hello", "messages"),
    ],
)
def test_bad_messages_name_their_place(message, param):
    assert refused(lambda: chat(message)).param == param


def test_chat_has_its_own_limits():
    assert refused(lambda: chat(messages=[])).param == "messages"
    assert refused(lambda: chat(max_tokens=1, max_completion_tokens=2)).param == "max_completion_tokens"
    assert chat(max_completion_tokens=2).max_completion_tokens == 2
    assert refused(completion, max_completion_tokens=2).param == "max_completion_tokens"


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (CompletionRequest, {"prompt": [-1] * 1000}),
        (CompletionRequest, {"prompt": ["a"] + [1] * 1000}),
        (CompletionRequest, {"prompt": [[-1] * 1000] * 1000}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * 1000}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": [-1] * 1000}),
        (ChatCompletionRequest, {"messages": [1] * 1000}),
        (ChatCompletionRequest, {"messages": [{}] * 1000}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [1] * 1000}]}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": "a", "tool_calls": [1] * 1000}]}),
    ],
)
def test_a_long_list_of_nonsense_gives_few_issues(model, fields):
    """Each of millions would cost time and memory, and nobody else is served meanwhile."""
    with pytest.raises(pydantic.ValidationError) as caught:
        model.model_validate_json(json.dumps({"model": "m"} | fields))
    assert caught.value.error_count() <= MAX_ISSUES


def test_what_a_name_must_match_is_said():
    error = refused(chat, tools=[TOOL | {"function": {"name": "a b"}}])
    assert error.message.endswith(r'(1 to 256 characters) that matches ^[A-Za-z0-9_.:/\-]+$, got "a b"'), error.message


def test_many_unknown_parameters_are_counted():
    error = refused(completion, **{f"nonsense_{i}": i for i in range(MAX_ISSUES + 1)})
    assert error.message.startswith(f"{MAX_ISSUES + 1} things are wrong with the body")


@pytest.mark.parametrize(
    ("model", "fields", "name", "allowed", "refused"),
    [
        (CompletionRequest, {"prompt": "a"}, "top_logprobs", "0", ("false", "true", "0.0", "1")),
        (
            ChatCompletionRequest,
            {"messages": [{"role": "user", "content": "a"}]},
            "echo",
            "false",
            ("0", "0.0", "1", "true"),
        ),
    ],
)
def test_a_neutral_value_has_its_type(model: Any, fields: Any, name: str, allowed: str, refused: Any) -> None:
    """A number isn't taken for false, nor false for 0, though to Python 0 is False and 0.0."""

    def parsed(value: str) -> Any:
        body = json.dumps({"model": "m", **fields})
        return parse(model, f'{body[:-1]}, "{name}": {value}}}'.encode())

    for value in (allowed, "null"):
        assert getattr(parsed(value), name) == json.loads(value)
    for value in refused:
        with pytest.raises(ApiError, match=f"^{name} must be {allowed}, got {value}$"):
            parsed(value)
