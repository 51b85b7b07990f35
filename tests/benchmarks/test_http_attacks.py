"""Hostile HTTP clients beside a stream: how they end, what they cost, and that the stream goes on."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from splitserve.benchmarks.attacks.bench import attacked_router, run_attack
from splitserve.benchmarks.attacks.canary import Canary
from splitserve.benchmarks.attacks.http import ATTACKS, Address
from splitserve.benchmarks.router.stages import MODEL_ID
from splitserve.protocol.config import HttpLimits
from stopping import stop_process
from waiting import PATIENCE_SECONDS, wait_until

LIMITS = HttpLimits(header_seconds=2.0, keep_alive_seconds=3)
ATTACK_SECONDS = 20.0  # at most: the router ends them sooner
NUM_TRIES = 3
MAX_STOP_MS = 100.0
MAX_GROWTH_MIB = 64.0
OUTCOMES = {
    "one header of 100 MB": {"431"},
    "200 MB of short headers": {"431"},
    "a URL of 100 MB": {"431"},
    "200 MB of short trailers": {"431"},
    "one trailer of 100 MB": {"431"},
    "a chunk extension of 100 MB": {"431"},
    "100 MB of blank lines": {"431"},
    "400 half-open requests": {"newcomer 200", "408", "closed"},
    "400 silent connections": {"newcomer 200", "closed"},
    "50 slow headers": {"408"},
    "20 times 10,000 pipelined requests": {"200", "closed"},
}


@pytest.fixture(scope="module")
def target() -> Iterator[tuple[Address, tuple[int, int]]]:
    with attacked_router(num_descriptors=260, limits=LIMITS) as found:
        yield found


def test_a_router_that_stands_still_is_seen(target: tuple[Address, tuple[int, int]]) -> None:
    address, pids = target
    canary = Canary(address, MODEL_ID, 2000, pids)
    canary.start()
    assert canary.warmed_up.wait(PATIENCE_SECONDS)
    try:
        canary.reset()
        try:
            stop_process(pids[0])
            time.sleep(0.3)
        finally:
            os.kill(pids[0], signal.SIGCONT)
        wait_until(lambda: canary.longest_stop_seconds > 0.2, "the stop is seen")
    finally:
        canary.close()


def test_every_attack_has_a_name_and_an_end() -> None:
    assert set(OUTCOMES) <= set(ATTACKS)


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_stream_goes_on_beside(name: str, target: tuple[Address, tuple[int, int]]) -> None:
    rows: list[dict[str, Any]] = []
    for _ in range(NUM_TRIES):
        rows.append(run_attack(name, *target, ATTACK_SECONDS))
        assert OUTCOMES[name] >= set(rows[-1]["outcomes"]), rows
        assert rows[-1]["grew_mib"] < MAX_GROWTH_MIB, rows
        if rows[-1]["longest_stop_ms"] < MAX_STOP_MS:
            return
    raise AssertionError(f"the stream stood still each time: {rows}")
