"""The Responses API and the Messages API over HTTP: the openai and anthropic packages unchanged, scripted workers."""

import json

import openai
import pydantic
import pytest

from model_outputs import qwen_call
from router_harness import served_router
from scripted_writer import CALL, write_thinking_model

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
NAMES = ("get_weather", "get-time")
RESPONSE_TOOLS = [{"type": "function", "name": name, "parameters": PARAMETERS, "strict": False} for name in NAMES]
MESSAGE_TOOLS = [{"name": name, "description": "d", "input_schema": PARAMETERS} for name in NAMES]
QUESTION = [{"role": "user", "content": "Weather?"}]


@pytest.fixture
def responses(served, writer):
    with openai.OpenAI(base_url=served[0].url + "/v1", api_key="none", max_retries=0) as client:
        yield client.responses


@pytest.fixture
def messages(served, writer):
    import anthropic  # thousands of modules: only the process that runs these tests loads them

    with anthropic.Anthropic(base_url=served[0].url, api_key="none", max_retries=0) as client:
        yield client.messages


# ---- the Responses API ----


def items_of(response):
    """The items of a response without their ids and states."""
    found = []
    for item in response.output:
        match item.type:
            case "reasoning":
                found.append(("reasoning", item.content[0].text))
            case "message":
                found.append(("message", item.content[0].text))
            case "function_call":
                found.append(("call", item.name, item.arguments))
    return found


def test_a_response_has_items_of_each_kind(responses):
    response = responses.create(model="tiny", input="Weather?", tools=RESPONSE_TOOLS, store=False)
    (_, reasoning), (_, text), (_, name, arguments), last = items_of(response)
    assert reasoning.strip() == "The user asks." and text.strip() == "I look."
    assert (name, json.loads(arguments)) == ("get_weather", CALL) and last == ("call", "get-time", "{}")
    assert response.status == "completed" and response.store is False and response.error is None
    assert len({item.id for item in response.output}) == 4 and response.id.startswith("resp_")
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens and usage.output_tokens > 20


@pytest.mark.parametrize("num_failures", [0, 2])
def test_the_events_of_a_response_add_up_to_it_whatever_workers_do(responses, writer, num_failures):
    whole = responses.create(model="tiny", input="Weather?", tools=RESPONSE_TOOLS)
    writer.num_failures = num_failures
    events = list(responses.create(model="tiny", input="Weather?", tools=RESPONSE_TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    final = events[-1].response
    assert items_of(final) == items_of(whole) and final.usage == whole.usage
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in added] == [item.id for item in done] == [item.id for item in final.output]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in final.output]
    for kind, expected in (("output_text", "message"), ("reasoning_text", "reasoning")):
        deltas = "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
        assert deltas == dict(each for each in items_of(whole) if len(each) == 2)[expected]
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert arguments == "".join(each[2] for each in items_of(whole) if each[0] == "call")


def test_the_clients_own_stream_gathers_the_same_response(responses):
    whole = responses.create(model="tiny", input="Weather?", tools=RESPONSE_TOOLS)
    with responses.stream(model="tiny", input="Weather?", tools=RESPONSE_TOOLS) as stream:
        assert items_of(stream.get_final_response()) == items_of(whole)


@pytest.mark.parametrize("options", [{}, {"exclude_none": True}, {"by_alias": True}])
def test_a_tools_loop_sends_its_items_back(responses, writer, options):
    first = responses.create(model="tiny", input=QUESTION, tools=RESPONSE_TOOLS, instructions="Be brief.")
    calls = [item for item in first.output if item.type == "function_call"]
    outputs = [
        {"type": "function_call_output", "call_id": call.call_id, "output": f"{i}°"} for i, call in enumerate(calls)
    ]
    writer.text = "Rain."
    history = [*QUESTION, *(item.model_dump(**options) for item in first.output), *outputs]
    second = responses.create(model="tiny", input=history, tools=RESPONSE_TOOLS, instructions="Be brief.")
    assert second.output_text.strip() == "Rain."
    prompt = writer.prompts[-1]
    assert prompt.index("Be brief.") < prompt.index("Weather?") < prompt.index("I look.") < prompt.index("0°")
    assert prompt.index("0°") < prompt.index("1°") and prompt.count("<tool_call>") == 2


def test_a_cut_response_is_incomplete(responses):
    response = responses.create(model="tiny", input="Weather?", max_output_tokens=30)
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.output[-1].status == "incomplete" and response.usage.output_tokens == 30
    *_, last = responses.create(model="tiny", input="Weather?", max_output_tokens=30, stream=True)
    assert last.type == "response.incomplete" and items_of(last.response) == items_of(response)


