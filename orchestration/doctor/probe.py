"""The probe: one prompt sent twice through the real path, to see its route, its hand-over, and its prefix hit.

The expected result follows from the report of the cluster: with prefill and decode workers the prompt's KV moves,
except blocks that the decode worker holds already. A new prompt can only be found by its second request, and only by a
decode worker that had it the first time.
"""

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from splitserve.common.errors import SplitserveError
from splitserve.orchestration.doctor.http import Endpoint
from splitserve.orchestration.doctor.machine import TorchFacts, ask_torch
from splitserve.orchestration.doctor.report import Check, Problem, check, skipped
from splitserve.orchestration.spec.sizes import format_bytes
from splitserve.protocol.cluster_report import ClusterReport, WorkerState
from splitserve.protocol.request import Role

NUM_BLOCKS = 32
MAX_PROMPT_TOKENS = 2048
MAX_TOKENS = 4
TIMEOUT_SECONDS = 120.0
MIN_BYTES_TO_JUDGE = 8 << 20
MIN_SHARE_OF_COPY = 0.05
"""Least acceptable speed of a hand-over, as a share of a plain copy's. Below :data:`MIN_BYTES_TO_JUDGE` a hand-over is
mostly messages and isn't judged."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of the probe's prompt, which ends in a partial block."""

    num_tokens: int
    block_size: int
    vocab_size: int
    windows: tuple[int, ...] = ()  # of the cache's window groups

    @property
    def num_full_blocks(self) -> int:
        return self.num_tokens // self.block_size

    @property
    def num_blocks(self) -> int:
        """KV blocks of the prompt in all groups of the cache; of a window group, those that the next token attends to
        (the engine's ``TableRule``)."""
        num_blocks = self.num_full_blocks + 1
        firsts = [max(0, self.num_tokens - window + 1) // self.block_size for window in self.windows]
        return num_blocks + sum(num_blocks - first for first in firsts)


@dataclass
class Probe:
    """Outcome of the probe's requests."""

    shape: Shape
    # The endpoint's account of each request that was answered.
    routes: list[dict[str, Any]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # total time of each request
    error: str = ""

    @property
    def handover(self) -> dict[str, Any] | None:
        return self.routes[0].get("handover") if self.routes else None


def probe_shape(report: ClusterReport) -> Shape | None:
    """Choose a prompt for which every worker has room; None if there is none."""
    infos = [worker.info for worker in report.workers if worker.state is WorkerState.READY]
    if not infos:
        return None
    block_size = infos[0].layout.block_size
    room = min(min(info.max_model_len, info.num_blocks * block_size) for info in infos) // 2 - MAX_TOKENS
    num_blocks = min(NUM_BLOCKS, min(room, MAX_PROMPT_TOKENS) // block_size - 1)
    if num_blocks < 1:
        return None
    windows = tuple(group.window for group in infos[0].layout.cache.groups if group.window)
    return Shape(num_blocks * block_size + block_size // 2, block_size, infos[0].vocab_size, windows)


def send_probe(endpoint: Endpoint, model: str, shape: Shape, num_decode: int) -> Probe:
    """Send the same prompt until a decode worker has had it twice; an idle cluster's workers take turns."""
    probe = Probe(shape)
    chooser = secrets.SystemRandom()
    prompt = [chooser.randrange(shape.vocab_size) for _ in range(shape.num_tokens)]
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_route": True,
    }
    for _ in range(num_decode + 1):
        started = time.perf_counter()
        try:
            answer = endpoint.post("/v1/completions", body, TIMEOUT_SECONDS, {"X-Route": "disaggregated"})
        except SplitserveError as error:
            probe.error = str(error)
            return probe
        if answer.status != HTTPStatus.OK:
            probe.error = f"POST /v1/completions gave {answer.status}: {answer.words()}"
            return probe
        probe.seconds.append(time.perf_counter() - started)
        before = [route["decode"] for route in probe.routes]
        probe.routes.append(answer.json()["splitserve"])
        if probe.routes[-1]["decode"] in before:
            return probe
    return probe


def look_by_probe(endpoint: Endpoint, report: ClusterReport, machine: str) -> tuple[list[Check], dict[str, Any] | None]:
    """Send a probe and return its checks and its result as JSON. ``machine``: name of this machine; if the workers run
    here too, a plain copy is timed for comparison."""
    shape = probe_shape(report)
    if shape is None:
        return [skipped("probe", "no worker is ready for a prompt of some blocks")], None
    decodes = [worker for worker in report.workers if worker.info.role is not Role.PREFILL]
    probe = send_probe(endpoint, report.served_model_name, shape, len(decodes))
    copy: TorchFacts | None = None
    if probe.handover and {worker.info.setup.machine for worker in report.workers} == {machine}:
        facts = ask_torch(int(probe.handover["bytes"]))
        copy = facts if isinstance(facts, TorchFacts) else None
    return list(probe_checks(report, probe, copy)), as_json(report, probe, copy)


# ---- checks of its outcome; pure from here ----


def probe_checks(report: ClusterReport, probe: Probe, copy: TorchFacts | None) -> Iterator[Check]:
    if probe.error:
        advice = "see `splitserve status`, `splitserve logs` of the workers, and the findings above"
        yield check("probe", "", [Problem("probe_failed", probe.error, advice)])
        return
    yield check("probe", _describe_path(probe), _path_problems(report, probe))
    if probe.handover is not None:
        yield check("hand-over", _describe_handover(probe, copy), _handover_problems(probe, copy))
    yield _check_prefix(report, probe)


def _describe_path(probe: Probe) -> str:
    route = probe.routes[0]
    where = f"prefilled on {route['prefill']}, decoded on {route['decode']}"
    if route["mode"] == "local":
        where = f"both phases on {route['decode']}"
    return f"{probe.shape.num_tokens} prompt tokens, {where}; {probe.seconds[0]:.2f} s"


def _path_problems(report: ClusterReport, probe: Probe) -> Iterator[Problem]:
    route = probe.routes[0]
    roles = {worker.info.role for worker in report.workers if worker.state is WorkerState.READY}
    if {Role.PREFILL, Role.DECODE} <= roles and Role.MIXED not in roles and not probe.handover:
        failed = "; ".join(f"{each['worker']}: {each['reason']}" for each in route["failed_attempts"])
        yield Problem(
            "not_disaggregated",
            f"there are prefill and decode workers, but the KV of the probe didn't move ({failed or route['mode']})",
            "see the findings above; splitserve_ladder_steps_total of /metrics counts what failed, by reason",
        )
    elif route["failed_attempts"]:
        failed = ", ".join(f"{each['worker']} ({each['reason']})" for each in route["failed_attempts"])
        yield Problem(
            "failed_attempts",
            f"the probe was answered after {route['attempts']} attempts; failed: {failed}",
            "look at the logs of those workers",
        )


def _describe_handover(probe: Probe, copy: TorchFacts | None) -> str:
    handover = probe.handover
    assert handover is not None
    speed = bytes_per_second(handover)
    text = (
        f"{handover['blocks']} blocks, {format_bytes(handover['bytes'])} by {handover['transport']} in "
        f"{1e3 * float(handover['read_seconds']):.2f} ms ({handover['reads']} reads): {speed / 1e9:.2f} GB/s"
    )
    if copy is not None and copy.copy_bytes_per_second:
        rate = copy.copy_bytes_per_second
        text += f", {speed / rate:.0%} of a plain copy within {copy.copied} ({rate / 1e9:.2f} GB/s)"
    latency = probe.routes[0].get("handover_seconds")
    if latency is not None:
        text += f"; first token to decode ready {1e3 * latency:.2f} ms"
    return text


def _handover_problems(probe: Probe, copy: TorchFacts | None) -> Iterator[Problem]:
    handover = probe.handover
    assert handover is not None
    expected = probe.shape.num_blocks
    if handover["blocks"] != expected:
        yield Problem(
            "blocks",
            f"{handover['blocks']} KV blocks moved; a prompt of {probe.shape.num_tokens} tokens that was never sent "
            f"before has {expected}",
            "this is a bug: keep the logs and report it",
        )
    share = bytes_per_second(handover) / copy.copy_bytes_per_second if copy and copy.copy_bytes_per_second else 1.0
    if handover["bytes"] >= MIN_BYTES_TO_JUDGE and share < MIN_SHARE_OF_COPY:
        yield Problem(
            "slow_handover",
            f"KV moves at {share:.1%} of a plain copy's speed",
            "see the finding about transports, and check which other programs use these cores and this network; "
            "`splitserve bench handover` measures it by size",
        )


def bytes_per_second(handover: dict[str, Any]) -> float:
    """Return the rate while reads were in flight."""
    return float(handover["bytes"]) / max(float(handover["read_seconds"] or handover["seconds"]), 1e-9)


def _check_prefix(report: ClusterReport, probe: Probe) -> Check:
    prediction = predicted_prefix(report, probe)
    if prediction is None:
        return skipped("prefix", "no worker had the prompt twice")
    predicted, found = prediction
    problems = []
    if found != predicted:
        problems.append(
            Problem(
                "prefix_miss",
                f"the prompt was sent twice, and the KV of {found} of its tokens was found the second time, not of "
                f"{predicted}",
                "more KV memory (--kv-memory) keeps prefixes longer, if other prompts have evicted it; "
                "is --enable-prefix-caching the same on all workers?",
            )
        )
    return check("prefix", f"{found} of {probe.shape.num_tokens} tokens found again, as predicted", problems)


def predicted_prefix(report: ClusterReport, probe: Probe) -> tuple[int, int] | None:
    """Return how many of the last request's tokens its decode worker should have found, and how many it did; None if
    that worker got the prompt for the first time."""
    *earlier, last = probe.routes
    if last["decode"] not in [route["decode"] for route in earlier]:
        return None
    worker = next((each for each in report.workers if each.info.party.engine_id == last["decode"]), None)
    caches = worker is None or worker.info.prefix_caching
    predicted = probe.shape.num_full_blocks * probe.shape.block_size if caches else 0
    handover = last.get("handover")
    return predicted, int(handover["cached_tokens"] if handover else last["cached_tokens"])


def as_json(report: ClusterReport, probe: Probe, copy: TorchFacts | None) -> dict[str, Any]:
    """Return the result as JSON. ``transport`` and ``blocks`` are None and 0 if no hand-over was needed."""
    handover = probe.handover or {}
    prediction = predicted_prefix(report, probe) if probe.routes and not probe.error else None
    route = probe.routes[0] if probe.routes else {}
    rate = copy.copy_bytes_per_second if copy is not None else None
    speed = bytes_per_second(handover) if handover else None
    return {
        "error": probe.error or None,
        "mode": route.get("mode"),
        "prefill": route.get("prefill"),
        "decode": route.get("decode"),
        "prompt_tokens": probe.shape.num_tokens,
        "transport": handover.get("transport"),
        "blocks": handover.get("blocks", 0),
        "bytes": handover.get("bytes", 0),
        "seconds": handover.get("seconds"),
        "read_seconds": handover.get("read_seconds"),
        "bytes_per_second": speed,
        "copy_bytes_per_second": rate,
        "share_of_copy": speed / rate if speed and rate else None,
        "handover_seconds": route.get("handover_seconds"),
        "exposed_seconds": handover.get("exposed_seconds"),
        "prefix": None if prediction is None else {"predicted_tokens": prediction[0], "found_tokens": prediction[1]},
    }
