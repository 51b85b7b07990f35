"""The last worker of a role dies: running requests wait for another one, new ones for a while, and nothing is lost."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from router_harness import RouterProcess, Workers, ready, served_router, write_model_dir
from router_streams import PROMPT, Stream, aborts
from splitserve.benchmarks.router.worker_script import Reply, Request, default_script
from splitserve.protocol.config import ProtocolConfig
from splitserve.protocol.messages.requests import FailureCode, LocalRequest, RequestFailed
from splitserve.protocol.request import Party, Role
from splitserve.router.placement.policies import Local, Snapshot, WorkerView
from splitserve.router.requests.ladder import MAX_ATTEMPTS, may_wait
from splitserve.router.requests.state import FailedAttempt, Failure, FailureReason
from splitserve.router.requests.waiting_room import RETRY_AFTER_SECONDS
from waiting import PATIENCE_SECONDS, wait_until

SLOW = default_script(tokens_per_message=1, token_seconds=0.05)
PROTOCOL = {"stream_keep_alive_seconds": 0.1, "no_worker_wait_seconds": 0.3}
COMMENT = ": keep-alive\n\n"
Serve = Callable[..., tuple[RouterProcess, Workers]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("router") / "tiny"
    write_model_dir(path)
    return path


@pytest.fixture
def serve(model_dir: Path) -> Iterator[Serve]:
    with ExitStack() as stack:

        def start(**protocol: Any) -> tuple[RouterProcess, Workers]:
            return stack.enter_context(served_router(model_dir, protocol=ProtocolConfig(**(PROTOCOL | protocol))))

        yield start


def gone(router: RouterProcess) -> None:
    wait_until(lambda: router.request("GET", "/ready")[0] == 503)


def token_ids(text: str) -> list[int]:
    found = re.findall(r'"token_ids":\[([\d,]*)\]', text)
    return [int(token) for part in found for token in part.split(",") if token]


class Asking:
    """A request that isn't streamed, on a thread; ``answer`` is its status, headers and body."""

    def __init__(self, router: RouterProcess, **fields: Any) -> None:
        self.answer: tuple[int, dict[str, str], Any] | None = None
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._ask, args=(router, PROMPT | fields))
        self._thread.start()

    def _ask(self, router: RouterProcess, fields: dict[str, Any]) -> None:
        began = time.monotonic()
        self.answer = router.post("/v1/completions", **fields)
        self.seconds = time.monotonic() - began

    def join(self) -> tuple[int, dict[str, str], Any]:
        self._thread.join(PATIENCE_SECONDS)
        assert self.answer is not None
        return self.answer


# ---- running requests ----


def test_running_requests_wait_for_the_restarted_worker_and_streams_get_comments(serve: Serve) -> None:
    router, workers = serve()
    workers.start("p0", Role.PREFILL)
    first = workers.start("d0", Role.DECODE, SLOW)
    ready(router)
    stream = Stream(router, max_tokens=12)
    stream.read_until("[51]")
    whole = Asking(router, max_tokens=12)
    wait_until(lambda: len(first.requests) == 2)
    workers.stop(first, leave=False)
    gone(router)
    while stream.text.count(COMMENT) < 7:  # longer than a new request would wait
        stream.read_more()
    assert whole.answer is None
    second = workers.start("d0", Role.DECODE, SLOW)
    stream.read_until("[DONE]")
    assert "error" not in stream.text and token_ids(stream.text) == [50, 51, 52] * 4
    status, _, answer = whole.join()
    assert status == 200 and answer["choices"][0]["token_ids"] == [50, 51, 52] * 4
    assert len(second.requests) == 2
    wait_until(lambda: router.metric("splitserve_requests_in_flight") == 0)


