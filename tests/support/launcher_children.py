"""Small entries for the launcher's tests: real processes, without a model. Not a test module.

``SPLITSERVE_TEST_BEHAVIOUR`` steers them, like ``decode-0=refuse prefill-0=crash``. With a path in
``SPLITSERVE_TEST_LOADED``, workers create that file once they have loaded, and the router waits for it.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from splitserve.common.errors import CheckpointError, ConfigError
from splitserve.protocol.config import RouterConfig, WorkerConfig

Progress = Callable[[str, dict[str, str]], None]


def behaviour_of(name: str) -> str:
    pairs = (item.split("=") for item in os.environ.get("SPLITSERVE_TEST_BEHAVIOUR", "").split())
    return dict(pairs).get(name, "")


def stopped_by_signals() -> list[int]:
    """Return a list to which SIGTERM and SIGINT are added. For before the first word to the parent, who may answer with
    one."""
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: received.append(number))
    return received


def wait_for(received: list[int]) -> None:
    """Wait for a signal, in short turns: one that comes just before a call that blocks is handled after that."""
    while not received:
        time.sleep(0.02)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(503 if behaviour_of("router") == "never-ready" else 200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_args: object) -> None:
        pass


def run_router(config: RouterConfig, progress: Progress) -> None:
    stop = stopped_by_signals()
    while (loaded := os.environ.get("SPLITSERVE_TEST_LOADED")) and not Path(loaded).exists():
        time.sleep(0.01)
        if stop:
            return
    if behaviour_of("router") == "refuse":
        raise ConfigError("tokenizer.json is missing: take a complete checkpoint")
    server = HTTPServer((config.host, config.port), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    progress("secret", {"secret": config.secret})
    progress("membership", {"endpoint": f"tcp://{config.membership_host}:{config.membership_port}"})
    progress("listening", {"url": f"http://{config.host}:{server.server_port}"})
    wait_for(stop)
    server.shutdown()
    server.server_close()


def run_worker(config: WorkerConfig, progress: Progress) -> None:
    match behaviour_of(config.engine_id):
        case "refuse":
            raise CheckpointError("model.norm.weight is missing: take a complete checkpoint")
        case "bug":
            raise ZeroDivisionError("nobody foresaw this")
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case "half-a-line":  # as when it is killed while it writes
            os.write(progress.__self__._file.fileno(), b'{"stage": "err')  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)
        case "slow":
            time.sleep(60)
        case "awaits-file":
            while not Path(os.environ["SPLITSERVE_TEST_AWAITED"]).exists():
                time.sleep(0.02)
        case "stubborn":
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            progress("ready", {})
            time.sleep(600)
    stop = stopped_by_signals()
    progress("secret", {"secret": config.secret})
    progress("weights", {"seconds": "0.1", "bytes": "1024"})
    if loaded := os.environ.get("SPLITSERVE_TEST_LOADED"):
        Path(loaded).touch()
    environment = {name: value for name, value in os.environ.items() if name.endswith("_NUM_THREADS")}
    progress("environment", {"variables": json.dumps(environment), "membership": config.membership})
    progress("ready", {"endpoint": "tcp://127.0.0.1:2", "threads": str(config.engine.threads)})
    wait_for(stop)
