"""Endpoints for tokens, ids of requests, salts of the prefix cache, usage while a stream runs."""

import json

import pytest

from router_harness import ready, served_router, write_model_dir
from router_streams import Stream
from splitserve.benchmarks.router.worker_script import default_script
from splitserve.protocol.request import Role
from waiting import wait_until

TOOL = {"type": "function", "function": {"name": "f"}}
QUESTION = [{"role": "user", "content": "a"}]
MANY = [f"key{number}" for number in range(65)]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    path = tmp_path_factory.mktemp("endpoints") / "tiny"
    tokenizer = write_model_dir(path)
    with served_router(path) as (process, workers):
        script = default_script(tokens_per_message=1)
        pair = [workers.start(f"{role[0]}0", role, script, max_model_len=256) for role in (Role.PREFILL, Role.DECODE)]
        ready(process)
        yield process, pair, tokenizer


@pytest.fixture(scope="module")
def served_to_tenants(tmp_path_factory):
    """A router whose tenants ``a`` and ``b`` may have one request in flight, and ``a`` has it."""
    path = tmp_path_factory.mktemp("tenants")
    write_model_dir(path / "tiny")
    limits = ", ".join(f"{{name: {name}, keys: [key-of-{name}], max_requests_in_flight: 1}}" for name in "ab")
    (path / "tenants.yaml").write_text(f"tenants: [{limits}]")
    with served_router(path / "tiny", tenants_file=str(path / "tenants.yaml")) as (process, workers):
        workers.start("m0", Role.MIXED, default_script(tokens_per_message=1, token_seconds=1e6))
        ready(process)
        stream = Stream(process, key="key-of-a")
        stream.read_until("[50]")
        yield process
        stream.socket.close()


@pytest.fixture
def router(served):
    return served[0]


@pytest.fixture
def tokenizer(served):
    return served[2]


def events_of(text):
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line.startswith("data: {")]


# ---- /tokenize, /detokenize ----


@pytest.mark.parametrize("text", ["The quick brown fox", "東京は 😀", ""])
def test_text_to_tokens_and_back(router, tokenizer, text):
    status, _, answer = router.post("/tokenize", prompt=text, return_token_strs=True)
    encoding = tokenizer.encode(text)
    assert status == 200 and answer["tokens"] == encoding.ids and answer["token_strs"] == encoding.tokens
    assert (answer["count"], answer["max_model_len"]) == (len(encoding.ids), 256)
    assert router.post("/detokenize", tokens=answer["tokens"])[2] == {"prompt": text}


def test_messages_to_the_tokens_of_the_chat(router):
    messages = [{"role": "user", "content": "The quick"}]
    _, _, answer = router.post("/tokenize", messages=messages)
    _, _, chat = router.post("/v1/chat/completions", messages=messages, max_tokens=1)
    assert answer["count"] == chat["usage"]["prompt_tokens"] and answer["token_strs"] is None
    text = router.post("/detokenize", tokens=answer["tokens"])[2]["prompt"]
    assert text == "<|im_start|>user\nThe quick<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools[0].type"),
        ("/tokenize", {"prompt": "a", "max_tokens": 5}, "max_tokens"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": QUESTION, "tools": [TOOL] * 2}, "tools[1].function.name"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"messages": QUESTION, "chat_template_kwargs": dict.fromkeys(MANY)}, "chat_template_kwargs"),
        ("/tokenize", {"prompt": "a " * 300_000}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [400]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_bad_input_of_the_tokenizer(router, path, fields, param):
    status, _, answer = router.post(path, **fields)
    assert status == 400 and answer["error"]["param"] == param and param in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [50]}),
        ("/v1/messages/count_tokens", {"messages": QUESTION}),
    ],
)
def test_conversions_count_among_the_requests_of_a_tenant(served_to_tenants, path, body):
    status, headers, answer = served_to_tenants.request("POST", path, body, Authorization="Bearer key-of-a")
    assert status == 429 and "1 requests of a are in flight and 1 are allowed" in answer["error"]["message"]
    assert headers["retry-after"]
    for _ in range(2):
        assert served_to_tenants.request("POST", path, body, Authorization="Bearer key-of-b")[0] == 200
    assert served_to_tenants.metric("splitserve_requests_in_flight") == 1


