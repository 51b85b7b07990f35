"""The router process from outside: the openai package, curl, plain HTTP; workers are scripted, sockets are real."""

import json
import shutil
import subprocess

import openai
import pytest

from router_harness import EOS, RouterProcess, Workers, write_model_dir
from splitserve.benchmarks.router.worker_script import default_script
from splitserve.protocol.messages.requests import DecodeRequest, PrefillRequest
from splitserve.protocol.request import Role
from waiting import PATIENCE_SECONDS, wait_until

PAIR = {"mode": "disaggregated", "prefill": "p0", "decode": "d0", "attempts": 1, "cached_tokens": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("router") / "tiny"
    return path, write_model_dir(path)


@pytest.fixture(scope="module")
def tokenizer(model):
    return model[1]


@pytest.fixture(scope="module")
def pair():
    return []


@pytest.fixture(scope="module")
def router(model, pair):
    process = RouterProcess(model[0], max_requests_in_flight=40)
    workers = Workers(process.membership)
    try:
        script = default_script(tokens_per_message=1)
        pair += [workers.start(f"{role[0]}0", role, script, max_model_len=256) for role in (Role.PREFILL, Role.DECODE)]
        wait_until(lambda: process.request("GET", "/ready")[0] == 200)
        yield process
    finally:
        workers.close()
        process.stop()


@pytest.fixture
def client(router):
    with openai.OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


def sse(text):
    """The JSON objects of a stream, which must end with [DONE]."""
    events = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


# ---- the openai package ----


def test_completion(client, tokenizer):
    answer = client.completions.create(model="tiny", prompt="Käse 😀", max_tokens=9, temperature=0)
    num_prompt_tokens = len(tokenizer.encode("Käse 😀").ids)
    assert answer.choices[0].text.startswith("Käse 😀") and answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == num_prompt_tokens and answer.usage.completion_tokens == 9
    assert answer.usage.total_tokens == num_prompt_tokens + 9 and answer.object == "text_completion"
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_completion_defaults_to_16_tokens(client):
    assert client.completions.create(model="tiny", prompt="a b c").usage.completion_tokens == 16


def test_streamed_completion_shows_the_same_text_without_half_characters(client):
    prompt = "東京は日本の首都です。😀🦩"
    whole = client.completions.create(model="tiny", prompt=prompt, max_tokens=60).choices[0].text
    chunks = list(client.completions.create(model="tiny", prompt=prompt, max_tokens=60, stream=True))
    texts = [chunk.choices[0].text for chunk in chunks]
    assert "".join(texts) == whole and len(chunks) > 30
    assert not any("\ufffd" in text for text in texts[:-1])
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat(client, tokenizer):
    messages = [{"role": "user", "content": "The quick brown fox"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=5)
    prompt = "<|im_start|>user\nThe quick brown fox<|im_end|>\n<|im_start|>assistant\n"
    assert answer.usage.prompt_tokens == len(tokenizer.encode(prompt).ids)
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].message.content.startswith("user")
    assert answer.object == "chat.completion"


def test_streamed_chat_opens_with_the_role_and_ends_with_usage(client):
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "The quick"}],
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 6
    assert chunks[-2].choices[0].finish_reason == "length"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-2])
    with client.chat.completions.stream(model="tiny", messages=[{"role": "user", "content": "x"}]) as events:
        assert events.get_final_completion().choices[0].message.content == "user\nx"


def test_chat_without_a_limit_fills_the_context(client):
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
    # The scripted model repeats its prompt, which holds the end token: so it stops there.
    assert answer.choices[0].finish_reason == "stop"


def test_ignore_eos_goes_on_to_the_context_length(router):
    status, _, answer = router.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], ignore_eos=True
    )
    assert status == 200 and answer["usage"]["total_tokens"] == 256


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "splitserve"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


