"""The storm in the simulator: requests with random mixes of features, under deaths, freezes, drains and preemptions.

    python tests/support/storms.py --requests 500 [--first SEED]

Each choice must equal that of an undisturbed worker: tokens, log-probabilities, parts of the message. A schedule that
fails prints the command that replays it. With SPLITSERVE_FIGURES set, figures of the run go to that file.
"""

import argparse
import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from schedules import Schedule, random_schedule, run_schedule
from splitserve.protocol.request import RequestKey
from splitserve.protocol.sampling_features import NEUTRAL_VALUES
from splitserve.router.placement.policies import Disaggregated
from splitserve.router.requests.state import FailedAttempt, FailureReason
from splitserve.simulation.faults import Shape
from splitserve.simulation.router.client import SimClient
from splitserve.simulation.simulator import Simulator
from storm_texts import TEXT_FEATURES, check_text, features_of_text

SHAPES = (
    Shape(num_blocks=20),
    Shape(prefill=2, decode=2, num_blocks=24),
    Shape(prefill=2, decode=2, num_blocks=20),
    Shape(prefill=1, decode=2, num_blocks=20),
    Shape(prefill=0, decode=0, mixed=2, num_blocks=24),
    Shape(prefill=1, decode=1, mixed=1, num_blocks=24),
    Shape(prefill=2, decode=2, num_blocks=24, prefill_blocks=20, tier_slots=12),
    Shape(prefill=2, decode=2, num_blocks=24, window=6),
)
"""Little memory, so that requests are preempted; a request of the largest size fits each."""
FEATURES = (*NEUTRAL_VALUES, "n", "logprobs", "prompt_logprobs", "temperature", "stop_token_ids", *TEXT_FEATURES)


def storm_schedule(seed: int) -> Schedule:
    """Return a random schedule whose answers are all known: workers tell the truth and draw alike. Workers die."""
    chance = random.Random(seed ^ 0x5707)
    schedule = random_schedule(seed)
    faults = msgspec.structs.replace(
        schedule.faults,
        rounding=False,
        lies=0.0,
        step_error=schedule.faults.step_error / 4,
        abort=schedule.faults.abort / 4,
        step_seconds=chance.choice([0.02, 0.1]),
        kills=chance.randint(0, 3),
        handover_kills=chance.randint(0, 2),
        scored=chance.random() < 0.5,
        freezes=chance.randint(0, 2),
        drains=chance.randint(0, 2),
    )
    return msgspec.structs.replace(
        schedule,
        faults=faults,
        shape=chance.choice(SHAPES),
        num_requests=16,
        features=True,
        max_choices=chance.choice([1, 1, 2, 4]),
    )


def storm_schedules(first: int = 0) -> Iterator[Schedule]:
    return map(storm_schedule, itertools.count(first))


def figures_of(sim: Simulator) -> Counter[str]:
    """Return what a run had: requests by parameter, what they lived through, tokens that were compared."""
    found: Counter[str] = Counter()
    continued = continued_requests(sim)
    for client in sim.router.clients.values():
        if client.request is not None and client.has_begun:
            found.update(_figures_of_choice(client, continued))
    found["preemptions"] = sum(worker.core.state.counters.preemptions for worker in sim.workers.values())
    found["hand-overs"] = sim.num_handovers
    found["workers lost"] = sum(not worker.alive for worker in sim.workers.values())
    return found


def _figures_of_choice(client: SimClient, continued: set[str]) -> Counter[str]:
    """Return what a choice had: its features, if it is the first one of its request, and what it lived through."""
    assert client.request is not None
    history = client.request.state.history
    was_lost = any(attempt.failure.reason is FailureReason.WORKER_LOST for attempt in history)
    found: Counter[str] = Counter()
    if client.first is None:
        found.update(f"with {name}" for name in _features_of(client))
        found["requests"] = 1
    found["choices"] = 1
    found["tokens"] = len(client.output)
    found["lost a worker"] = was_lost
    found["lost a worker between first and last token"] = was_lost and client.request_id in continued
    found["lost a worker or a read during a hand-over"] = any(map(_was_in_handover, history))
    found["failed"] = client.request.state.failure is not None
    return found


def _features_of(client: SimClient) -> Iterator[str]:
    """Yield the names of what a client wants, and of the parts that its message has."""
    params = client.sampling
    yield from (name for name, _ in params.wanted_params())
    wanted = {
        "n": bool(client.siblings),
        "logprobs": params.logprobs is not None,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "temperature": params.temperature > 0,
        "stop_token_ids": bool(params.stop_token_ids),
    }
    yield from (name for name, is_wanted in wanted.items() if is_wanted)
    yield from features_of_text(client)


def _was_in_handover(attempt: FailedAttempt) -> bool:
    """Return whether an attempt ended while blocks moved. The loss of a decode worker isn't counted, since it may have
    had them all."""
    if not isinstance(attempt.placement, Disaggregated):
        return False
    is_prefill_lost = attempt.failure.reason is FailureReason.WORKER_LOST
    return attempt.failure.reason is FailureReason.HANDOVER or (
        is_prefill_lost and attempt.culprit == attempt.placement.prefill
    )


def continued_requests(sim: Simulator) -> set[str]:
    """Return the requests that a later attempt continued after their first token."""
    bodies = (body for _, _, _, body in sim._events)
    keyed = ((getattr(body, "key", None), getattr(body, "output_ids", None)) for body in bodies)
    return {key.request_id for key, output in keyed if isinstance(key, RequestKey) and key.attempt and output}


def checked_figures(schedule: Schedule) -> Counter[str]:
    """Run a schedule, check the messages that the router makes of the tokens, and return its figures."""
    sim = run_schedule(schedule)
    try:
        for client in sim.router.clients.values():
            check_text(client)
    except Exception as error:
        error.add_note(f"Replay it: {schedule.command}")
        raise
    return figures_of(sim)


def run_storm(num_requests: int, first: int = 0) -> Counter[str]:
    """Run schedules until ``num_requests`` requests were compared; raises at the first difference."""
    found: Counter[str] = Counter()
    for schedule in storm_schedules(first):
        found += checked_figures(schedule)
        found["schedules"] += 1
        if found["requests"] >= num_requests:
            return found
    raise AssertionError("schedules have no end")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the storm in the simulator.")
    parser.add_argument("--requests", type=int, default=500, metavar="N", help="end after as many")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="seed of the first schedule")
    options = parser.parse_args()
    torch.set_num_threads(1)  # rows of small tensors: more threads only wait for each other
    began = time.monotonic()
    try:
        found = run_storm(options.requests, options.first)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()), sep="\n")
        sys.exit(1)
    figures = {name: found[name] for name in sorted({*found, *(f"with {name}" for name in FEATURES)})}
    print(json.dumps(figures | {"seconds": round(time.monotonic() - began, 1)}, indent=2))
    if path := os.environ.get("SPLITSERVE_FIGURES"):
        Path(path).write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
