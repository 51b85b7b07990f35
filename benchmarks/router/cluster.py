"""A router and workers that answer at once, each process as in production but for the workers' engines."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from splitserve.benchmarks.common.children import child_process, next_line
from splitserve.benchmarks.router.requests import MODEL_ID
from splitserve.benchmarks.router.vocabulary import VOCABULARY, Language
from splitserve.protocol.config import RouterConfig
from splitserve.protocol.messages.requests import PeerRef

_MODULE = "splitserve.benchmarks.router"


@dataclass(frozen=True, slots=True)
class Running:
    """A running router with its workers."""

    url: str
    router: psutil.Process
    workers: list[PeerRef]  # prefill workers first, then those that decode

    def cpu_seconds(self) -> tuple[float, float]:
        """Return the CPU time of the router's process, and that of its helpers, which render templates and tokenise."""
        helpers = self.router.children(recursive=True)
        return _cpu_seconds(self.router), sum(map(_cpu_seconds, helpers))

    def memory_mib(self) -> float:
        """Return the resident memory of the router's process."""
        return float(self.router.memory_info().rss) / 2**20


@contextlib.contextmanager
def running(
    language: Language,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    max_model_len: int = 4096,
    num_mixed: int = 0,
    token_seconds: float = 0.0,
    first_token_seconds: float = 0.0,
    max_num_seqs: int = 1024,
    has_step_models: bool = False,
    **settings: object,
) -> Iterator[Running]:
    """Start the processes; ``settings`` are further ones of the router. All end with the context."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        language.write_model(folder)
        config = RouterConfig(model=str(folder), served_model_name=MODEL_ID, port=0, request_log=False, max_body_mib=16)
        config = msgspec.structs.replace(config, **settings)
        router = stack.enter_context(child_process(f"{_MODULE}.process", msgspec.json.encode(config).decode()))
        membership = json.loads(next_line(router))["endpoint"]
        url = json.loads(next_line(router))["url"]
        arguments = ["--membership", membership, "--vocab-size", str(VOCABULARY)]
        arguments += ["--prefill", str(num_prefill), "--decode", str(num_decode)]
        arguments += ["--mixed", str(num_mixed), "--first-token-seconds", str(first_token_seconds)]
        arguments += ["--max-num-seqs", str(max_num_seqs)]
        arguments += ["--max-model-len", str(max_model_len), "--token-seconds", str(token_seconds)]
        arguments += ["--step-models"] if has_step_models else []
        workers = stack.enter_context(child_process(f"{_MODULE}.instant_workers", *arguments))
        refs = msgspec.json.decode(next_line(workers), type=list[PeerRef])
        yield Running(url, psutil.Process(router.pid), refs)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