def test_errors_reach_the_client_as_its_own_classes(client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a", best_of=2)
    assert caught.value.param == "best_of" and "not supported" in caught.value.message


# ---- what goes to workers ----


def test_both_workers_get_the_same_request_and_each_other(router, pair):
    for worker in pair:
        worker.requests.clear()
    fields = {"prompt": [7, 8, 9], "max_tokens": 4, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": -1}
    status, _, answer = router.post("/v1/completions", **fields, stop_token_ids=[300], return_route=True)
    assert status == 200 and {key: answer["splitserve"][key] for key in PAIR} == PAIR
    assert answer["splitserve"]["handover"]["blocks"] == 1
    assert 0 <= answer["splitserve"]["handover_seconds"] < 60
    prefill, decode = pair
    wait_until(lambda: prefill.requests, "prefill has its request")
    assert isinstance(prefill.requests[0], PrefillRequest) and isinstance(decode.requests[0], DecodeRequest)
    assert prefill.requests[0].key == decode.requests[0].key
    assert prefill.requests[0].decode.party == decode.party and prefill.requests[0].decode.endpoint == decode.endpoint
    assert decode.requests[0].prefill.party == prefill.party and decode.requests[0].prefill.endpoint == prefill.endpoint
    sampling = decode.requests[0].sampling
    assert sampling == prefill.requests[0].sampling and list(decode.requests[0].token_ids) == [7, 8, 9]
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (4, 0.5, 3, 0.9)
    assert sampling.seed == 2**64 - 1 and sampling.stop_token_ids == (1, 300)
    assert 0 < decode.requests[0].deadline_seconds <= 600


def test_the_router_draws_a_seed_where_the_client_gives_none(router, pair):
    pair[1].requests.clear()
    for _ in range(2):
        router.post("/v1/completions", prompt="a b", max_tokens=2)
    seeds = [body.sampling.seed for body in pair[1].requests]
    assert len(set(seeds)) == 2 and all(0 <= seed < 2**63 for seed in seeds)


def test_metrics_count_where_requests_ran(router):
    name = 'splitserve_requests_finished_total{actual="disaggregated",intended="disaggregated",reason="ok"}'
    http = 'splitserve_http_requests_total{endpoint="/v1/completions",status="200"}'
    before = router.metric(name), router.metric(http), router.metric("splitserve_ttft_seconds_count")
    router.post("/v1/completions", prompt="a b", max_tokens=2)
    after = router.metric(name), router.metric(http), router.metric("splitserve_ttft_seconds_count")
    assert after == tuple(value + 1 for value in before)
    wait_until(lambda: router.metric("splitserve_requests_in_flight") == 0)
    assert router.metric('splitserve_worker_ready{role="decode",worker="d0"}') == 1
    assert router.metric('splitserve_worker_steps_total{role="decode",worker="d0"}') == 0
    assert router.metric("splitserve_wire_errors_total") == 0


@pytest.mark.parametrize(
    ("path", "counted_as", "status"),
    [
        ("/openapi.json", "/openapi.json", 200),
        ("/admin/workers", "/admin/workers", 200),
        ("/v1/models/x", "other", 404),
        ("/wat", "other", 404),
    ],
)
def test_metrics_count_requests_by_endpoint(router, path, counted_as, status):
    name = f'splitserve_http_requests_total{{endpoint="{counted_as}",status="{status}"}}'
    before = router.metric(name)
    assert router.request("GET", path)[0] == status
    assert router.metric(name) == before + 1


# ---- answers ----


def test_return_token_ids_whole_and_streamed(router):
    fields = {"prompt": [40, 41, 42], "max_tokens": 5, "return_token_ids": True}
    _, _, answer = router.post("/v1/completions", **fields)
    assert answer["choices"][0]["token_ids"] == [40, 41, 42, 40, 41]
    _, _, text = router.post("/v1/completions", **fields, stream=True, return_route=True)
    events = sse(text)
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == [40, 41, 42, 40, 41]
    assert "splitserve" not in events[0] and events[-1]["splitserve"]["decode"] == "d0"


def test_several_prompts_give_a_choice_each(router, tokenizer):
    prompts = ["The quick", "brown fox", "東京"]
    fields = {"prompt": prompts, "max_tokens": 2, "return_token_ids": True}
    _, _, answer = router.post("/v1/completions", **fields)
    expected = [tokenizer.encode(prompt).ids for prompt in prompts]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice, ids in zip(answer["choices"], expected, strict=True):
        assert choice["token_ids"] == (ids * 2)[:2]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected)) and answer["usage"]["completion_tokens"] == 6
    _, _, text = router.post("/v1/completions", **fields, stream=True, stream_options={"include_usage": True})
    streamed = {0: "", 1: "", 2: ""}
    events = sse(text)
    for event in events[:-1]:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert list(streamed.values()) == [choice["text"] for choice in answer["choices"]]
    assert events[-1]["usage"] == answer["usage"]
    _, _, answer = router.post("/v1/completions", prompt=[[5, 6], [7]], max_tokens=2, return_token_ids=True)
    assert [choice["token_ids"] for choice in answer["choices"]] == [[5, 6], [7, 7]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_over_token_boundaries_cuts_the_text_and_aborts(router, pair, tokenizer, stream):
    prompt = "The quick brown fox jumps"
    fields = {"prompt": prompt, "max_tokens": 60, "stop": ["nothing", "k bro"], "return_token_ids": True}
    _, _, answer = router.post("/v1/completions", **fields, stream=stream)
    events = sse(answer) if stream else [answer]
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == "The quic"
    assert choices[-1]["finish_reason"] == "stop"
    token_ids = [token for choice in choices for token in choice["token_ids"]]
    assert token_ids == tokenizer.encode(prompt).ids[: len(token_ids)]
    assert "k bro" in tokenizer.decode(token_ids) and "k bro" not in tokenizer.decode(token_ids[:-1])


def test_the_end_token_counts_but_does_not_show(router, tokenizer):
    prompt = [*tokenizer.encode("The quick").ids, tokenizer.token_to_id(EOS)]
    _, _, answer = router.post("/v1/completions", prompt=prompt, max_tokens=20, return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["text"] == "The quick" and choice["finish_reason"] == "stop" and choice["token_ids"] == prompt
    assert answer["usage"]["completion_tokens"] == len(prompt)


def test_a_first_token_that_ends_the_request_aborts_decode(router, pair, tokenizer):
    pair[1].received.clear()
    _, _, answer = router.post(
        "/v1/completions", prompt=[tokenizer.token_to_id(EOS)], return_route=True, return_token_ids=True
    )
    assert answer["choices"][0] | {"logprobs": 0} == {
        "index": 0,
        "text": "",
        "token_ids": [tokenizer.token_to_id(EOS)],
        "finish_reason": "stop",
        "logprobs": 0,
    }
    assert answer["splitserve"]["handover"] is None
    wait_until(lambda: "Abort" in [type(body).__name__ for body in pair[1].received])


def test_long_prompts_are_tokenised_in_the_pool_alike(router, tokenizer):
    prompt = "東京 " * 200
    status, _, answer = router.post("/v1/completions", prompt=prompt)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert str(len(tokenizer.encode(prompt).ids)) in answer["error"]["message"]


def test_hopelessly_long_texts_are_refused_by_their_beginning(router):
    text = "a b " * 100_000
    for path, fields, param in (
        ("/v1/completions", {"prompt": text}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, "messages"),
    ):
        status, _, answer = router.post(path, **fields)
        assert (status, answer["error"]["param"]) == (400, param)
        assert (
            answer["error"]["message"]
            == f"{param} has far more tokens than fit: this model's maximum context length is 256 tokens"
        )


# ---- bad input ----


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"model": "other", "prompt": "a"}, 404, "model", "model_not_found"),
        ({"prompt": ""}, 400, "prompt", "empty_prompt"),
        ({"prompt": []}, 400, "prompt", "empty_prompt"),
        ({"prompt": ["a", ""]}, 400, "prompt", "empty_prompt"),
        ({"prompt": [[]]}, 400, "prompt", "empty_prompt"),
        ({"prompt": [400]}, 400, "prompt", "invalid_token_id"),
        ({"prompt": [-1]}, 400, "prompt", "invalid_value"),
        ({"prompt": [1], "stop_token_ids": [400]}, 400, "stop_token_ids", "invalid_token_id"),
        ({"prompt": [1] * 200, "max_tokens": 57}, 400, "max_tokens", "context_length_exceeded"),
        ({"prompt": [1] * 256}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": ["a"] * 41}, 400, "prompt", None),
        ({"prompt": "a", "logprobs": 21}, 400, "logprobs", "invalid_value"),
        ({"prompt": "a", "wat": 1}, 400, "wat", "unknown_parameter"),
    ],
)
def test_bad_completions(router, fields, status, param, code):
    got, _, answer = router.post("/v1/completions", **fields)
    assert (got, answer["error"]["param"], answer["error"]["code"]) == (status, param, code)


