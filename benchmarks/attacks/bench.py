"""Attacks on a router over HTTP, each beside a canary: an ordinary stream, whose longest gap between tokens is shown.

    canary   --HTTP--> router --ZMQ--> instant worker, a token every few milliseconds
    attacker --HTTP--> the same router

Each is a process of its own. The router has few file descriptors, as in a container with a low limit. Results of each
attack: the outcomes of its connections, the canary's longest gap, the router's peak memory and its CPU time.
"""

import argparse
import contextlib
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from splitserve.benchmarks.attacks.canary import Canary
from splitserve.benchmarks.attacks.http import ATTACKS, CONNECTION_ATTACKS, Address, newcomer
from splitserve.benchmarks.common.arguments import positive, positive_seconds
from splitserve.benchmarks.common.children import child_process, next_line, write_router_model
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.benchmarks.router.stages import MODEL_ID
from splitserve.common.errors import ConfigError
from splitserve.protocol.config import HttpLimits, RouterConfig

_READY_SECONDS = 30
_MIN_DESCRIPTORS = 64
_MAX_MODEL_LEN = 20_000
_TOKEN_SECONDS = 0.005
_MAX_SECONDS = 75  # the canary reads for a while before the attack, and the attacker needs time to start
_MAX_GAP_MS = 100.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the attacks that ``argv`` names; exit status 1 if one of them blocked the canary for too long."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    if options.seconds > _MAX_SECONDS:
        raise ConfigError(f"--seconds is {options.seconds:g}, but the canary's stream lasts at most {_MAX_SECONDS}")
    if not _MIN_DESCRIPTORS <= options.descriptors <= resource.getrlimit(resource.RLIMIT_NOFILE)[1]:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        raise ConfigError(f"--descriptors is {options.descriptors}; it must be {_MIN_DESCRIPTORS} to {most} here")
    rows = []
    for name in ("nothing", *options.attack):
        with attacked_router(options.descriptors) as (address, pids):
            rows.append(run_attack(name, address, pids, options.seconds))
    headers = ["attack", "seconds", "outcomes", "longest gap ms", "without waits for a core", "peak MiB", "grew MiB"]
    headers.append("CPU s")
    print(table([_cells(row) for row in rows], headers))
    keep_result("attacks", arguments, {"results": rows}, options)
    return 1 if any(row["longest_gap_ms"] > _MAX_GAP_MS for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="splitserve bench attacks", description=__doc__)
    parser.add_argument("--attack", nargs="+", choices=list(ATTACKS), default=list(CONNECTION_ATTACKS), metavar="NAME")
    parser.add_argument("--descriptors", type=positive, default=260, help="the router's limit of file descriptors")
    parser.add_argument("--seconds", type=positive_seconds, default=25.0, help="duration of an attack at most")
    add_result_options(parser)
    return parser


def _cells(row: dict[str, Any]) -> list[object]:
    outcomes = ", ".join(f"{how} ({count})" for how, count in row["outcomes"].items())
    figures = ("longest_gap_ms", "longest_stop_ms", "peak_mib", "grew_mib", "cpu_seconds")
    return [row["attack"], row["seconds"], outcomes, *(row[name] for name in figures)]


def run_attack(name: str, address: Address, pids: tuple[int, int], seconds: float) -> dict[str, Any]:
    """Run one attack ("nothing": none) on the router that is the first of these processes, beside a canary; the second
    is its worker."""
    pid = pids[0]
    router = psutil.Process(pid)
    canary = Canary(address, MODEL_ID, _MAX_MODEL_LEN - 10, pids)
    canary.start()
    canary.warmed_up.wait(_READY_SECONDS)
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak
    resident, cpu = router.memory_info().rss, sum(router.cpu_times()[:2])
    canary.reset()
    start = time.monotonic()
    outcomes = _outcomes(name, address, seconds)
    taken = time.monotonic() - start
    canary.close()
    peak = _peak_bytes(pid)
    return {
        "attack": name,
        "seconds": round(taken, 2),
        "outcomes": outcomes,
        "longest_gap_ms": round(1e3 * canary.longest_gap_seconds, 1),
        "longest_stop_ms": round(1e3 * canary.longest_stop_seconds, 1),
        "peak_mib": round(peak / 2**20, 1),
        "grew_mib": round((peak - resident) / 2**20, 1),
        "cpu_seconds": round(sum(router.cpu_times()[:2]) - cpu, 2),
    }


def _outcomes(name: str, address: Address, seconds: float) -> dict[str, int]:
    if name == "nothing":
        time.sleep(seconds)
        return {}
    host, port = address
    with child_process("splitserve.benchmarks.attacks.http", name, host, str(port), str(seconds)) as attacker:
        result: dict[str, int] = json.loads(next_line(attacker))
        return result


@contextlib.contextmanager
def attacked_router(
    num_descriptors: int, limits: HttpLimits | None = None
) -> Iterator[tuple[Address, tuple[int, int]]]:
    """Start a router with so many file descriptors, and a paced worker; yields the router's address, and the process
    ids of both."""
    worker_options = ["--tokens-per-message", "1", "--token-seconds", str(_TOKEN_SECONDS)]
    worker_options += ["--max-model-len", str(_MAX_MODEL_LEN)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        vocab_size = write_router_model(folder)
        config = RouterConfig(model=str(folder), served_model_name=MODEL_ID, port=0, http=limits or HttpLimits())
        command = ["splitserve.benchmarks.router.process", msgspec.json.encode(config).decode()]
        router = stack.enter_context(child_process(*command))
        resource.prlimit(router.pid, resource.RLIMIT_NOFILE, (num_descriptors, num_descriptors))
        membership = json.loads(next_line(router))["endpoint"]
        host, port = json.loads(next_line(router))["url"].removeprefix("http://").split(":")
        address = (host, int(port))
        starting = child_process(
            "splitserve.benchmarks.router.instant_worker",
            "--membership",
            membership,
            *worker_options,
            "--vocab-size",
            str(vocab_size),
        )
        worker = stack.enter_context(starting)
        next_line(worker)
        _wait_ready(address)
        yield address, (router.pid, worker.pid)


def _wait_ready(address: Address) -> None:
    end = time.monotonic() + _READY_SECONDS
    while newcomer(address, "/ready") != "200":
        if time.monotonic() > end:
            raise ConfigError(f"the worker wasn't ready after {_READY_SECONDS} s")
        time.sleep(0.05)


def _peak_bytes(pid: int) -> int:
    """Return the peak resident memory since the reset."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


if __name__ == "__main__":
    sys.exit(main())
