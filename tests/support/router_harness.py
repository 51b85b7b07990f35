"""Parts of the router's tests: a small tokenizer on disk, a router process, scripted workers in threads."""

import http.client
import json
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from forked_routers import ForkedRouter
from splitserve.benchmarks.router.instant_worker import InstantWorker, WorkerOptions
from splitserve.benchmarks.router.worker_script import Script, default_script
from splitserve.protocol.config import RouterConfig
from splitserve.protocol.request import Role
from waiting import PATIENCE_SECONDS, wait_until

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.content == 'refuse' %}{{ raise_exception('refused by template') }}{%- endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
TRAINING_TEXT = [
    "The quick brown fox jumps over the lazy dog. Prefill and decode run on separate workers.",
    "Ein schöner Tag für Käse, naïve façade; 東京は日本の首都です。 😀🎉 Привет, мир!",
]
EOS = "<|im_end|>"


def write_model_dir(path: Path) -> Tokenizer:
    """The tokenizer files of a model directory: byte-level BPE, a chat template, an end token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"chat_template": CHAT_TEMPLATE, "eos_token": EOS, "bos_token": None}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.token_to_id(EOS)]}))
    return tokenizer


class RouterProcess:
    """A router in a process of its own; ``url`` and ``membership`` are where it listens."""

    def __init__(self, model_dir: Path, **settings: Any) -> None:
        settings.setdefault("port", 0)
        config = RouterConfig(model=str(model_dir), served_model_name="tiny", **settings)
        self.process = ForkedRouter(config)
        try:
            self.membership = self._event("membership")["endpoint"]
            self.url = self._event("listening")["url"]
        except BaseException:  # nobody has it yet who would stop it
            self.process.kill()
            raise

    def _event(self, name: str) -> dict[str, str]:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(self.process.communicate(PATIENCE_SECONDS)[1])
        event, fields = json.loads(line)
        assert event == name
        return fields

    def request(
        self, method: str, path: str, body: Any = None, **headers: str | None
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers and decoded JSON (text, where it is none) of one request on a connection of its own. A body
        is sent as JSON, unless ``headers`` say otherwise; None leaves one out."""
        connection = http.client.HTTPConnection(*self.address, timeout=PATIENCE_SECONDS)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            kind = {} if body is None else {"Content-Type": "application/json"}
            given = {name: value for name, value in (kind | headers).items() if value is not None}
            connection.request(method, path, data, given)
            response = connection.getresponse()
            text = response.read()
            found = {name.lower(): value for name, value in response.getheaders()}
            is_json = found.get("content-type") == "application/json"
            return response.status, found, json.loads(text) if is_json else text.decode()
        finally:
            connection.close()

    def post(self, path: str, **fields: Any) -> tuple[int, dict[str, str], Any]:
        return self.request("POST", path, {"model": "tiny"} | fields)

    def metric(self, name: str) -> float:
        """One sample of /metrics, by its name with labels but ``model``; 0 when it isn't there yet."""
        text = re.sub(r'(?<=[{,])model="[^"]*",?', "", self.request("GET", "/metrics")[2])
        for line in text.replace(",}", "}").replace("{}", "").splitlines():
            if line.startswith(name + " "):
                return float(line.rsplit(" ", 1)[1])
        return 0.0

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Exit status, what it printed after it listened, and its log."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            out, err = self.process.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        status = self.process.returncode
        assert status is not None
        return status, out, err


class Workers:
    """Scripted workers in threads of this process."""

    def __init__(self, membership: str) -> None:
        self._membership = membership
        self._running: dict[InstantWorker, threading.Thread] = {}

    def start(
        self, engine_id: str, role: Role, script: Script | None = None, *, wait: bool = True, **options: Any
    ) -> InstantWorker:
        worker = options.pop("kind", InstantWorker)(
            self._membership,
            script or default_script(),
            WorkerOptions(engine_id=engine_id, role=role, vocab_size=options.pop("vocab_size", 400), **options),
        )
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        self._running[worker] = thread
        if wait:
            assert worker.registered.wait(PATIENCE_SECONDS), f"{engine_id} wasn't registered"
        return worker

    def stop(self, worker: InstantWorker, leave: bool = True) -> None:
        worker.stop(leave)
        self._running.pop(worker).join(PATIENCE_SECONDS)

    def close(self) -> None:
        for worker in list(self._running):
            self.stop(worker)


@contextmanager
def served_router(model_dir: Path, **settings: Any) -> Iterator[tuple[RouterProcess, Workers]]:
    """A router with settings, and its workers, none at first; both end with the block. Its log must hold no bug."""
    router = RouterProcess(model_dir, **settings)
    workers = Workers(router.membership)
    try:
        yield router, workers
    finally:
        workers.close()
        _, _, log = router.stop()
        assert "Traceback" not in log, log


def ready(router: RouterProcess) -> None:
    """Wait until the router has workers that can serve."""
    wait_until(lambda: router.request("GET", "/ready")[0] == 200)
