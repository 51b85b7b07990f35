"""The dashboard before an overview that a test gives. Not a test module."""

import http.server
import threading
from typing import ClassVar

import msgspec

from splitserve.protocol.reports.overview import Overview
from splitserve.router.admin.diagnosis.diagnose import diagnose
from splitserve.router.admin.overview.dashboard import page


class PageServer:
    """Serves the page as the router does, and ``view`` as its overview; None: 500."""

    def __init__(self, view: Overview | None) -> None:
        self.view = view
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version: ClassVar[str] = "HTTP/1.1"

            def do_GET(self) -> None:
                body, headers = page()
                kind, status = "text/html; charset=utf-8", 200
                if self.path == "/admin/overview":
                    body, headers, kind = owner.answer(), {}, "application/json"
                    status = 200 if owner.view is not None else 500
                self.send_response(status)
                for name, value in {**headers, "content-type": kind, "content-length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_arguments: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/dashboard"

    def answer(self) -> bytes:
        if self.view is None:
            return b"{}"
        return msgspec.json.encode(msgspec.structs.replace(self.view, diagnosis=diagnose(self.view)))

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
