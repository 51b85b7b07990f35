"""A raw streaming request, and what a scripted worker was told of it. Not a test module."""

import json
import socket
import weakref

from splitserve.protocol.messages.requests import Abort
from waiting import PATIENCE_SECONDS

PROMPT = {"prompt": [50, 51, 52], "return_token_ids": True}


def aborts(worker):
    return [body for body in worker.received if isinstance(body, Abort)]


class Stream:
    """An open streaming request on a raw socket."""

    def __init__(self, router, key="none", **fields):
        body = json.dumps({"model": "tiny", "stream": True, "max_tokens": 100} | PROMPT | fields).encode()
        self.socket = socket.create_connection(router.address, timeout=PATIENCE_SECONDS)
        weakref.finalize(self, self.socket.close)
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
        self.socket.sendall(head.encode() + body)
        self.text = ""

    def read_until(self, part):
        while part not in self.text:
            self.read_more()

    def read_more(self):
        data = self.socket.recv(65536)
        assert data, f"the stream ended: {self.text}"
        self.text += data.decode()

    def error(self):
        self.read_until("[DONE]")
        lines = [line for line in self.text.splitlines() if line.startswith('data: {"error"')]
        return json.loads(lines[0].removeprefix("data: "))["error"]