def test_the_context_may_be_filled_exactly(router):
    status, _, answer = router.post("/v1/completions", prompt=[5] * 200, max_tokens=56)
    assert status == 200 and answer["usage"]["total_tokens"] == 256
    status, _, answer = router.post("/v1/completions", prompt=[5] * 250)
    assert status == 200 and answer["usage"]["completion_tokens"] == 6  # the default of 16 doesn't fit


def test_too_long_says_both_numbers(router):
    _, _, answer = router.post("/v1/completions", prompt=[1] * 200, max_tokens=57)
    assert "257" in answer["error"]["message"] and "256" in answer["error"]["message"]


def test_the_template_may_refuse_a_conversation(router):
    status, _, answer = router.post("/v1/chat/completions", messages=[{"role": "user", "content": "refuse"}])
    assert status == 400 and answer["error"]["param"] == "messages"


def test_bodies_that_are_no_json(router):
    for body in (b"", b"{", b"\xff\xfe", b'{"model": "tiny", "prompt": "\xff"}', b"[]"):
        status, headers, answer = router.request("POST", "/v1/completions", body)
        assert status == 400 and answer["error"]["code"] == "invalid_json"
        assert headers["content-type"] == "application/json"


def test_a_body_that_is_too_large(router):
    body = b"[" + b"1," * (9 * 1024 * 1024)
    for sent, headers in ((body, {}), (_chunked(body), {"Transfer-Encoding": "chunked"})):
        try:
            status, _, answer = router.request("POST", "/v1/completions", sent, **headers)
        except (BrokenPipeError, ConnectionResetError):
            continue  # the server answered and closed before it had read everything
        assert status == 413 and answer["error"]["code"] == "body_too_large"
    assert router.request("GET", "/health")[0] == 200