def test_openais_client_reads_a_stream_with_comments(serve: Serve) -> None:
    router, workers = serve()
    workers.start("p0", Role.PREFILL)
    first = workers.start("d0", Role.DECODE, SLOW)
    ready(router)
    client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)
    with client.completions.create(model="tiny", prompt=[50, 51, 52], max_tokens=12, stream=True) as stream:
        chunks = [next(stream), next(stream)]
        workers.stop(first, leave=False)
        gone(router)
        time.sleep(5 * PROTOCOL["stream_keep_alive_seconds"])
        workers.start("d0", Role.DECODE, SLOW)
        chunks += list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    whole = client.completions.create(model="tiny", prompt=[50, 51, 52], max_tokens=12)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_a_stream_that_lost_its_worker_before_its_first_token_gets_comments_too(serve: Serve) -> None:
    router, workers = serve()
    first = workers.start("m0", Role.MIXED, lambda body: [])
    ready(router)
    stream = Stream(router, max_tokens=3)
    wait_until(lambda: first.requests)
    time.sleep(3 * PROTOCOL["stream_keep_alive_seconds"])
    stream.socket.setblocking(False)
    with pytest.raises(BlockingIOError):  # a request that is in flight may still fail with a status
        stream.socket.recv(1)
    stream.socket.settimeout(PATIENCE_SECONDS)
    workers.stop(first, leave=False)
    stream.read_until(COMMENT)
    assert stream.text.startswith("HTTP/1.1 200")
    workers.start("m0", Role.MIXED)
    stream.read_until("[DONE]")
    assert token_ids(stream.text) == [50, 51, 52] and "error" not in stream.text


def test_no_worker_comes_until_the_deadline(serve: Serve) -> None:
    router, workers = serve(request_deadline_seconds=3.0)
    first = workers.start("m0", Role.MIXED, SLOW)
    ready(router)
    stream = Stream(router, max_tokens=100)
    stream.read_until("[50]")
    began = time.monotonic()
    workers.stop(first, leave=False)
    error = stream.error()
    assert error["code"] == "deadline" and error["type"] == "timeout_error"
    assert "no worker came that could go on" in error["message"] and "m0" in error["message"]
    assert time.monotonic() - began > 1.0, "it was given up before its deadline"
    assert stream.text.count(COMMENT) > 3
    wait_until(lambda: router.metric("splitserve_requests_in_flight") == 0)


def test_a_client_that_leaves_while_its_request_is_stranded_is_forgotten(serve: Serve) -> None:
    router, workers = serve()
    first = workers.start("m0", Role.MIXED, SLOW)
    ready(router)
    stream = Stream(router)
    stream.read_until("[50]")
    workers.stop(first, leave=False)
    gone(router)
    stream.socket.close()
    wait_until(lambda: router.metric("splitserve_requests_in_flight") == 0)
    second = workers.start("m0", Role.MIXED)
    ready(router)
    assert not second.requests and not aborts(second)


def test_a_failure_that_is_the_requests_own_is_told_at_once(serve: Serve) -> None:
    def fail(body: Request) -> list[Reply]:
        return [Reply(RequestFailed(body.key, FailureCode.INTERNAL, "so it is"))]

    router, workers = serve()
    workers.start("m0", Role.MIXED, fail)
    ready(router)
    status, _, answer = router.post("/v1/completions", **PROMPT)
    assert status == 502 and "so it is" in answer["error"]["message"]


def test_when_time_may_help() -> None:
    def failed(reason: FailureReason) -> FailedAttempt:
        return FailedAttempt(Local(Party("m", 1)), Party("m", 1), Failure(reason, "why"))

    nobody, prefill, mixed = (Snapshot(tuple(map(view, roles))) for roles in ([], [Role.PREFILL], [Role.MIXED]))
    lost, internal = [failed(FailureReason.WORKER_LOST)], [failed(FailureReason.INTERNAL)]
    assert may_wait(nobody, lost) and may_wait(prefill, lost) and may_wait(mixed, lost)
    assert may_wait(nobody, internal) and may_wait(prefill, internal), "what failed it is gone, and may be replaced"
    assert not may_wait(mixed, internal), "what failed it is still there"
    assert not may_wait(nobody, lost * MAX_ATTEMPTS), "workers die of it"


