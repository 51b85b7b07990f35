"""Tenants: their file, their keys and limits over HTTP."""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from full_worker import CLASSES
from router_harness import RouterProcess, Workers, ready
from splitserve.benchmarks.router.worker_script import default_script
from splitserve.common.errors import ConfigError
from splitserve.protocol.request import Role
from splitserve.router.requests.queue.tenants import read_tenants
from waiting import wait_until

Serve = Callable[..., tuple[RouterProcess, Workers]]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("tenants: [{name: a, keys: [short]}]", r"length >= 8$"),  # a key is not shown
        (
            "tenants: [{name: a, key: xxxxxxxxx}]",
            r"tenants\[0\] contains unknown field key; there are name, keys, weight",
        ),
        ("tenants: [{name: a, keys: [same-key-1]}, {name: b, keys: [same-key-1]}]", "'b' is also a key of 'a'"),
        ("tenants: [{name: a, keys: [the-admin-key]}]", "a key of 'a' is also the admin key"),
        ("tenants: [{name: a}, {name: a}]", "'a' is taken; the tenants' names must differ"),
        ("tenants: [{name: operator}]", "operator"),
        ("tenants: [{name: a, weight: -2}]", r"tenants\[0\].weight: expected float > 0.0, got -2"),
        ("tenants: {a: 1}", "tenants: expected array, got object"),
        ("[]", "must be a mapping with the list `tenants`"),
        ("tenants: [{1: 2, name: a, keys: [the-key-of-a]}]", r"expected str - at key in \$.tenants\[0\]$"),
        (f"tenants: [{', '.join(1025 * ['{name: a, keys: [the-key-of-a]}'])}]", r"array of length <= 1024$"),
        ("tenants: [&a {name: a}, *a]", "alias"),
        ("tenants: [{name: a, keys: [the-key-of-a]}", r"tenants.yaml: expected .* \(line 1, column 42\)$"),
        ("[" * 100_000, "levels"),
        ("x" * (1 << 21), "bytes"),
    ],
)
def test_faulty_files_of_tenants(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=fault) as caught:
        read_tenants(path, {"the API key": "", "the admin key": "the-admin-key"})
    assert "the-key-of-a" not in str(caught.value), "keys don't belong into logs"


def test_a_file_without_tenants_needs_another_key(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants: []")
    assert read_tenants(path, {"the API key": "the-api-key"}).is_empty
    with pytest.raises(ConfigError, match="everybody would be let in"):
        read_tenants(path)


def test_the_last_tenant_stays_where_nobody_else_has_a_key(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: [{name: a, keys: [key-of-tenant-a]}]")
    router, workers = serve(tenants_file=str(file))
    workers.start("m0", Role.MIXED)
    wait_until(lambda: _ask(router, "key-of-tenant-a")[0] == 200)
    file.write_text("tenants: []")
    router.process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert router.request("GET", "/v1/models")[0] == 401 and _ask(router, "key-of-tenant-a")[0] == 200
    assert "everybody would be let in" in router.stop()[2]


def _bearer(key: str) -> dict[str, str | None]:
    return {"Authorization": f"Bearer {key}"}


def _ask(router: RouterProcess, key: str, max_tokens: int = 1, **headers: str | None) -> tuple[int, Any]:
    body = {"model": "tiny", "prompt": [50, 51, 52], "max_tokens": max_tokens, "ignore_eos": True}
    status, _, answer = router.request("POST", "/v1/completions", body, **(_bearer(key) | headers))
    return status, answer


def test_tenants_over_http_and_their_file_read_again(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: [{name: a, keys: [key-of-tenant-a], max_requests_in_flight: 1}]")
    router, workers = serve(api_key="key-of-operators", tenants_file=str(file), classes=CLASSES)
    workers.start("m0", Role.MIXED, default_script(tokens_per_message=1, token_seconds=0.02))
    ready(router)
    assert _ask(router, "key-of-tenant-a")[0] == _ask(router, "key-of-operators")[0] == 200
    assert _ask(router, "key-of-nobody")[0] == 401
    assert router.request("GET", "/admin/workers", **_bearer("key-of-tenant-a"))[0] == 403
    assert router.request("GET", "/admin/workers", **_bearer("key-of-operators"))[0] == 200

    long = threading.Thread(target=_ask, args=(router, "key-of-tenant-a", 100))
    long.start()
    wait_until(lambda: router.metric("splitserve_requests_in_flight") == 1)
    status, answer = _ask(router, "key-of-tenant-a")
    assert status == 429 and "1 are allowed" in answer["error"]["message"]
    long.join()

    file.write_text("tenants: [{name: a, keys: [key-of-tenant-a]}, {name: b, keys: [key-of-tenant-b]}]")
    router.process.send_signal(signal.SIGHUP)
    wait_until(lambda: _ask(router, "key-of-tenant-b")[0] == 200)
    file.write_text("tenants: {")
    router.process.send_signal(signal.SIGHUP)
    assert _ask(router, "key-of-tenant-b")[0] == 200, "a faulty file changes nothing"
    counted = 'splitserve_class_requests_total{class="default",outcome="finished",tenant="b"}'
    wait_until(lambda: router.metric(counted) >= 2)
    assert "the tenants stay as they were" in router.stop()[2]


def test_a_tenant_cannot_come_before_others_by_a_priority_of_its_own(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: [{name: a, keys: [key-of-tenant-a]}]")
    router, workers = serve(api_key="key-of-operators", tenants_file=str(file), classes=CLASSES)
    workers.start("m0", Role.MIXED)
    ready(router)

    def status_of(key: str, request_class: str, priority: int) -> tuple[int, str]:
        body = {"model": "tiny", "prompt": [50], "max_tokens": 1, "request_class": request_class, "priority": priority}
        status, _, answer = router.request("POST", "/v1/completions", body, **_bearer(key))
        return status, answer.get("error", {}).get("message", "")

    least = CLASSES[1].priority
    assert least > 0
    status, message = status_of("key-of-tenant-a", "batch", least - 1)
    assert status == 400 and f"can have {least}, the priority of class batch, or a higher number" in message
    assert status_of("key-of-tenant-a", "default", -1)[0] == 400
    assert status_of("key-of-tenant-a", "batch", least)[0] == status_of("key-of-tenant-a", "chat", 7)[0] == 200
    assert status_of("key-of-operators", "batch", -9)[0] == 200, "the operator may"


def test_tokens_per_minute_are_bounded(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: [{name: a, keys: [key-of-tenant-a], tokens_per_minute: 10}]")
    router, workers = serve(tenants_file=str(file))
    workers.start("m0", Role.MIXED)
    ready(router)
    assert _ask(router, "key-of-tenant-a", 30)[0] == 200
    body = {"model": "tiny", "prompt": [50], "max_tokens": 1}
    status, headers, answer = router.request("POST", "/v1/completions", body, **_bearer("key-of-tenant-a"))
    assert status == 429 and answer["error"]["code"] == "too_many_tokens"
    assert 60 <= int(headers["retry-after"]) <= 180
    for given in ({}, _bearer("key-of-tenant-a")):
        status, headers, answer = router.request("GET", "/admin/workers", **given)
        assert (status, answer["error"]["code"]) == (403, "operations_disabled") and "www-authenticate" not in headers
