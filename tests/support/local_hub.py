"""A small Hub on loopback: models whose files the hub's library downloads, and the refusals of the real one."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"


class LocalHub:
    """A hub with one model at one commit, its branch ``main``. ``url`` is for HF_ENDPOINT.

    A ``gated`` model needs ``token``: without a token, files are refused with 401, with another one with 403.
    """

    def __init__(self, model: str, files: Mapping[str, bytes], *, gated: bool = False, token: str = "") -> None:
        self.model = model
        self.files = files
        self.gated = gated
        self.token = token
        self.url = ""
        self.fetched: list[str] = []  # names of files, in the order of their downloads

    def refusal(self, path: str, authorization: str) -> tuple[int, str] | None:
        """Return status and error code of a request that is refused."""
        parts = path.removeprefix("/api/models").strip("/").split("/")
        if "/".join(parts[:2]) != self.model:
            return 404, "RepoNotFound"
        revision = parts[3] if len(parts) > 3 else "main"
        if revision not in ("main", COMMIT):
            return 404, "RevisionNotFound"
        if self.gated and parts[2:3] == ["resolve"] and authorization != f"Bearer {self.token}":
            return (403 if authorization else 401), "GatedRepo"
        if parts[2:3] == ["resolve"] and "/".join(parts[4:]) not in self.files:
            return 404, "EntryNotFound"
        return None

    def listing(self, path: str) -> object:
        """Return the JSON of a request to the API."""
        if "/tree/" in path:
            return [
                {"type": "file", "path": name, "size": len(content), "oid": sha256(content).hexdigest()[:40]}
                for name, content in self.files.items()
            ]
        siblings = [{"rfilename": name, "size": len(content)} for name, content in self.files.items()]
        return {"id": self.model, "sha": COMMIT, "siblings": siblings, "private": False, "gated": self.gated}


@contextmanager
def running(hub: LocalHub) -> Iterator[LocalHub]:
    """Serve ``hub`` on a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    thread = Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(hub: LocalHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers of the hub."""

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = unquote(self.path.partition("?")[0])
            refusal = hub.refusal(path, self.headers.get("Authorization", ""))
            if refusal is not None:
                self._send(refusal[0], b"", {"X-Error-Code": refusal[1]}, with_body=with_body)
            elif path.startswith("/api/"):
                self._send(200, json.dumps(hub.listing(path)).encode(), {}, with_body=with_body)
            else:
                name = path.split("/", 5)[5]
                content = hub.files[name]
                headers = {"ETag": f'"{sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
                hub.fetched += [name] if with_body else []
                self._send(200, content, headers, with_body=with_body)

        def _send(self, status: int, body: bytes, headers: Mapping[str, str], *, with_body: bool) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
