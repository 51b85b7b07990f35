"""Operators' endpoints of a router in a process of its own, with scripted workers."""

import threading

import pytest

from router_harness import served_router
from splitserve.common.errors import ConfigError
from splitserve.orchestration.doctor.cluster import read_report
from splitserve.orchestration.doctor.http import Endpoint
from splitserve.orchestration.doctor.overview import read_overview
from splitserve.protocol.messages.operators import BeginDrain, ResetPrefixCache, SetFrozen
from splitserve.protocol.request import Role
from waiting import wait_until

KEYS = {"api_key": "client", "admin_key": "operator"}
OPERATOR = {"Authorization": "Bearer operator"}


@pytest.fixture(scope="module")
def running(model_dir):
    with served_router(model_dir, **KEYS) as (router, workers):
        started = [workers.start(name, role) for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE))]
        ready_workers = {worker.options.engine_id: worker for worker in started}
        wait_until(lambda: router.request("GET", "/ready")[0] == 200)
        yield router, ready_workers


@pytest.mark.parametrize("read", [read_report, read_overview])
def test_programs_say_that_the_key_of_the_api_is_no_admin_key(running, read) -> None:
    """It isn't taken for a router of another version."""
    with pytest.raises(ConfigError, match=r"answers 403: this is the API key.*set SPLITSERVE_ADMIN_KEY"):
        read(Endpoint(running[0].url, KEYS["api_key"]))


def test_only_the_admin_key_opens_admin(running) -> None:
    router, _ = running
    for path in ("/admin/pause", "/admin/resume", "/admin/reset-prefix-cache", "/admin/workers/d0/drain"):
        status, headers, answer = router.request("POST", path, {})
        assert (status, answer["error"]["code"]) == (401, "invalid_admin_key")
        assert headers["www-authenticate"] == 'Bearer realm="admin key"' and "admin key" in answer["error"]["message"]
        status, headers, answer = router.request("POST", path, {}, Authorization="Bearer client")
        assert (status, answer["error"]["code"]) == (403, "not_an_operator")
        assert headers["www-authenticate"] == 'Bearer realm="admin key"'
    assert router.request("GET", "/admin/workers", Authorization="Bearer client")[0] == 403
    assert router.request("GET", "/admin/workers", **OPERATOR)[0] == 200
    assert router.request("GET", "/v1/models", Authorization="Bearer client")[0] == 200
    assert router.request("GET", "/v1/models", **OPERATOR)[0] == 200


def test_faults_of_bodies_are_named(running) -> None:
    router, _ = running
    for path, body, words in (
        ("/admin/pause", {"mode": "stop"}, "abort, wait, keep"),
        ("/admin/pause", {"modus": "wait"}, "the body contains unknown field modus; there are mode"),
        ("/admin/resume", {"force": True}, "the body contains unknown field force; there are none"),
        ("/admin/workers/d0/drain", {"force": 1}, "force: expected bool, got int"),
        ("/admin/reset-prefix-cache", [], "the body: expected object, got array"),
    ):
        status, _, answer = router.request("POST", path, body, **OPERATOR)
        assert status == 400 and words in answer["error"]["message"], answer
    assert router.request("POST", "/admin/pause", {}, **OPERATOR, **{"Content-Type": "text/plain"})[0] == 415
    status, _, answer = router.request("POST", "/admin/workers/x9/drain", {}, **OPERATOR)
    assert status == 404 and "d0, p0" in answer["error"]["message"]
    status, _, answer = router.request("POST", "/admin/profile", {"worker": "x9"}, **OPERATOR)
    assert status == 404 and "d0, p0" in answer["error"]["message"]
    status, _, answer = router.request("POST", "/admin/workers/d0/drain", {}, **OPERATOR)
    assert status == 409 and '"force": true' in answer["error"]["message"]


def told(worker) -> list[bool]:
    """The freezes and ends of freezes that a worker was sent."""
    return [body.frozen for body in worker.received if isinstance(body, SetFrozen)]


def test_a_request_waits_for_the_end_of_a_pause(running) -> None:
    router, workers = running
    status, _, state = router.request("POST", "/admin/pause", {"mode": "keep"}, **OPERATOR)
    assert (status, state["paused"], state["mode"]) == (200, True, "keep")
    wait_until(lambda: told(workers["d0"]) == told(workers["p0"]) == [True])
    wait_until(lambda: router.request("GET", "/admin/pause", **OPERATOR)[2]["settled"])
    assert router.request("GET", "/admin/pause", **OPERATOR)[2]["workers_frozen"] == ["d0", "p0"]
    assert router.request("GET", "/ready")[0] == 503
    answers = []
    body = {"model": "tiny", "prompt": [50, 51, 52], "max_tokens": 2}
    send = lambda: answers.append(router.request("POST", "/v1/completions", body, Authorization="Bearer client"))  # noqa: E731
    client = threading.Thread(target=send)
    client.start()
    wait_until(lambda: router.request("GET", "/admin/pause", **OPERATOR)[2]["requests_waiting"] == 1)
    status, _, state = router.request("POST", "/admin/resume", {}, **OPERATOR)
    assert status == 200 and not state["paused"] and state["mode"] is None
    client.join()
    assert answers[0][0] == 200
    wait_until(lambda: told(workers["d0"]) == [True, False])
    assert router.request("GET", "/ready")[0] == 200


def test_a_drain_is_passed_on_and_the_worker_gets_no_request_any_more(running) -> None:
    router, workers = running
    status, _, state = router.request("POST", "/admin/workers/d0/drain", {"force": True}, **OPERATOR)
    assert (status, state["worker"], state["state"]) == (200, "d0", "draining")
    assert router.request("POST", "/admin/workers/d0/drain", {}, **OPERATOR)[0] == 200, "again"
    wait_until(lambda: workers["d0"].received.count(BeginDrain()) == 1)
    assert router.request("GET", "/ready")[0] == 503


def test_a_reset_answers_when_the_workers_have_confirmed_it(running) -> None:
    router, workers = running
    status, _, answer = router.request("POST", "/admin/reset-prefix-cache", {}, **OPERATOR)
    assert (status, answer) == (200, {"reset": ["d0", "p0"], "pending": []})
    assert all(any(isinstance(body, ResetPrefixCache) for body in each.received) for each in workers.values())


def test_without_a_key_operations_need_a_server_of_this_machine_alone(model_dir) -> None:
    with served_router(model_dir) as (router, _):
        assert router.request("POST", "/admin/pause", {"mode": "wait"})[0] == 200
        assert router.request("POST", "/admin/resume", {}, Host="example.org")[0] == 403
