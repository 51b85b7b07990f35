"""The router's log about requests: one line each, with the reason of what failed, and what --no-request-log leaves."""

import json

import pytest

from router_harness import RouterProcess, Workers, ready
from router_streams import Stream
from splitserve.benchmarks.router.worker_script import Reply, default_script
from splitserve.common.logs import FORMAT_VARIABLE
from splitserve.protocol.config import ProtocolConfig
from splitserve.protocol.messages.requests import FailureCode, RequestFailed
from splitserve.protocol.request import Role
from waiting import wait_until


def script(body):
    """Fail prompts of one token, never answer those of two."""
    if len(body.token_ids) == 1:
        return [Reply(RequestFailed(body.key, FailureCode.INTERNAL, "the device is on fire"))]
    return [] if len(body.token_ids) == 2 else default_script()(body)


@pytest.fixture
def log(request, model_dir, monkeypatch):
    """The log, as JSON, of requests that finish, fail, are left by their client, and are refused; the fixture's
    parameter is whether the router writes request lines."""
    monkeypatch.setenv(FORMAT_VARIABLE, "json")
    monkeypatch.setenv("TEST_ROUTER_LOG_LEVEL", "info")
    router = RouterProcess(model_dir, request_log=request.param, protocol=ProtocolConfig(no_worker_wait_seconds=0.2))
    workers = Workers(router.membership)
    try:
        early = router.request("POST", "/v1/completions", {"model": "tiny", "prompt": [1], "max_tokens": 9999})
        assert early[0] == 503
        workers.start("m0", Role.MIXED, script)
        workers.start("m1", Role.MIXED, script)
        ready(router)

        def ask(request_id, prompt, **body):
            content = {"model": "tiny", "prompt": prompt, "max_tokens": 3, **body}
            status, headers, _ = router.request("POST", "/v1/completions", content, **{"X-Request-Id": request_id})
            assert headers["x-request-id"] == request_id
            return status

        assert (ask("fine", [5, 6, 7]), ask("broken", [5]), ask("wrong", [5], temperature=-1)) == (200, 502, 400)
        stream = Stream(router, prompt=[5, 6])
        wait_until(lambda: router.metric("splitserve_requests_in_flight") == 1)
        stream.socket.close()
        wait_until(lambda: router.metric("splitserve_requests_in_flight") == 0)
        name = 'splitserve_requests_finished_total{actual="cancelled",intended="local",reason="cancelled"}'
        assert router.metric(name) == 1
    finally:
        workers.close()
        _, _, text = router.stop()
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def lines(log, part):
    return [(line["level"], line["message"]) for line in log if part in line["message"]]


@pytest.mark.parametrize("log", [True], indirect=True)
def test_each_request_has_a_line(log):
    ((level, message),) = lines(log, "request fine-")
    assert level == "info" and "prompt=3 cached=0 output=3 ttft_ms=" in message
    (fields,) = [line for line in log if line.get("status") == "finished"]
    assert (
        fields["request_id"].startswith("fine-")
        and fields["decode"] in ("m0", "m1")
        and fields["num_output_tokens"] == 3
    )
    assert [level for level, _ in lines(log, "request broken-")] == ["warning"] * len(lines(log, "request broken-"))
    attempt, *_, end = (message for _, message in lines(log, "request broken-"))
    assert " failed (internal): worker m" in attempt and attempt.endswith(
        ": the device is on fire; it continues (local)"
    )
    assert " failed (internal), m" in end and end.endswith("the device is on fire")
    ((level, message),) = lines(log, "request wrong")
    assert level == "info" and "refused (400), /v1/completions: temperature" in message
    assert [level for level, _ in lines(log, "cancelled (cancelled)")] == ["info"]
    ((level, message),) = lines(log, "refused (503)")
    assert level == "warning" and "worker" in message


@pytest.mark.parametrize("log", [False], indirect=True)
def test_without_request_lines_failures_are_still_logged(log):
    assert lines(log, "request broken-") and lines(log, "refused (503)")
    assert not lines(log, "request fine") and not lines(log, "request wrong") and not lines(log, "(cancelled)")
    assert {level for level, _ in lines(log, "request ")} == {"warning"}