# ---- /v1/generate ----


def test_tokens_in_and_tokens_out(router):
    fields = {"token_ids": [40, 41, 42], "max_tokens": 5}
    status, headers, answer = router.post("/v1/generate", **fields)
    assert status == 200 and answer["token_ids"] == [40, 41, 42, 40, 41] and answer["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 3 and answer["usage"]["completion_tokens"] == 5
    assert answer["weights_version"] and answer["id"] == f"gen-{headers['x-request-id']}"
    _, _, text = router.post("/v1/generate", **fields, stream=True, stream_options={"include_usage": True})
    *events, last = events_of(text)
    assert [token for event in events for token in event["token_ids"]] == answer["token_ids"]
    assert {event["weights_version"] for event in events} == {answer["weights_version"]}
    assert last["usage"] == answer["usage"] and text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1.5]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [400]}, "token_ids"),
        ({"token_ids": [1] * 256}, "token_ids"),
        ({"token_ids": [1], "stop": "a"}, "stop"),
        ({"token_ids": [1], "prompt": "a"}, "prompt"),
        ({"token_ids": [1], "max_tokens": 0}, "max_tokens"),
    ],
)
def test_bad_input_of_generate(router, fields, param):
    status, _, answer = router.post("/v1/generate", **fields)
    assert status == 400 and answer["error"]["param"] == param and param in answer["error"]["message"]


# ---- ids, salts, priorities ----


def test_a_clients_id_goes_through_all_processes(served):
    router, pair, _ = served
    for worker in pair:
        worker.requests.clear()
    body = {"prompt": "a", "max_tokens": 3, "cache_salt": "tenant", "priority": -4}
    status, headers, answer = router.request("POST", "/v1/completions", body, **{"X-Request-Id": "trace-7.a"})
    assert status == 200 and headers["x-request-id"] == "trace-7.a" and answer["id"] == "cmpl-trace-7.a"
    wait_until(lambda: all(worker.requests for worker in pair))  # the answer doesn't wait for prefill's
    for worker in pair:
        [request] = worker.requests
        assert request.key.request_id.startswith("trace-7.a-")
        assert (request.cache_salt, request.priority) == ("tenant", -4)


def test_two_requests_may_have_the_same_id(router):
    body = {"prompt": ["a", "b"], "max_tokens": 1}
    for _ in range(2):
        status, headers, _ = router.request("POST", "/v1/completions", body, **{"X-Request-Id": "same"})
        assert status == 200 and headers["x-request-id"] == "same"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "-a", "é"])
def test_ids_that_are_no_names_are_replaced(router, given):
    status, headers, _ = router.request("GET", "/health", None, **{"X-Request-Id": given})
    assert status == 200 and len(headers["x-request-id"]) == 24


def test_errors_have_ids_too(router):
    _, headers, _ = router.request("POST", "/v1/completions", {"prompt": 5}, **{"X-Request-Id": "bad"})
    assert headers["x-request-id"] == "bad"


def test_a_salt_that_is_too_long_is_refused(router):
    status, _, answer = router.post("/v1/completions", prompt="a", cache_salt="x" * 257)
    assert status == 400 and answer["error"]["param"] == "cache_salt" and "256" in answer["error"]["message"]


# ---- usage ----


@pytest.mark.parametrize(
    ("path", "asked"), [("/v1/completions", {"prompt": [40, 41]}), ("/v1/chat/completions", {"messages": QUESTION})]
)
def test_each_chunk_has_the_usage_so_far(router, path, asked):
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, _, text = router.post(path, **asked, max_tokens=4, stream=True, stream_options=options)
    events = events_of(text)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 4 and counts[0] < 4
    num_prompt_tokens = 2 if "prompt" in asked else router.post("/tokenize", **asked)[2]["count"]
    assert all(event["usage"]["prompt_tokens"] == num_prompt_tokens for event in events)
    assert events[-1]["choices"] == []
