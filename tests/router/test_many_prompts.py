"""Answers to several prompts, of which later ones wait for room at the workers while the first ones run."""

import json

from router_harness import ready
from router_streams import Stream, aborts
from splitserve.benchmarks.router.worker_script import default_script
from splitserve.protocol.config import RequestClass
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