def _chunked(body):
    parts = [body[begin : begin + 2**20] for begin in range(0, len(body), 2**20)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def test_unknown_paths_and_methods_have_the_same_shape(router):
    status, _, answer = router.request("GET", "/v1/nothing")
    assert status == 404 and "/v1/nothing" in answer["error"]["message"]
    status, headers, answer = router.request("GET", "/v1/completions")
    assert status == 405 and answer["error"]["type"] == "invalid_request_error" and headers["allow"] == "POST"


def test_small_endpoints(router):
    assert router.request("GET", "/health")[::2] == (200, {"status": "ok"})
    assert router.request("GET", "/ready")[::2] == (200, {"status": "ready"})
    assert set(router.request("GET", "/version")[2]) == {"version"}
    status, _, schema = router.request("GET", "/openapi.json")
    assert status == 200
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatCompletionRequest"}
    for reference in set(json.dumps(schema).split('"$ref": "')[1:]):
        name = reference.split('"')[0].removeprefix("#/components/schemas/")
        assert name in schema["components"]["schemas"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl isn't installed")
def test_curl(router):
    body = json.dumps(
        {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}
    )
    command = ["curl", "-sS", "-N", router.url + "/v1/chat/completions", "-d", body]
    refusal = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS).stdout
    assert "-H 'Content-Type: application/json'" in refusal and "x-www-form-urlencoded" in refusal
    command += ["-H", "Content-Type: application/json"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS).stdout
    assert sse(text)[0]["choices"][0]["delta"]["role"] == "assistant"
