"""Commands that need the administrator's key, against an endpoint that records what it is asked."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from splitserve.orchestration.cli.load import load_of
from splitserve.orchestration.cli.main import main

STILL = {"paused": True, "mode": "keep", "settled": True, "requests_running": 6, "requests_waiting": 2}


class Endpoint:
    """Endpoint with one answer to everything. It records the keys of the requests."""

    def __init__(self) -> None:
        self.answer: Any = {}
        self.keys: list[str] = []
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.keys.append(self.headers.get("Authorization", ""))
                body = json.dumps(owner.answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

            def log_message(self, *_arguments: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    found = Endpoint()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({}, [], "paused (keep): 6 requests are frozen, 2 wait"),
        ({"settled": False}, ["--no-wait"], "paused (keep): 6 requests are being frozen, 2 wait"),
        ({"mode": "wait"}, [], "paused (wait): 6 requests run, 2 wait"),
    ],
)
def test_a_pause_says_whether_requests_are_frozen(
    endpoint: Endpoint,
    changes: dict[str, Any],
    options: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    endpoint.answer = STILL | changes
    mode = ["--mode", endpoint.answer["mode"]]
    assert main(["pause", *mode, *options, "--against", endpoint.url]) == 0
    assert capsys.readouterr().out == f"{words}\n"


def test_the_load_is_read_with_the_key_of_a_file(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITSERVE_ADMIN_KEY", "of-the-environment-0123456789")
    key = tmp_path / "key"
    key.write_text("of-the-file-0123456789\n")
    load_of(endpoint.url)
    load_of(endpoint.url, str(key))
    assert endpoint.keys == ["Bearer of-the-environment-0123456789", "Bearer of-the-file-0123456789"]


@pytest.mark.parametrize(
    "command",
    [
        ["trace", "id"],
        ["pause"],
        ["resume"],
        ["reset-prefix-cache"],
        ["profile"],
        ["doctor", "--no-probe"],
    ],
    ids=lambda command: command[0],
)
@pytest.mark.parametrize("answer", [{"hello": 1}, [], {"paused": 1, "workers": [2], "reset": "x", "traces": {}}])
def test_an_answer_that_is_not_splitserves_is_named(
    endpoint: Endpoint, command: list[str], answer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.answer = answer
    assert main([*command, "--against", endpoint.url]) == 2
    assert f"{endpoint.url} answers in a form that this version" in capsys.readouterr().err


def test_what_was_reset_and_recorded_is_printed(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint.answer = {"reset": ["prefill-0"], "pending": ["decode-0"]}
    assert main(["reset-prefix-cache", "--against", endpoint.url]) == 0
    words = "reset: prefill-0\nnot confirmed yet: decode-0; they reset before their next request\n"
    assert capsys.readouterr().out == words
    endpoint.answer = {"workers": {"a": {"trace": "/t.json", "steps": 3}, "b": {"error": "no report came"}}}
    assert main(["profile", "--against", endpoint.url]) == 0
    assert capsys.readouterr().out == "a: /t.json\nb: no report came\n"
    endpoint.answer = STILL | {"paused": False, "mode": None}
    assert main(["resume", "--against", endpoint.url]) == 0
    assert capsys.readouterr().out == "not paused: 6 requests run, 2 wait\n"


@pytest.mark.parametrize("url", ["http://[::1", "http://\u2100.com", "ftp://host", "http://"])
def test_an_address_that_is_none_is_named(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pause", "--against", url]) == 2
    assert f"{url!r} is no URL of an endpoint; write it like http://127.0.0.1:8000" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "top", "trace", "pause", "resume", "simulate", "calibrate"])
def test_commands_say_that_they_need_the_admin_key(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--api-key-file FILE" in shown
    assert "the endpoint's admin key, or with its API key if it has no admin key" in shown
