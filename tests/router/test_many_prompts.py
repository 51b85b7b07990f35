"""Answers to several prompts, of which later ones wait for room at the workers while the first ones run."""

import json

from router_harness import ready
from router_streams import Stream, aborts
from splitserve.benchmarks.router.worker_script import default_script
from splitserve.protocol.config import ProtocolConfig, RequestClass
from splitserve.protocol.request import Role
from waiting import wait_until

CLASSES = (RequestClass(name="chat", ttft_ms=600_000),)
NEVER = 1e6
TWO_PROMPTS = {"prompt": [[50, 51, 52], [60, 61, 62]], "max_tokens": 4}


def one_at_a_time(workers, **script):
    """Start a worker that runs one request at a time."""
    return workers.start("m0", Role.MIXED, default_script(tokens_per_message=1, **script), max_num_seqs=1)


def indices(stream):
    lines = stream.text.splitlines()[:-1]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith('data: {"id')]
    return [event["choices"][0]["index"] for event in events]


def test_the_stream_of_a_prompt_does_not_wait_for_the_next_prompt(serve):
    router, workers = serve(classes=CLASSES)
    worker = one_at_a_time(workers, token_seconds=NEVER)
    ready(router)
    stream = Stream(router, **TWO_PROMPTS)
    stream.read_until("[50]")
    assert len(worker.requests) == 1 and router.metric("splitserve_requests_in_flight") == 2
    stream.socket.close()  # the client leaves, while one of its prompts runs and the other one waits
    wait_until(lambda: router.metric("splitserve_requests_in_flight") == 0)
    wait_until(lambda: router.metric("splitserve_requests_queued") == 0)
    after = Stream(router, max_tokens=4)
    after.read_until("[50]")
    assert len(worker.requests) == 2 and len(aborts(worker)) == 1, "the prompt that waited has begun"


def test_the_refusal_of_a_late_prompt_names_it_and_ends_the_others(serve):
    router, workers = serve(classes=CLASSES, protocol=ProtocolConfig(no_worker_wait_seconds=0.3))
    large = one_at_a_time(workers, token_seconds=NEVER)
    script = default_script(tokens_per_message=1, token_seconds=NEVER)
    small = workers.start("small", Role.MIXED, script, max_num_seqs=2, max_model_len=64)
    ready(router)
    wait_until(lambda: router.request("GET", "/admin/workers")[2]["workers"][1]["state"] == "ready")
    other = Stream(router, prompt=[50] * 100)  # fits the large worker only
    other.read_until("[50]")
    stream = Stream(router, prompt=[[50, 51, 52], [60] * 90], max_tokens=4)
    stream.read_until("[50]")
    assert len(small.requests) == 1
    workers.stop(large)
    error = stream.error()
    assert error["code"] == "no_worker" and error["message"].startswith(
        "prompt[1]: no ready mixed worker takes a sequence"
    )
    wait_until(lambda: len(aborts(small)) == 1)
    assert len(small.requests) == 1


def test_a_refusal_names_the_prompt_that_it_is_about(serve):
    router, workers = serve()
    workers.start("m0", Role.MIXED, default_script(), max_model_len=256)
    ready(router)

    def message(*prompts, **fields):
        status, _, answer = router.post("/v1/completions", prompt=prompts, **fields)
        assert status == 400
        return answer["error"]["message"]

    assert message([1], [1] * 256).startswith("prompt[1]: prompt has 256 tokens")
    assert message([1], [2], [1] * 250, max_tokens=9).startswith("prompt[2]: 250 prompt tokens and max_tokens 9")
    assert message([1], [400]).startswith("prompt[1]: prompt holds token id 400")
    assert message("a", "") == "prompt[1]: prompt is empty: give at least one token"
    assert message([400]).startswith("prompt holds token id 400"), "there is only one"
    assert message([1], [2], stop_token_ids=[400]).startswith("stop_token_ids holds"), "it is the same for all"
