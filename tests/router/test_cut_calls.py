"""Answers that a stop string or a stop token of the request ends within a tool call, or behind one."""

import json

import pytest

from model_outputs import TIME, TOOLS, WEATHER, qwen_call
from scripted_writer import ANSWER, CALL
from splitserve.protocol.request import FinishReason
from splitserve.router.http.formats import ChatFormat
from splitserve.router.output.parts import Part, PartKind
from splitserve.router.text.choice import Piece

QUESTION = [{"role": "user", "content": "Weather?"}]
WHOLE = json.dumps(CALL, ensure_ascii=False)
BEHIND = f"{qwen_call('get_weather', WHOLE)}\nThen some text."
CUTS = [  # a stop of the request, and the arguments of the call that it leaves
    ({"stop": '"days'}, '{"city": "Köln 😀", '),
    ({"stop": "arg"}, ""),
    ({"stop": "}"}, WHOLE[:-1]),
    ({"token": "3"}, '{"city": "Köln 😀", "days": '),
]
NO_CUTS = [
    (ANSWER, {}),
    (BEHIND, {"stop": "Then"}),
    (BEHIND, {"stop": "</tool_call>"}),  # of the call's closing text nothing is left
    (BEHIND, {"token": "T"}),
    (qwen_call("get_weather", "{oops"), {}),  # the model's own end
]


@pytest.fixture
def ask(served, writer):
    """Post a request whose ``token`` is the text of a stop token; whole answers come decoded, streams as the data of
    their events."""
    router = served[0]

    def send(path, token="", **fields):
        if token:
            fields["stop_token_ids"] = router.post("/tokenize", prompt=token)[2]["tokens"]
        status, _, answer = router.post(path, **fields)
        assert status == 200, answer
        if not fields.get("stream"):
            return answer
        lines = [line.removeprefix("data: ") for line in answer.split("\n") if line.startswith("data: {")]
        return [json.loads(line) for line in lines]

    return send


def of_chat(ask, **fields):
    """The finish reason of a chat, the same in a stream, and the first call's arguments."""
    body = {"messages": QUESTION, "tools": TOOLS, **fields}
    [choice] = ask("/v1/chat/completions", **body)["choices"]
    events = ask("/v1/chat/completions", stream=True, **body)
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    return choice["finish_reason"], choice["message"]["tool_calls"][0]["function"]["arguments"]


def of_response(ask, **fields):
    """The status of a response's first call, the same in a stream, and its arguments."""
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {"input": "Weather?", "tools": tools, **fields}
    response = ask("/v1/responses", **body)
    events = ask("/v1/responses", stream=True, **body)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    items = response["output"]
    assert [item["status"] for item in items] == [item["status"] for item in done]
    assert response["status"] == events[-1]["response"]["status"] == "completed"
    call = next(item for item in items if item["type"] == "function_call")
    return call["status"], call["arguments"]


def of_message(ask, **fields):
    """The stop reason of a message, the same in a stream."""
    tools = [{"name": tool["function"]["name"], "input_schema": {"type": "object"}} for tool in (WEATHER, TIME)]
    body = {"messages": QUESTION, "tools": tools, "max_tokens": 500, **fields}
    message = ask("/v1/messages", **body)
    *_, delta, _ = ask("/v1/messages", stream=True, **body)
    assert delta["delta"]["stop_reason"] == message["stop_reason"]
    return message["stop_reason"]


@pytest.mark.parametrize(("stop", "arguments"), CUTS)
def test_a_call_that_a_stop_cuts_is_not_reported_as_called(ask, stop, arguments):
    assert of_chat(ask, **stop) == ("stop", arguments)
    assert of_response(ask, **stop) == ("incomplete", arguments)
    assert of_message(ask, **stop) == ("stop_sequence" if "stop" in stop else "end_turn")


@pytest.mark.parametrize(("text", "stop"), NO_CUTS)
def test_a_stop_behind_whole_calls_and_the_models_own_end_report_them(ask, writer, text, stop):
    writer.text = text
    assert of_chat(ask, **stop)[0] == "tool_calls"
    assert of_response(ask, **stop)[0] == "completed"
    assert of_message(ask, **stop) == ("stop_sequence" if "stop" in stop else "tool_use")


def test_each_choice_has_its_own_calls():
    form = ChatFormat("m", stop_token_ids=[7])
    for index, text in enumerate(("{", "{}")):
        call = Part(PartKind.CALL, index=0, call_id="a", name="f")
        form.chunk(index, Piece(text, (5,), None, (call, Part(PartKind.ARGUMENTS, text)), has_calls=True), {})
    last = Piece("", (7,), FinishReason.STOP, (), has_calls=True)
    chunks = [json.loads(form.chunk(index, last, {}).removeprefix(b"data: ")) for index in (0, 1)]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == ["stop", "tool_calls"]