def test_an_empty_answer_is_a_response_too(responses, writer):
    writer.text = ""
    assert responses.create(model="tiny", input="Weather?").output_text == ""
    events = [event.type for event in responses.create(model="tiny", input="Weather?", stream=True)]
    assert events[0] == "response.created" and events[-1] == "response.completed"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"extra_body": {"conversation": "c"}}, "conversation"),
        ({"extra_body": {"prompt": {"id": "p"}}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "id": "r", "summary": []}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
    ],
)
def test_what_needs_a_store_or_makes_no_sense_is_refused_by_name(responses, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        responses.create(**{"model": "tiny", "input": "a"} | fields)
    assert caught.value.param == param and param.split("[")[0] in caught.value.message


def test_hints_about_the_response_are_accepted(responses):
    answer = responses.create(
        model="tiny", input="Weather?", metadata={"a": "b"}, user="u", include=["reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"}, text={"verbosity": "low"}, prompt_cache_key="k",
        truncation="disabled", parallel_tool_calls=True,
    )  # fmt: skip
    assert answer.metadata == {"a": "b"}


# ---- the Messages API ----


def blocks_of(message):
    return [block.model_dump(exclude={"id", "signature"}, exclude_none=True) for block in message.content]


def test_a_message_has_blocks_of_each_kind(messages):
    message = messages.create(model="tiny", max_tokens=500, messages=QUESTION, tools=MESSAGE_TOOLS)
    thinking, text, first, second = message.content
    assert thinking.thinking.strip() == "The user asks." and text.text.strip() == "I look."
    assert (first.name, first.input, second.name, second.input) == ("get_weather", CALL, "get-time", {})
    assert message.stop_reason == "tool_use" and message.role == "assistant" and message.id.startswith("msg_")
    assert message.usage.input_tokens > 0 and message.usage.output_tokens > 20


@pytest.mark.parametrize("num_failures", [0, 2])
def test_the_events_of_a_message_add_up_to_it_whatever_workers_do(messages, writer, num_failures):
    fields = {"model": "tiny", "max_tokens": 500, "messages": QUESTION, "tools": MESSAGE_TOOLS}
    whole = messages.create(**fields)
    writer.num_failures = num_failures
    with messages.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert blocks_of(final) == blocks_of(whole) and final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4


@pytest.mark.parametrize("is_dumped", [False, True])
def test_a_tools_loop_sends_its_blocks_back(messages, writer, is_dumped):
    first = messages.create(model="tiny", max_tokens=500, system="Be brief.", messages=QUESTION, tools=MESSAGE_TOOLS)
    calls = [block for block in first.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": f"{number}°"}]}
        for number, call in enumerate(calls)
    ]
    content = [block.model_dump() for block in first.content] if is_dumped else first.content
    history = [*QUESTION, {"role": "assistant", "content": content}, {"role": "user", "content": results}]
    writer.text = "Rain."
    second = messages.create(model="tiny", max_tokens=9, system="Be brief.", messages=history, tools=MESSAGE_TOOLS)
    assert second.content[0].text.strip() == "Rain." and second.stop_reason == "end_turn"
    prompt = writer.prompts[-1]
    assert prompt.index("Be brief.") < prompt.index("Weather?") < prompt.index("I look.") < prompt.index("0°")
    assert prompt.count("<tool_call>") == 2


def test_the_client_parses_an_answer_that_has_its_form(messages, writer):
    class Place(pydantic.BaseModel):
        city: str
        days: int

    writer.text = json.dumps(CALL)
    effort = {"effort": "low"}
    answer = messages.parse(model="tiny", max_tokens=99, messages=QUESTION, output_format=Place, output_config=effort)
    assert answer.parsed_output == Place(**CALL) and '"required":["city","days"]' in writer.grammars[-1]


def test_reasons_for_the_end(messages, writer):
    writer.text = "One two three four"
    cut = messages.create(model="tiny", max_tokens=3, messages=QUESTION)
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 3
    stopped = messages.create(model="tiny", max_tokens=99, messages=QUESTION, stop_sequences=["nothing", "three"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "three")
    assert stopped.content[0].text.strip() == "One two"
    with messages.stream(model="tiny", max_tokens=99, messages=QUESTION, stop_sequences=["three"]) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "three")
    assert messages.create(model="tiny", max_tokens=99, messages=QUESTION).stop_reason == "end_turn"


def test_counted_tokens_are_those_of_the_message(messages):
    fields = {
        "model": "tiny",
        "messages": QUESTION,
        "tools": MESSAGE_TOOLS,
        "system": [{"type": "text", "text": "Brief."}],
    }
    count = messages.count_tokens(**fields).input_tokens
    usage = messages.create(max_tokens=1, **fields).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1, got 0"),
        ({"messages": []}, "messages must be"),
        ({"messages": [{"role": "system", "content": "a"}]}, 'messages[0].role must be one of "user", "assistant"'),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type must be one of",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ],
)
def test_errors_of_messages_have_anthropics_shape(messages, fields, words):
    import anthropic

    with pytest.raises(anthropic.BadRequestError) as caught:
        messages.create(**{"model": "tiny", "max_tokens": 5, "messages": QUESTION} | fields)
    body = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert words in body["error"]["message"]


def test_an_unknown_model_is_not_found(messages):
    import anthropic

    with pytest.raises(anthropic.NotFoundError):
        messages.create(model="other", max_tokens=5, messages=QUESTION)


def test_a_call_that_is_no_json_keeps_its_text(messages, writer):
    writer.text = qwen_call("get_weather", "{oops")
    message = messages.create(model="tiny", max_tokens=200, messages=QUESTION, tools=MESSAGE_TOOLS)
    assert "oops" in json.dumps([block.model_dump() for block in message.content])


def test_a_call_nested_too_deeply_keeps_its_text(messages, writer):
    arguments = '{"a": ' + "[" * 1500
    writer.text = qwen_call("get_weather", arguments)
    [block] = messages.create(model="tiny", max_tokens=2000, messages=QUESTION, tools=MESSAGE_TOOLS).content
    assert block.input["arguments"].startswith(arguments)


def test_anthropics_clients_send_the_key_in_a_header_of_their_own(tmp_path):
    write_thinking_model(tmp_path / "tiny")
    with served_router(tmp_path / "tiny", api_key="sk-1") as (router, _):
        for given, status in (({"X-Api-Key": "sk-1"}, 200), ({"X-Api-Key": "sk-2"}, 401), ({}, 401)):
            assert router.request("GET", "/v1/models", None, **given)[0] == status
        both = {"X-Api-Key": "sk-1", "Authorization": "Bearer sk-2"}
        assert router.request("GET", "/v1/models", None, **both)[0] == 401
