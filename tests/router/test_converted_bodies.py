"""Bodies of the Responses API and the Messages API at their bounds, odd values for chat templates, bugs of handlers."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from splitserve.router.admin.metrics import RouterMetrics
from splitserve.router.http.access.refusals import Refusals
from splitserve.router.http.access.request_id import GiveRequestIds
from splitserve.router.http.app import CountRequests, ExactPaths
from splitserve.router.http.endpoints.messages import Messages
from splitserve.router.http.endpoints.responses import Responses
from splitserve.router.text.chat_template import ChatTemplateError
from splitserve.router.text.processes.renderer import Renderer, TemplateSource
from splitserve.router.tracing.tracing import NoTracing

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COUNT = "/v1/messages/count_tokens"
BIG = 2**64
QUESTION = [{"role": "user", "content": "Weather?"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": BIG, "minimum": -BIG}}}
BAD_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
MESSAGE_TOOL = {"name": "f", "input_schema": SCHEMA}
RESPONSE_TOOL = {"type": "function", "name": "f", "parameters": SCHEMA}
TOOL_USE = {"type": "tool_use", "id": "x", "name": "f", "input": {"a": BIG}}
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "x", "content": "5"}
RESULT = {"role": "user", "content": [TOOL_RESULT]}
CALL_ITEM = {"type": "function_call", "call_id": "x", "name": "f", "arguments": json.dumps({"a": BIG})}
BASE = {
    CHAT: {"messages": QUESTION, "max_tokens": 1},
    MESSAGES: {"messages": QUESTION, "max_tokens": 1},
    COUNT: {"messages": QUESTION},
    RESPONSES: {"input": "Weather?", "max_output_tokens": 8},
}


@pytest.fixture
def post(served, writer):
    """Post fields beside the least ones of an endpoint; the answer is its status and its error, if it has one."""

    def send(path, **fields):
        status, _, answer = served[0].post(path, **BASE[path] | fields)
        return status, answer.get("error") or {} if isinstance(answer, dict) else {}

    return send


def called(arguments):
    function = {"name": "f", "arguments": arguments}
    call = {"id": "x", "type": "function", "function": function}
    return [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]


# ---- values for chat templates ----


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (f'{{"a":{BIG}}}', f'"arguments": {{"a": {BIG}}}'),
        (f'{{"a":{-BIG}}}', f'"arguments": {{"a": {-BIG}}}'),
        ('{"a":"\\ud800"}', '"arguments": "{\\"a\\":\\"\\\\ud800\\"}"'),
        ('{"\\ud800":1}', '"arguments": "{\\"\\\\ud800\\":1}"'),
        ('{"a":1e999}', '"arguments": "{\\"a\\":1e999}"'),
        ('{"a":NaN}', '"arguments": "{\\"a\\":NaN}"'),
    ],
)
def test_arguments_that_are_no_object_of_json_reach_the_template_as_text(post, writer, arguments, words):
    assert post(CHAT, messages=called(arguments)) == (200, {})
    assert words in writer.prompts[-1]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"tools": CHAT_TOOLS}),
        (MESSAGES, {"tools": [MESSAGE_TOOL]}),
        (RESPONSES, {"tools": [RESPONSE_TOOL], "metadata": {"a": BIG}}),
        (MESSAGES, {"messages": [*QUESTION, {"role": "assistant", "content": [TOOL_USE]}, RESULT]}),
        (RESPONSES, {"input": [*QUESTION, CALL_ITEM]}),
    ],
)
def test_numbers_of_any_size_reach_the_template(post, writer, path, fields):
    assert post(path, **fields) == (200, {})
    assert str(BIG) in writer.prompts[-1]


def test_numbers_of_any_size_may_be_variables_and_counted(served, post):
    assert post(CHAT, chat_template_kwargs={"enable_thinking": BIG}) == (200, {})
    assert post(COUNT, tools=[MESSAGE_TOOL]) == (200, {})
    assert served[0].post("/tokenize", messages=called(json.dumps({"a": BIG})), tools=CHAT_TOOLS)[0] == 200


def test_values_nested_too_deeply_for_a_process_are_refused():
    value = {}
    for _ in range(5000):
        value = {"a": value}
    with pytest.raises(ChatTemplateError, match="nested too deeply"):
        asyncio.run(Renderer(TemplateSource("", {}, "x")).render([value]))


# ---- bounds of chats ----

EMPTY = {"role": "user", "content": []}
MANY_RESULTS = [{"role": "user", "content": [TOOL_RESULT] * 700}] * 3
MANY_CALLS = {"role": "assistant", "content": [TOOL_USE] * 513}


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (MESSAGES, {"messages": [EMPTY]}, "messages[0].content must be text or a list"),
        (MESSAGES, {"messages": [*QUESTION, EMPTY]}, "messages[1].content must be text or a list"),
        (COUNT, {"messages": [EMPTY]}, "messages[0].content must be text or a list"),
        (MESSAGES, {"messages": QUESTION * 2048, "system": "a"}, "messages: 2049 messages of a chat"),
        (MESSAGES, {"messages": MANY_RESULTS}, "messages: 2100 messages of a chat"),
        (
            MESSAGES,
            {"messages": [*QUESTION, MANY_CALLS, RESULT]},
            "messages[1].content[512] is call 513 of one message",
        ),
        (RESPONSES, {"input": QUESTION * 2048, "instructions": "a"}, "input: 2049 messages of a chat"),
        (RESPONSES, {"input": [CALL_ITEM] * 513}, "input[512] is call 513 of one message"),
    ],
)
def test_more_than_a_chat_holds_is_refused_by_the_clients_own_names(post, path, fields, words):
    status, error = post(path, **fields)
    assert status == 400 and error["message"].startswith(words)


def test_as_much_as_a_chat_holds_is_answered(post):
    calls = [*QUESTION, {"role": "assistant", "content": [TOOL_USE | {"input": {}}] * 2}, RESULT]
    assert post(COUNT, messages=QUESTION * 2047, system="a") == (200, {})
    assert post(COUNT, messages=[*QUESTION, {"role": "assistant", "content": [TOOL_USE] * 512}]) == (200, {})
    assert post(MESSAGES, messages=calls) == (200, {})


@pytest.mark.parametrize("content", ["It", " ", [{"type": "text", "text": "It"}], [TOOL_USE]])
def test_an_answer_is_not_continued_but_its_tokens_are_counted(post, content):
    fields = {"messages": [*QUESTION, {"role": "assistant", "content": content}]}
    status, error = post(MESSAGES, **fields)
    assert status == 400 and error["message"].startswith("messages[1] is the assistant's, and continuing it")
    assert post(COUNT, **fields) == (200, {})


# ---- parameters without effect ----


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (MESSAGES, {"n": 2}, "n must be 1, got 2"),
        (COUNT, {"n": 2}, "n must be 1, got 2"),
        (RESPONSES, {"n": 2}, "n must be 1, got 2"),
        (RESPONSES, {"n": 2, "stream": True}, "n must be 1, got 2"),
        (MESSAGES, {"return_token_ids": True}, "return_token_ids must be false, got true"),
        (RESPONSES, {"return_token_ids": True}, "return_token_ids must be false, got true"),
        (MESSAGES, {"stop": "a", "stop_sequences": ["b"]}, "stop and stop_sequences are both set"),
        (RESPONSES, {"max_tokens": 9}, "max_output_tokens and max_tokens differ: give one of them"),
        (
            MESSAGES,
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats is unknown",
        ),
    ],
)
def test_a_parameter_without_effect_is_refused_by_name(post, path, fields, words):
    status, error = post(path, **fields)
    assert status == 400 and error["message"].startswith(words)
    assert error.get("param", words.split()[0]) == words.split()[0]


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_their_neutral_values_are_accepted(post, path):
    assert post(path, n=1, return_token_ids=False) == (200, {})
    assert post(RESPONSES, max_tokens=8) == (200, {})
    assert post(MESSAGES, stream=True, stream_options={"include_usage": True}) == (200, {})
    assert post(MESSAGES, speed="standard", workspace_id=None) == post(RESPONSES, image=None) == (200, {})


@pytest.mark.parametrize(
    ("path", "field", "sent_back"),
    [
        (RESPONSES, "input", [CALL_ITEM, {"role": "user", "content": "a"}]),
        (RESPONSES, "input", [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]),
        (MESSAGES, "messages", [*QUESTION, {"role": "assistant", "content": [TOOL_USE]}, RESULT]),
    ],
)
def test_fields_of_other_servers_are_left_out_only_if_they_are_null(post, path, field, sent_back):
    first = next(part for message in sent_back for part in _parts_of(message))
    for value, expected in ((None, 200), (False, 400)):
        given = json.loads(json.dumps(sent_back).replace(json.dumps(first), json.dumps(first | {"caller_id": value})))
        status, error = post(path, **{field: given})
        assert status == expected, error
    assert error["message"].split()[0].endswith(".caller_id") and " is unknown; allowed there: " in error["message"]


def _parts_of(message):
    content = message.get("content")
    return (content if isinstance(content, list) else []) if "role" in message else [message]


@pytest.mark.parametrize("given", ["three", ["nothing", "three"]])
def test_stop_ends_the_answers_of_both_apis(served, writer, given):
    writer.text = "One two three four"
    answer = served[0].post(MESSAGES, messages=QUESTION, max_tokens=99, stop=given)[2]
    assert answer["content"][0]["text"].strip() == "One two" and answer["stop_sequence"] == "three"
    answer = served[0].post(RESPONSES, input="Weather?", stop=given)[2]
    assert answer["output"][0]["content"][0]["text"].strip() == "One two"


def test_max_tokens_alone_bounds_a_response(served, writer):
    answer = served[0].post(RESPONSES, input="Weather?", max_tokens=3)[2]
    assert answer["usage"]["output_tokens"] == 3


# ---- names of fields ----

FORMAT = {"type": "json_schema", "name": "a", "schema": BAD_SCHEMA}
CHAT_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": BAD_SCHEMA}}
OUTPUT = {"type": "json_schema", "schema": BAD_SCHEMA}
OBJECT = {"type": "json_object"}


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (MESSAGES, {"tools": [MESSAGE_TOOL] * 2}, "", "tools[1].name is 'f'"),
        (COUNT, {"tools": [MESSAGE_TOOL] * 2}, "", "tools[1].name is 'f'"),
        (
            MESSAGES,
            {"tools": [MESSAGE_TOOL], "tool_choice": {"type": "tool", "name": "g"}},
            "",
            "tool_choice.name is 'g'",
        ),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "", "tool_choice any needs tools"),
        (RESPONSES, {"tools": [RESPONSE_TOOL] * 2}, "tools[1].name", "tools[1].name is 'f'"),
        (
            RESPONSES,
            {"tools": [RESPONSE_TOOL], "tool_choice": {"type": "function", "name": "g"}},
            "tool_choice.name",
            "tool_choice.name is 'g'",
        ),
        (
            RESPONSES,
            {
                "tools": [RESPONSE_TOOL],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
            },
            "tool_choice.tools[0].name",
            "tool_choice.tools[0].name is 'g'",
        ),
        (RESPONSES, {"tool_choice": "required"}, "tool_choice", "tool_choice required needs tools"),
        (RESPONSES, {"text": {"format": FORMAT}}, "text.format.schema", "text.format.schema can't be used"),
        (
            RESPONSES,
            {"response_format": CHAT_FORMAT},
            "response_format.json_schema.schema",
            "response_format.json_schema.schema can't be used",
        ),
        (
            RESPONSES,
            {"text": {"format": OBJECT}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "text.format and structured_outputs both",
        ),
        (
            RESPONSES,
            {"text": {"format": OBJECT}, "response_format": OBJECT},
            "response_format",
            "response_format and text.format are both set",
        ),
        (RESPONSES, {"input": "a b " * 5000}, "input", "input has"),
        (MESSAGES, {"output_config": {"format": OUTPUT}}, "", "output_config.format.schema can't be used"),
        (MESSAGES, {"output_config": {"format": OUTPUT}, "response_format": OBJECT}, "", "response_format and output_"),
        (MESSAGES, {"response_format": CHAT_FORMAT}, "", "response_format.json_schema.schema can't be used"),
    ],
)
def test_errors_name_the_fields_that_the_client_sent(post, path, fields, param, words):
    status, error = post(path, **fields)
    assert status == 400 and error["message"].startswith(words)
    assert error.get("param", "") == param


@pytest.mark.parametrize("name", ["max_tokens", "max_output_tokens"])
def test_too_many_tokens_are_named_as_they_were_asked_for(post, name):
    status, error = post(RESPONSES, **{"max_output_tokens": None, name: 5000})
    assert status == 400 and error["param"] == name and f" and {name} 5000 make " in error["message"]


# ---- bugs ----


class _Broken:
    """Parts of a server that fail at the first use."""

    async def read(self, *_):
        raise RuntimeError("a bug")


def answer_of(app, path):
    """The status and the body of an answer; for an exception that ``app`` raises, a server closes the connection."""
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])["error"]


def test_a_bug_is_logged_and_answered_in_the_endpoints_own_shape(caplog):
    handlers = {
        ("POST", MESSAGES): Messages(_Broken()).create,
        ("POST", COUNT): Messages(_Broken()).count,
        ("POST", RESPONSES): Responses(_Broken()).create,
    }
    paths = frozenset(path for _, path in handlers)
    exact = ExactPaths(SimpleNamespace(), handlers, Refusals(writes_lines=False))
    app = GiveRequestIds(CountRequests(exact, RouterMetrics(), paths), NoTracing())
    for path in (MESSAGES, COUNT):
        assert answer_of(app, path) == (500, {"type": "api_error", "message": "internal error"})
    status, error = answer_of(app, RESPONSES)
    assert status == 500 and error["code"] == "internal_error" and error["param"] is None
    assert [record.exc_info[1].args for record in caplog.records] == [("a bug",)] * 3
