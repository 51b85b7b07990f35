"""A router and workers that answer at once, each process as in production but for the workers' engines."""

import contextlib
import json
import os
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from splitserve.benchmarks.common.children import child_process, next_line
from splitserve.benchmarks.router.requests import MODEL_ID
from splitserve.benchmarks.router.vocabulary import VOCABULARY, Language
from splitserve.protocol.config import RouterConfig
from splitserve.protocol.messages.requests import PeerRef
from splitserve.protocol.request import Role

_MODULE = "splitserve.benchmarks.router"


@dataclass(frozen=True, slots=True)
class Running:
    """A running router with its workers."""

    url: str
    router: psutil.Process
    workers: list[PeerRef]  # prefill workers first, then those that decode
    cores: set[int]  # that this process may use

    def cpu_seconds(self) -> tuple[float, float]:
        """Return the CPU time of the router's process, and that of its helpers, which render templates and tokenise."""
        helpers = self.router.children(recursive=True)
        return _cpu_seconds(self.router), sum(map(_cpu_seconds, helpers))

    def spread(self) -> None:
        """Give the router's event loop a core that load generator, workers and the router's other threads are kept off;
        on a machine with one core, nothing. Its helper processes may use all cores. To be called when the threads have
        started."""
        loop_core, *others = sorted(self.cores)
        if others:
            this, helpers = psutil.Process(), self.router.children(recursive=True)
            for process in (this, *this.children(recursive=True)):
                if process not in helpers:
                    _confine(process, others)
            os.sched_setaffinity(self.router.pid, [loop_core])  # of the main thread alone

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
    cores = os.sched_getaffinity(0)
    with contextlib.ExitStack() as stack:
        stack.callback(_confine, psutil.Process(), cores)  # as it was
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        language.write_model(folder)
        config = RouterConfig(model=str(folder), served_model_name=MODEL_ID, port=0, request_log=False, max_body_mib=16)
        config = msgspec.structs.replace(config, **settings)
        router = stack.enter_context(child_process(f"{_MODULE}.process", msgspec.json.encode(config).decode()))
        membership = json.loads(next_line(router))["endpoint"]
        url = json.loads(next_line(router))["url"]
        arguments = ["--membership", membership, "--vocab-size", str(VOCABULARY)]
        arguments += ["--first-token-seconds", str(first_token_seconds), "--max-num-seqs", str(max_num_seqs)]
        arguments += ["--max-model-len", str(max_model_len), "--token-seconds", str(token_seconds)]
        arguments += ["--step-models"] if has_step_models else []
        refs: list[PeerRef] = []
        # Workers of a role have a process of their own: in one, prefill's would wait for decode's interpreter.
        for role, number in ((Role.PREFILL, num_prefill), (Role.DECODE, num_decode), (Role.MIXED, num_mixed)):
            if number:
                own = [f"--{role}", str(number), "--peers", str(num_prefill)]
                workers = stack.enter_context(child_process(f"{_MODULE}.instant_workers", *arguments, *own))
                refs += msgspec.json.decode(next_line(workers), type=list[PeerRef])
        yield Running(url, psutil.Process(router.pid), refs, cores)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _confine(process: psutil.Process, cores: Collection[int]) -> None:
    """Let the present threads of a process, and the threads and processes that these start, run on these cores only."""
    for thread in process.threads():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread.id, cores)
