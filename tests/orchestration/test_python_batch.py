"""Batches of requests against an endpoint that refuses, breaks off, and counts what is in flight."""

import asyncio
import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web

from splitserve.common.errors import SplitserveError
from splitserve.orchestration.python import batch, llm
from splitserve.orchestration.python.batch import Batch, ClusterGoneError
from splitserve.orchestration.python.llm import LLM
from splitserve.orchestration.python.results import PromptError
from waiting import wait_until

REFUSED = {"error": {"message": "no worker", "type": "x", "param": None, "code": "no_worker"}}


class Endpoint:
    """Endpoint on a thread of its own. ``behave`` answers the request of a number, and the number of its attempt."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.most_in_flight = 0
        self.attempts: Counter[int] = Counter()
        self.keys: set[str] = set()
        self.behave: Callable[[int, int], Any] = lambda number, _attempt: {"number": number}
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        number = (await request.json())["number"]
        self.attempts[number] += 1
        self.keys.add(request.headers.get("Authorization", ""))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(0.002)
            found = self.behave(number, self.attempts[number])
            if found is None:  # the connection breaks
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            if found == "for ever":
                await asyncio.sleep(1000)
            return found if isinstance(found, web.Response) else web.json_response(found)
        finally:
            self.in_flight -= 1

    async def serve(self, listening: threading.Event, end: asyncio.Event) -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", self.answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/completions"
        listening.set()
        await end.wait()
        await runner.cleanup()


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setattr(batch, "RETRY_SECONDS", 0.01)
    found, listening, end = Endpoint(), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(found.serve(listening, end),))
    thread.start()
    listening.wait()
    yield found
    loop.call_soon_threadsafe(end.set)
    thread.join()
    loop.close()


def run(endpoint: Endpoint, count: int, *, concurrency: int = 8, **options: Any) -> tuple[list[Any], int]:
    """The results of ``count`` requests, and how often progress was reported."""
    settings = {"check_alive": lambda: None, "keep_going": False, "api_key": "", **options}
    reported: list[None] = []
    sender = Batch(endpoint.url, concurrency=concurrency, on_answer=lambda: reported.append(None), **settings)
    return sender.run([{"number": number} for number in range(count)]), len(reported)


def test_answers_come_in_order_and_few_requests_are_in_flight(endpoint: Endpoint) -> None:
    answers, num_reported = run(endpoint, 500, concurrency=8, api_key="k")
    assert [answer["number"] for answer in answers] == list(range(500))
    assert num_reported == 500 and endpoint.most_in_flight == 8
    assert endpoint.keys == {"Bearer k"}
    assert run(endpoint, 0) == ([], 0)


def test_refusals_and_broken_connections_are_tried_again(endpoint: Endpoint) -> None:
    def behave(number: int, attempt: int) -> Any:
        if attempt > 3:
            return {"number": number}
        return None if number % 3 == 0 else web.json_response(REFUSED, status=(429, 503)[number % 3 - 1])

    endpoint.behave = behave
    answers, _ = run(endpoint, 20)
    assert [answer["number"] for answer in answers] == list(range(20))
    assert set(endpoint.attempts.values()) == {4}


def test_what_stays_unavailable_fails_and_too_many_requests_do_not(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "UNAVAILABLE_SECONDS", 0.2)
    endpoint.behave = lambda _number, _attempt: web.json_response(REFUSED, status=503)
    with pytest.raises(PromptError, match=r"^prompt 0: no worker") as caught:
        run(endpoint, 1)
    assert (caught.value.index, caught.value.status, caught.value.code) == (0, 503, "no_worker")
    began = time.monotonic()
    endpoint.behave = lambda number, _attempt: (
        {"number": number} if time.monotonic() > began + 0.6 else web.json_response(REFUSED, status=429)
    )
    assert run(endpoint, 1)[0] == [{"number": 0}]


def fails_at(*numbers: int) -> Callable[[int, int], Any]:
    error = {"error": {"message": "too long", "type": "x", "param": "prompt", "code": "context_length_exceeded"}}
    return lambda number, _attempt: web.json_response(error, status=400) if number in numbers else {"number": number}


def test_the_first_failure_ends_the_batch(endpoint: Endpoint) -> None:
    endpoint.behave = fails_at(7)
    with pytest.raises(PromptError, match=r"^prompt 7: too long$") as caught:
        run(endpoint, 5000, concurrency=4)
    assert (caught.value.index, caught.value.status, caught.value.param) == (7, 400, "prompt")
    assert endpoint.attempts.total() < 100, "the others aren't sent"


def test_failures_stand_in_the_place_of_results(endpoint: Endpoint) -> None:
    endpoint.behave = fails_at(3, 11)
    answers, num_reported = run(endpoint, 20, keep_going=True)
    assert {number for number, answer in enumerate(answers) if isinstance(answer, PromptError)} == {3, 11}
    assert [answers[number].index for number in (3, 11)] == [3, 11]
    assert answers[4] == {"number": 4} and num_reported == 20


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a\ud800b", "it isn't valid Unicode: .* position 1: surrogates not allowed"),
        (object(), "it isn't JSON: Encoding objects of type object is unsupported"),
    ],
)
def test_a_prompt_that_cannot_be_sent_fails_alone(endpoint: Endpoint, content: object, said: str) -> None:
    bodies = [{"number": 0}, {"number": 1, "messages": [{"role": "user", "content": content}]}, {"number": 2}]
    settings: Any = {"concurrency": 1, "check_alive": lambda: None, "on_answer": lambda: None}
    answers = Batch(endpoint.url, "", keep_going=True, **settings).run(bodies)
    assert answers[::2] == [{"number": 0}, {"number": 2}] and isinstance(answers[1], PromptError)
    with pytest.raises(PromptError, match=f"^prompt 1: {said}$"):
        Batch(endpoint.url, "", keep_going=False, **settings).run(bodies)


def test_an_answer_that_is_no_error_object_is_shown(endpoint: Endpoint) -> None:
    endpoint.behave = lambda _number, _attempt: web.Response(text="<html>", status=500)
    with pytest.raises(PromptError, match="prompt 0: status 500: <html>"):
        run(endpoint, 1)


def test_a_cluster_that_has_ended_fails_the_batch(endpoint: Endpoint) -> None:
    def gone() -> None:
        raise ClusterGoneError("it has ended")

    endpoint.behave = lambda _number, _attempt: web.json_response(REFUSED, status=503)
    with pytest.raises(SplitserveError, match="it has ended"):
        run(endpoint, 5, check_alive=gone, keep_going=True)


def test_ctrl_c_hangs_up(endpoint: Endpoint) -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # other tests may have left one
    endpoint.behave = lambda _number, _attempt: "for ever"
    before = threading.active_count()

    def interrupt() -> None:
        wait_until(lambda: endpoint.in_flight == 3)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(endpoint, 10, concurrency=3)
    finally:
        signal.signal(signal.SIGINT, handler)
    interrupter.join()
    wait_until(lambda: endpoint.in_flight == 0, "requests are still in flight")
    assert threading.active_count() == before


def test_a_batch_runs_where_an_event_loop_runs(endpoint: Endpoint) -> None:
    async def notebook() -> list[Any]:
        return run(endpoint, 3)[0]

    assert len(asyncio.run(notebook())) == 3


TEXTS = r"^prompts must be a text, token ids, or a list of texts or token ids, got "
CHATS = r"^chats must be a list of messages, or a list of such lists, got "


@pytest.mark.parametrize(
    ("method", "given", "words"),
    [
        ("generate", 5, TEXTS + "5$"),
        ("generate", None, TEXTS + "None$"),
        ("generate", b"x", TEXTS + "b'x'$"),
        ("generate", {"a": 1}, TEXTS),
        ("generate", [b"x"], r"^prompt 0 must be a text or token ids, got b'x'$"),
        ("generate", ["a", {5: 1}], r"^prompt 1 must be a text or token ids, got \{5: 1\}$"),
        ("chat", None, CHATS + "None$"),
        ("chat", 0, CHATS + "0$"),
        ("chat", "", CHATS + "''$"),
        ("chat", {}, CHATS + r"\{\}$"),
        ("chat", [b"x"], r"^chat 0 must be a list of messages like .*, got b'x'$"),
    ],
)
@pytest.mark.parametrize("return_errors", [False, True])
def test_arguments_of_a_wrong_type_are_named(method: str, given: Any, words: str, return_errors: bool) -> None:
    offline = object.__new__(LLM)  # without a cluster: nothing is sent
    with pytest.raises(TypeError, match=words):
        getattr(offline, method)(given, return_errors=return_errors)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"stream": True}, r"^stream must be False or left out, got True: .* to stream, send .* llm.server.base_url$"),
        ({"return_token_ids": False}, r"^return_token_ids must be True or left out, got False"),
        ({"prompt": "b"}, r"^prompt must be left out"),
        ({"messages": []}, r"^messages must be left out"),
        ({"stop": ["\ud800"]}, r"^stop must be a value of JSON, got \['\\ud800'\]: .*surrogates not allowed"),
        ({"temperature": math.nan}, r"^temperature must be a value of JSON, got nan: "),
        ({"logit_bias": {"5": math.inf}}, r"^logit_bias must be a value of JSON, got \{'5': inf\}: "),
        ({"response_format": object()}, r"^response_format must be a value of JSON, got <object object at "),
    ],
)
@pytest.mark.parametrize("return_errors", [False, True])
@pytest.mark.parametrize("method", ["generate", "chat"])
def test_parameters_of_whole_answers_cannot_be_changed(
    method: str, parameters: dict[str, Any], words: str, return_errors: bool
) -> None:
    offline = object.__new__(LLM)
    given: Any = "a" if method == "generate" else [{"role": "user", "content": "a"}]
    with pytest.raises(TypeError, match=words):
        getattr(offline, method)(given, return_errors=return_errors, **parameters)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        (torch.tensor([1, 2, 3]), [[1, 2, 3]]),
        (torch.tensor([[1], [2]]), [[1], [2]]),
        (np.array([1, 2, 3]), [[1, 2, 3]]),
        ([torch.tensor([1, 2]), [3], "a"], [[1, 2], [3], "a"]),
        ([np.int64(1), 2], [[1, 2]]),
    ],
)
def test_token_ids_may_be_tensors_and_arrays(monkeypatch: pytest.MonkeyPatch, given: Any, prompts: Any) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(LLM, "_run", lambda _self, _path, bodies, *_: [sent.append(each["prompt"]) for each in bodies])
    monkeypatch.setattr(llm, "_results", lambda *_: [])
    object.__new__(LLM).generate(given)
    assert sent == prompts
