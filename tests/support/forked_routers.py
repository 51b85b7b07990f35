"""Router processes of tests, forked from one that has imported the router's modules. Not a test module.

A process that is started imports them anew, which takes most of a second of CPU time.
"""

import json
import os
import sys
import threading
from pathlib import Path

import msgspec

from splitserve.common.errors import SplitserveError
from splitserve.common.logs import set_up_logging
from splitserve.orchestration.hosts.fork_server import ForkOrder, ForkServer, serve
from splitserve.orchestration.hosts.forking import ForkedProcess, ForkError, ForkServerLink, key_of
from splitserve.protocol.config import RouterConfig

SUPPORT = Path(__file__).parent
LEVEL_VARIABLE = "TEST_ROUTER_LOG_LEVEL"


class RouterServer(ForkServer):
    """Fork server of routers, each with its config on standard input and its progress on standard output."""

    @staticmethod
    def _run_child(status_fd: int) -> int:
        from splitserve.router.server import run_router

        os.close(status_fd)
        set_up_logging("router", os.environ.get(LEVEL_VARIABLE, "warning"))
        try:
            run_router(msgspec.json.decode(sys.stdin.read(), type=RouterConfig), tell)
        except SplitserveError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 1
        tell("ended", {"torch": str("torch" in sys.modules)})
        return 0


def tell(event: str, fields: dict[str, str]) -> None:
    print(json.dumps([event, fields]), flush=True)


class ForkedRouter:
    """Forked router, with what :class:`RouterProcess` needs of :class:`subprocess.Popen`."""

    def __init__(self, config: RouterConfig) -> None:
        (stdin, ours), (out, stdout), (errors, stderr) = os.pipe(), os.pipe(), os.pipe()
        os.write(ours, msgspec.json.encode(config))
        os.close(ours)
        theirs = (stdin, stdout, stderr)
        try:
            self._process = _fork((*theirs, stdin))
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(errors)
        self._output = self._log = ""
        self._reader = threading.Thread(target=self._read, daemon=True)  # or a long log would block the router
        self._reader.start()

    def _read(self) -> None:
        self._log = self.stderr.read()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        ended = self._process.ended
        return ended.result() if ended.done() else None

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; what it printed since, and its log. Closes the pipes."""
        self._process.ended.result(timeout)
        if not self.stdout.closed:
            self._output = self.stdout.read()
            self._reader.join(timeout)
            self.stdout.close()
            self.stderr.close()
        return self._output, self._log


_servers: dict[object, ForkServerLink] = {}


def _fork(descriptors: tuple[int, ...]) -> ForkedProcess:
    order = ForkOrder(dict(os.environ), str(Path.cwd()))
    try:
        return _server().fork(order, descriptors)
    except ForkError:  # it may have ended just now, since it was idle
        return _server().fork(order, descriptors)


def _server() -> ForkServerLink:
    key = key_of(os.environ)
    server = _servers.get(key)
    if server is None or not server.is_running():
        path = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH", ""))))
        server = _servers[key] = ForkServerLink(
            {**os.environ, "PYTHONPATH": path}, "splitserve.router.server", "forked_routers"
        )
    return server


if __name__ == "__main__":
    serve(sys.argv[2], RouterServer)