def view(role: Role) -> WorkerView:
    return WorkerView(Party(str(role), 1), role, max_num_seqs=8, max_model_len=100, kv_capacity_tokens=1000)


# ---- new requests ----


def test_a_new_request_waits_for_a_worker_and_is_served(serve: Serve) -> None:
    router, workers = serve(no_worker_wait_seconds=PATIENCE_SECONDS)
    before = Asking(router, max_tokens=3)  # none has ever been there: the context's length isn't known yet
    wait_until(lambda: router.metric("splitserve_requests_waiting") == 1)
    first = workers.start("m0", Role.MIXED)
    assert before.join()[0] == 200
    workers.stop(first)
    gone(router)
    streamed = Stream(router, max_tokens=3)
    after = Asking(router, max_tokens=3)
    wait_until(lambda: router.metric("splitserve_requests_waiting") == 2)
    second = workers.start("m0", Role.MIXED)
    status, _, answer = after.join()
    assert status == 200 and answer["choices"][0]["token_ids"] == [50, 51, 52]
    streamed.read_until("[DONE]")
    assert token_ids(streamed.text) == [50, 51, 52] and COMMENT not in streamed.text
    assert len(second.requests) == 2 and isinstance(second.requests[0], LocalRequest)
    wait_until(lambda: router.metric("splitserve_requests_waiting") == 0)


@pytest.mark.parametrize("protocol", [{}, {"request_deadline_seconds": 1.2, "no_worker_wait_seconds": 600.0}])
def test_a_new_request_waits_in_vain(serve: Serve, protocol: dict[str, float]) -> None:
    router, _ = serve(**protocol)
    asking = Asking(router)
    status, headers, answer = asking.join()
    assert status == 503 and answer["error"]["code"] == "no_worker"
    assert headers["retry-after"] == str(RETRY_AFTER_SECONDS)
    assert asking.seconds > 0.25, "0.3 s, or a quarter of the deadline"
    assert router.metric("splitserve_requests_in_flight") == 0


def test_those_beyond_the_bound_are_told_at_once_and_clients_that_leave_make_room(serve: Serve) -> None:
    router, workers = serve(no_worker_wait_seconds=600.0, max_requests_waiting=2)
    waiting = [Stream(router, max_tokens=3) for _ in range(2)]
    wait_until(lambda: router.metric("splitserve_requests_waiting") == 2)
    status, headers, answer = router.post("/v1/completions", **PROMPT)
    assert status == 503 and "2 requests wait for one already" in answer["error"]["message"]
    assert headers["retry-after"] == str(RETRY_AFTER_SECONDS)
    waiting.pop().socket.close()
    wait_until(lambda: router.metric("splitserve_requests_waiting") == 1)
    waiting.append(Stream(router, max_tokens=3))
    wait_until(lambda: router.metric("splitserve_requests_waiting") == 2)
    workers.start("m0", Role.MIXED)
    for stream in waiting:
        stream.read_until("[DONE]")
        assert token_ids(stream.text) == [50, 51, 52]


def test_a_router_that_ends_tells_those_that_wait_and_those_that_are_stranded(serve: Serve) -> None:
    router, workers = serve(no_worker_wait_seconds=600.0)
    first = workers.start("m0", Role.MIXED, SLOW)
    ready(router)
    stranded = Stream(router)
    stranded.read_until("[50]")
    workers.stop(first, leave=False)
    gone(router)
    new = Asking(router)
    wait_until(lambda: router.metric("splitserve_requests_waiting") == 1)
    os.kill(router.process.pid, signal.SIGTERM)
    assert stranded.error()["code"] == "shutdown"
    status, _, answer = new.join()
    assert status == 503 and "shutting down" in answer["error"]["message"]
