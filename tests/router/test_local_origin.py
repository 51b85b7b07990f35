"""A loopback server without a key against web pages of others; and the types of bodies that it takes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from router_harness import RouterProcess, write_model_dir
from splitserve.router.http.access.local_origin import is_local, is_local_origin
from splitserve.router.http.openapi import ERRORS

Start = Callable[..., RouterProcess]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Routers by their settings, each started once."""
    path: Path = tmp_path_factory.mktemp("router") / "tiny"
    write_model_dir(path)
    started: dict[str, RouterProcess] = {}

    def get(**settings: str) -> RouterProcess:
        name = repr(settings)
        if name not in started:
            started[name] = RouterProcess(path, **settings)
        return started[name]

    yield get
    for process in started.values():
        process.stop()


@pytest.mark.parametrize(
    "authority",
    ["localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:8000", "127.8.9.1:1", "[::1]", "[::1]:8000"],
)
def test_local_authorities(authority: str) -> None:
    assert is_local(authority.encode()) and is_local_origin(b"http://" + authority.encode())


@pytest.mark.parametrize(
    "authority",
    [
        "",
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil.example@localhost",
        "localhost@evil.example",
        "localhost:80:80",
        "localhost:x",
        "localhost/evil",
        "::1",
        "[::1",
        "0.0.0.0",
        "10.0.0.1:8000",
        "xn--lcalhost-2ya",
        "127.0.0.1" + " " * 10**6,
    ],
)
def test_foreign_authorities(authority: str) -> None:
    assert not is_local(authority.encode()) and not is_local_origin(b"http://" + authority.encode())


def test_other_origins() -> None:
    assert is_local_origin(b"https://localhost:3000")
    assert not any(is_local_origin(origin) for origin in (b"null", b"", b"file://", b"localhost", b"ftp://localhost"))


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/metrics", "/admin/workers", "/nothing"])
def test_a_loopback_server_without_a_key_refuses_what_others_send(start: Start, path: str) -> None:
    router = start()
    for headers, code in (({"Host": "evil.example:80"}, "foreign_host"), ({"Origin": "null"}, "foreign_origin")):
        status, _, answer = router.request("GET", path, **headers)
        error = answer["error"]
        assert (status, error["code"], error["type"]) == (403, code, "permission_error")
        assert "--api-key-file" in error["message"] and repr(next(iter(headers.values()))) in error["message"]
    status, _, _ = router.request("GET", path, Host="localhost:1", Origin="http://127.0.0.1:3000")
    assert status != 403


def test_refusals_are_counted(start: Start) -> None:
    router = start()
    before = router.metric('splitserve_http_requests_total{endpoint="/version",status="403"}')
    router.request("GET", "/version", Host="evil.example")
    assert router.metric('splitserve_http_requests_total{endpoint="/version",status="403"}') == before + 1


@pytest.mark.parametrize("settings", [{"api_key": "k"}, {"host": "0.0.0.0"}], ids=["key", "other address"])
def test_others_may_call_a_server_that_is_meant_for_them(start: Start, settings: dict[str, str]) -> None:
    router = start(**settings)
    headers = {"Host": "models.example", "Origin": "https://chat.example", "Authorization": "Bearer k"}
    assert router.request("GET", "/v1/models", **headers)[0] == 200


# ---- types of bodies ----


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/admin/profile"])
@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("text/plain", "'text/plain'"),
        ("application/x-www-form-urlencoded", "'application/x-www-form-urlencoded'"),
        ("multipart/form-data; boundary=x", "multipart"),
        ("application/json; charset=latin-1", "charset=latin-1"),
        ("application/json, text/plain", "text/plain"),
        ("", "''"),
        ("application/json" + ";" * 50_000, "'application/json;"),
    ],
)
def test_bodies_of_other_types_are_refused(start: Start, path: str, kind: str, shown: str) -> None:
    status, _, answer = start().request("POST", path, b"{}", **{"Content-Type": kind})
    message = answer["error"]["message"]
    assert status == 415 and answer["error"]["code"] == "unsupported_media_type"
    assert shown in message and "-H 'Content-Type: application/json'" in message and len(message) < 400


def test_a_compressed_body_is_refused_as_such(start: Start) -> None:
    headers = {"Content-Type": "application/json"}
    plain = ("Identity", "", " identity , identity")
    for coding, expected in (("gzip", 415), ("identity, gzip", 415), *((each, 400) for each in plain)):
        status, _, answer = start().request("POST", "/v1/completions", b"{}", **headers, **{"Content-Encoding": coding})
        assert status == expected and ("send it uncompressed" in answer["error"]["message"]) == (expected == 415)


def test_a_body_without_a_type_is_refused(start: Start) -> None:
    """A page may send a Blob without a type to anybody, with no question asked first."""
    status, _, answer = start().request("POST", "/v1/completions", b"{}", **{"Content-Type": None})
    assert status == 415 and "no Content-Type" in answer["error"]["message"]


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", 'Application/JSON;Charset="UTF-8"']
)
def test_json_is_taken(start: Start, kind: str) -> None:
    status, _, answer = start().request("POST", "/v1/completions", b"{}", **{"Content-Type": kind})
    assert status == 400 and answer["error"]["code"] != "unsupported_media_type"


@pytest.mark.parametrize(("headers", "status"), [({"Host": "evil.example"}, 403), ({"X-Long": "a" * 70_000}, 431)])
def test_refusals_before_an_endpoint_are_documented(start: Start, headers: dict[str, str], status: int) -> None:
    router = start()
    paths = router.request("GET", "/openapi.json")[2]["paths"]
    for path, item in paths.items():
        assert router.request("GET", path, **headers)[0] == status
        assert all(str(status) in operation["responses"] for operation in item.values()), path
    assert router.request("PUT", "/v1/models")[0] == 405
    assert {405, status} <= ERRORS.keys()
