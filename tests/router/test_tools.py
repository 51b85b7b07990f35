"""Tools and reasoning over HTTP: the openai package, scripted workers that write given texts, workers that die."""

import json

import openai
import pytest

from model_outputs import TOOLS, qwen_call
from router_harness import ready, served_router, write_model_dir
from scripted_writer import CALL
from splitserve.protocol.request import Role


@pytest.fixture
def client(served, writer):
    with openai.OpenAI(base_url=served[0].url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


def ask(client, *messages, **fields):
    given = list(messages) or [{"role": "user", "content": "Weather?"}]
    return client.chat.completions.create(model="tiny", messages=given, **{"tools": TOOLS} | fields)


def gathered(stream):
    """The message that the deltas of a stream make up, as clients add it up, and the finish reason."""
    content, reasoning, calls, reason = "", "", [], None
    for chunk in stream:
        if not chunk.choices:
            continue
        delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            if call.index == len(calls):
                assert call.id and call.type == "function" and call.function.name
                calls.append([call.id, call.function.name, ""])
            else:
                assert call.index == len(calls) - 1 and call.id is None and call.function.name is None
            calls[call.index][2] += call.function.arguments or ""
    return content, reasoning, calls, reason


def test_a_whole_answer_has_reasoning_content_and_calls(client):
    choice = ask(client).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert choice.message.reasoning_content == "The user asks."
    first, second = choice.message.tool_calls
    assert (first.type, first.function.name, json.loads(first.function.arguments)) == ("function", "get_weather", CALL)
    assert (second.function.name, second.function.arguments) == ("get-time", "{}") and first.id != second.id


def test_a_streamed_answer_adds_up_to_the_whole_one(client):
    content, reasoning, calls, reason = gathered(ask(client, stream=True))
    assert (content, reasoning, reason) == ("I look.", "The user asks.", "tool_calls")
    assert [(name, json.loads(arguments)) for _, name, arguments in calls] == [("get_weather", CALL), ("get-time", {})]
    with client.chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": "Weather?"}], tools=TOOLS
    ) as stream:  # the package's own adding up
        for _ in stream:
            pass
        found = stream.get_final_completion().choices[0]
    assert json.loads(found.message.tool_calls[0].function.arguments) == CALL and found.finish_reason == "tool_calls"


@pytest.mark.parametrize("num_failures", [1, 2])
def test_workers_that_die_amid_a_call_lose_and_repeat_no_byte(client, writer, num_failures):
    expected = gathered(ask(client, stream=True))
    attempts = len(writer.prompts)
    writer.num_failures = num_failures
    found = gathered(ask(client, stream=True))
    assert len(writer.prompts) == attempts + 1 + num_failures, "no attempt failed"
    assert found[0:2] == expected[0:2] and found[3] == expected[3]
    assert [call[1:] for call in found[2]] == [call[1:] for call in expected[2]]


def test_a_tools_loop(client, writer):
    message = ask(client).choices[0].message
    writer.text = "<think>\nNow I know.\n</think>\n\nIt rains."
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
    answer = ask(client, {"role": "user", "content": "Weather?"}, message.model_dump(exclude_none=True), *results)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("It rains.", "stop")
    prompt = writer.prompts[-1]
    assert prompt.count("<|im_start|>tool\nrain") == 2 and '"arguments": {"city": "Köln 😀", "days": 3}' in prompt
    assert prompt.startswith("<tools>") and '"get-time"' in prompt


def test_a_call_cut_by_its_length_comes_out_as_far_as_it_goes(client, writer):
    whole = json.dumps(CALL, ensure_ascii=False)
    writer.text = qwen_call("get_weather", whole)
    seen = set()
    for max_tokens in range(1, 60, 6):
        choice = ask(client, max_tokens=max_tokens).choices[0]
        for call in choice.message.tool_calls or []:
            if choice.finish_reason == "length":
                seen.add(call.function.arguments)
                assert whole.startswith(call.function.arguments) or not call.function.arguments.startswith("{")
    assert len(seen) > 3


def test_one_call_only_if_calls_must_not_be_parallel(client):
    assert len(ask(client, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    assert len(gathered(ask(client, parallel_tool_calls=False, stream=True))[2]) == 1


def test_without_tools_calls_are_text_and_reasoning_is_still_split(client, writer):
    for fields in ({"tools": []}, {"tool_choice": "none"}):
        choice = ask(client, **fields).choices[0]
        assert choice.message.tool_calls is None and choice.finish_reason == "stop"
        assert choice.message.reasoning_content == "The user asks." and "get_weather" in choice.message.content
        assert "<tools>" not in writer.prompts[-1]


def test_thinking_is_switched_off_by_three_parameters(client, writer):
    writer.text = "It rains."
    for body in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
    ):
        message = ask(client, extra_body=body).choices[0].message
        assert message.content == "It rains." and writer.prompts[-1].endswith("</think>\n\n")
    ask(client, extra_body={"chat_template_kwargs": {"enable_thinking": True, "thinking": True}})
    assert writer.prompts[-1].endswith("assistant\n")


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice", "response_format"),
        (
            {"extra_body": {"chat_template_kwargs": {"enable_thinkng": 1}}},
            "chat_template_kwargs.enable_thinkng",
            "enable_th",
        ),
        (
            {"extra_body": {"chat_template_kwargs": {"messages": []}}},
            "chat_template_kwargs.messages",
            "enable_thinking",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client, fields, param, word):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **fields)
    assert caught.value.param == param and word in caught.value.message


def test_calls_are_forced_by_a_grammar_and_answers_have_theirs_after_the_reasoning(client, writer):
    ask(client, tool_choice="required")
    assert "get_weather" in writer.grammars[-1] and "get-time" in writer.grammars[-1]
    ask(client, tool_choice={"type": "function", "function": {"name": "get-time"}})
    assert "get_weather" not in writer.grammars[-1] and "get-time" in writer.grammars[-1]
    ask(client, tools=openai.NOT_GIVEN, response_format={"type": "json_object"})
    assert "@answer" in writer.grammars[-1]
    ask(client, extra_body={"response_format": {"type": "json_object"}, "enable_thinking": False})
    assert writer.grammars[-1] and "@answer" not in writer.grammars[-1]


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_tools_that_the_choice_does_not_allow_are_left_out(client, writer):
    ask(client, tool_choice=allowed("required", "get-time"))
    assert "get_weather" not in writer.grammars[-1] and "get-time" in writer.grammars[-1]
    of_one, of_all = (
        ask(client, **fields).usage.prompt_tokens
        for fields in ({"tool_choice": allowed("auto", "get-time")}, {"tool_choice": "auto"})
    )
    assert of_one == ask(client, tools=TOOLS[1:]).usage.prompt_tokens < of_all
    with pytest.raises(openai.BadRequestError, match="'huge', which is no tool of the request") as caught:
        ask(client, tool_choice=allowed("auto", "get-time", "huge"))
    assert caught.value.param == "tool_choice.allowed_tools.tools[1].function.name"
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get-time"}]}
    response = client.responses.create(model="tiny", input="Weather?", tools=tools, tool_choice=choice)
    assert "get_weather" not in writer.grammars[-1] and "get-time" in writer.grammars[-1]
    assert response.tool_choice.model_dump() == choice and len(response.tools) == len(TOOLS)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            {"not": {"type": "object"}},
            "keywords can't be enforced: not; leave them out, or send the function without strict",
        ),
        ({"properties": {"n": {"type": "integer", "maximum": 1 << 63}}}, "maximum has 9223372036854775808"),
        ({"properties": {"n": {"type": "integer", "minimum": 2, "maximum": 1}}, "required": ["n"]}, "Unsatisfiable"),
    ],
)
def test_a_function_whose_schema_cannot_be_enforced_is_named(client, schema, words):
    strict = {"name": "set_alarm", "strict": True, "parameters": {"type": "object", **schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, tools=[*TOOLS, {"type": "function", "function": strict}], tool_choice="required")
    message = caught.value.message
    assert caught.value.param == "tools" and "tools can't be used: function set_alarm: " in message
    assert words in message and "call_" not in message and "x-guidance" not in message


def test_a_model_without_a_known_form_refuses_tools(tmp_path):
    write_model_dir(tmp_path / "tiny")
    with served_router(tmp_path / "tiny") as (router, workers):
        workers.start("m0", Role.MIXED)
        ready(router)
        fields = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "max_tokens": 2}
        status, _, body = router.post("/v1/chat/completions", **fields)
        assert status == 400 and body["error"]["param"] == "tools" and "chat template" in body["error"]["message"]
        assert router.post("/v1/chat/completions", **fields | {"tools": []})[0] == 200
