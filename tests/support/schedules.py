"""Schedules for the simulator: made from a seed, run with all checks, replayed from one line.

    python tests/support/schedules.py --fuzz 100000 [--first SEED] [--jobs N] [--windows | --routers]
    python tests/support/schedules.py --replay '{"seed": 7, ...}'

A schedule that fails prints the second command; that one prints the trace. With SPLITSERVE_FIGURES set, numbers of
schedules and hand-overs go to that file.
"""

import argparse
import functools
import json
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from feature_requests import random_params, sampled_model
from splitserve.protocol.config import ProtocolConfig
from splitserve.simulation.faults import Faults, Shape
from splitserve.simulation.model import PROTOCOL, VOCAB
from splitserve.simulation.simulator import Simulator

MAX_SECONDS = 400.0
CALM_SECONDS = 8.0  # in which, with a lease, all that is left over ends: reads, copies, connections, lost routers
LONGEST_FREEZE_SECONDS = 9.0
MAX_QUIET_SECONDS = 25.0
SHAPES = (
    Shape(),
    Shape(num_blocks=16),
    Shape(prefill=2, decode=2),
    Shape(prefill=2, decode=2, num_blocks=16),
    Shape(prefill=1, decode=2),
    Shape(prefill=2, decode=1),
    Shape(prefill=0, decode=0, mixed=1),
    Shape(prefill=0, decode=0, mixed=2),
    Shape(prefill=1, decode=1, mixed=1),
    Shape(prefill=2, decode=2, prefill_blocks=12),
    Shape(decode=2, num_blocks=40, prefill_blocks=14, tier_slots=60),
    Shape(prefill=2, decode=2, num_blocks=16, prefill_blocks=12, tier_slots=12),
    Shape(prefill=2, decode=1, num_blocks=16, prefill_blocks=11, tier_slots=4),
    Shape(decode=2, num_blocks=16, prefill_blocks=11),
)
WINDOWS = (1, 4, 5, 6, 9)
LONG_WAITS = {"dead_after_seconds": 30.0, "lease_seconds": 30.0, "request_deadline_seconds": 300.0}
EXPIRING_LEASES = {"lease_seconds": 0.4, "renew_interval_seconds": 0.3, "host_offer_after_seconds": 0.05}
IMPATIENT_READS = {"read_deadline_seconds": 0.2}  # a peer is given up while others still read, and greeted anew
CROWD = 64  # answers, at most, that a schedule asks for: from so many on, its requests may take CROWD_WAITS
CROWD_WAITS = {"request_deadline_seconds": 200.0}  # on slow, lossy links a crowd was served in 71 s
FEW_MAY_WAIT = {"max_requests_waiting": 2, "no_worker_wait_seconds": 0.3}
SHORT_LEASES = {"lease_seconds": 1.0, "renew_interval_seconds": 0.3}
OPERATED_SHARE = 0.3  # of random schedules: those in which operators act


def num_schedules(few: int) -> int:
    """Return how many schedules of a kind a test runs: ``few``, or as many as ``scripts/long-tests`` says."""
    return int(os.environ.get("SPLITSERVE_SCHEDULES", few))


class Schedule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run of the simulator, reproducible. ``protocol`` holds changes to the simulator's time-outs. With
    ``features`` the production sampler draws, and requests have random mixes of all sampling features."""

    seed: int
    faults: Faults = Faults()
    shape: Shape = Shape()
    protocol: dict[str, float] = {}
    num_requests: int = 8
    features: bool = False
    max_choices: int = 1  # of a prompt
    has_turns: bool = False  # the second half of the prompts go on with the conversations of the first half

    @property
    def command(self) -> str:
        return f"python tests/support/schedules.py --replay '{msgspec.json.encode(self).decode()}'"


def run_schedule(schedule: Schedule) -> Simulator:
    """Run a schedule from start to quiet, with all checks. A failure carries the command that replays it."""
    sim = prepare(schedule)
    try:
        run_to_the_end(sim, schedule)
    except Exception as error:
        error.add_note(f"Replay it: {schedule.command}")
        raise
    return sim


def prepare(schedule: Schedule) -> Simulator:
    waits = CROWD_WAITS if schedule.num_requests * schedule.max_choices >= CROWD else {}
    protocol = ProtocolConfig(**(msgspec.structs.asdict(PROTOCOL) | waits | schedule.protocol))
    model = sampled_model() if schedule.features else None
    sim = Simulator(schedule.seed, schedule.faults, schedule.shape, protocol, model)
    has_tiers = schedule.shape.tier_slots or schedule.shape.shared_chunk
    # With tiers there are several, so that some leave the device and come back.
    shared = [[sim.random.randrange(VOCAB) for _ in range(12)] for _ in range(5 if has_tiers else 1)]
    choices = random.Random(schedule.seed)
    for index in range(schedule.num_requests):
        prefix = shared[index % len(shared)][: sim.random.choice([0, 0, 4, 8, 12])]
        prompt = prefix + [sim.random.randrange(VOCAB) for _ in range(sim.random.choice([1, 3, 4, 5, 17, 30]))]
        wanted = random_params(sim.random) if schedule.features else sim.random.choice([1, 2, 6, 20])
        more = (wanted, choices.randint(1, schedule.max_choices))
        before = index - (schedule.num_requests + 1) // 2 if schedule.has_turns else -1
        when = sim.random.uniform(0.0, 0.5) + (choices.uniform(0.5, 2.0) if before >= 0 else 0.0)
        sim.at(when, functools.partial(submit, sim, index, before, prompt, more))
    return sim


def submit(sim: Simulator, index: int, before: int, prompt: list[int], more: tuple[Any, int]) -> None:
    """Submit a prompt; ``before``: the number of that whose conversation it goes on with, or -1."""
    sim.routers.submit(index, [*(sim.routers.conversation(before) if before >= 0 else ()), *prompt], *more)


def run_to_the_end(sim: Simulator, schedule: Schedule) -> None:
    while sim.now < MAX_SECONDS and not sim.routers.has_ended(schedule.num_requests):
        sim.run(until=sim.now + 1.0)
    sim.run(until=sim.now + quiet_seconds(schedule.faults) + sim.protocol.lease_seconds)
    sim.check_end()


def quiet_seconds(faults: Faults) -> float:
    """Return how long a schedule goes on after its last request, beside a lease: silences and freezes end meanwhile."""
    silence = faults.partition_seconds if faults.partitions or faults.mutes else 0.0
    freeze = LONGEST_FREEZE_SECONDS if faults.freezes else 0.0
    return min(MAX_QUIET_SECONDS, CALM_SECONDS + max(silence, freeze))


def random_schedule(seed: int) -> Schedule:
    """Any mix of what a schedule can have; each fault is there in a part of them only, so that they show alone too."""
    chosen = random.Random(seed)

    def sometimes(low: float, high: float) -> float:
        return round(chosen.uniform(low, high), 3) if chosen.random() < 0.4 else low

    def few(most: int) -> int:
        return chosen.randint(0, most) if chosen.random() < 0.5 else 0

    faults = Faults(
        drop=sometimes(0.0, 0.4),
        duplicate=sometimes(0.0, 0.4),
        max_delay=sometimes(0.01, 1.0),
        post_error=sometimes(0.0, 0.3),
        read_error=sometimes(0.0, 0.3),
        read_stuck=sometimes(0.0, 0.3),
        read_late=sometimes(0.0, 0.3),
        read_seconds=sometimes(0.01, 1.0),
        disconnect_seconds=sometimes(0.001, 2.0),
        step_error=sometimes(0.0, 0.1) if chosen.random() < 0.3 else 0.0,
        step_seconds=sometimes(0.02, 0.3),
        abort=sometimes(0.0, 0.8),
        partitions=few(3),
        mutes=few(2),
        partition_seconds=sometimes(3.0, 12.0),
        kills=few(4),
        freezes=few(3),
        drains=few(2),
        rounding=chosen.random() < 0.2,
        damage=sometimes(0.0, 0.1),
        copy_error=sometimes(0.0, 0.3),
        copy_late=sometimes(0.0, 0.3),
        copy_seconds=sometimes(0.05, 0.5),
        lies=sometimes(0.0, 0.3),
        unsent=sometimes(0.0, 0.2) if chosen.random() < 0.3 else 0.0,
    )
    protocol = chosen.choice([{}, {}, SHORT_LEASES, EXPIRING_LEASES, IMPATIENT_READS, LONG_WAITS, FEW_MAY_WAIT])
    schedule = Schedule(
        seed=seed,
        faults=faults,
        shape=chosen.choice(SHAPES),
        protocol=protocol,
        num_requests=chosen.choice([4, 8, 8, 16]),
        max_choices=chosen.choice([1, 1, 4]),
        has_turns=chosen.random() < 0.5,
    )
    return operated(schedule, chosen) if chosen.random() < OPERATED_SHARE else schedule


def operated(schedule: Schedule, chosen: random.Random) -> Schedule:
    """Return the schedule with operators who pause in any mode, resume, reset prefix caches, and drain workers."""
    most = {"pauses": 3, "resets": 3, "operator_drains": 2}
    numbers = {name: chosen.randint(0, number) for name, number in most.items()}
    return msgspec.structs.replace(schedule, faults=msgspec.structs.replace(schedule.faults, **numbers))


def router_schedule(seed: int) -> Schedule:
    """Return the random schedule of the seed with several routers, some of which die, and operators who ask any."""
    chosen, schedule = random.Random(seed), random_schedule(seed)
    schedule = operated(schedule, chosen)
    faults = msgspec.structs.replace(schedule.faults, router_kills=chosen.randint(0, 3))
    shape = msgspec.structs.replace(schedule.shape, routers=chosen.randint(2, 3))
    return msgspec.structs.replace(schedule, faults=faults, shape=shape)


def window_schedule(seed: int, window: int = 6) -> Schedule:
    """Return the random schedule of the seed on workers whose caches have a full and a window group, and no tiers."""
    schedule = random_schedule(seed)
    shape = msgspec.structs.replace(schedule.shape, window=window, tier_slots=0, shared_chunk=0, prefill_blocks=0)
    return msgspec.structs.replace(schedule, shape=shape)


def any_window_schedule(seed: int) -> Schedule:
    """Return that schedule with a window below, at and above the size of a block, by the seed."""
    return window_schedule(seed, WINDOWS[seed % len(WINDOWS)])


def failure_of(seed: int, make: Callable[[int], Schedule] = random_schedule) -> tuple[int, str | None, int]:
    """The seed, how its schedule failed (None: it didn't), and how many hand-overs it had."""
    try:
        return seed, None, run_schedule(make(seed)).num_handovers
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        return seed, f"seed {seed}: {type(error).__name__}: {error}\n{notes}", 0


def outcomes(
    first: int, count: int, jobs: int, make: Callable[[int], Schedule]
) -> Iterator[tuple[int, str | None, int]]:
    seeds, failure = range(first, first + count), functools.partial(failure_of, make=make)
    if min(jobs, count) == 1:
        yield from map(failure, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(failure, seeds, chunksize=50)


def fuzz(
    first: int, count: int, jobs: int, max_failures: int, make: Callable[[int], Schedule] = random_schedule
) -> int:
    """Run ``count`` random schedules; returns how many failed. Stops after ``max_failures``."""
    started, num_failures, num_handovers, shown_at = time.monotonic(), 0, 0, time.monotonic()
    for number, (_, failure, handovers) in enumerate(outcomes(first, count, jobs, make), start=1):
        num_handovers += handovers
        if failure is not None:
            num_failures += 1
            print(failure, flush=True)
            if num_failures >= max_failures:
                break
        if time.monotonic() - shown_at > 30 or number == count:
            shown_at = time.monotonic()
            rate = number / (shown_at - started)
            print(
                f"{number} schedules, {num_handovers} hand-overs, {num_failures} failed, {rate:.0f} schedules/s",
                flush=True,
            )
    if figures := os.environ.get("SPLITSERVE_FIGURES"):
        Path(figures).write_text(json.dumps({"schedules": count, "hand-overs": num_handovers, "failed": num_failures}))
    return num_failures


def replay(schedule: Schedule) -> None:
    """Print the trace, and then what went wrong, if anything did."""
    sim = prepare(schedule)
    problem = None
    try:
        run_to_the_end(sim, schedule)
    except Exception:
        problem = traceback.format_exc()
    print(*sim.trace, sep="\n")
    print(problem or "every invariant held")
    sys.exit(1 if problem else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run schedules of the fault simulator.")
    parser.add_argument("--fuzz", type=int, metavar="N", help="run N random schedules")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="seed of the first one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes to run them in")
    parser.add_argument("--max-failures", type=int, default=10, metavar="N", help="stop after as many")
    kinds = parser.add_mutually_exclusive_group()
    add = functools.partial(kinds.add_argument, action="store_const", dest="make", default=random_schedule)
    add("--windows", const=any_window_schedule, help="caches of a full and a window group")
    add("--routers", const=router_schedule, help="several routers on one port")
    parser.add_argument("--replay", metavar="SCHEDULE", help="run one schedule, or one seed of --fuzz, with its trace")
    options = parser.parse_args()
    if options.replay:
        text = options.replay
        replay(options.make(int(text)) if text.isdigit() else msgspec.json.decode(text, type=Schedule))
    elif options.fuzz:
        sys.exit(1 if fuzz(options.first, options.fuzz, options.jobs, options.max_failures, options.make) else 0)
    else:
        parser.error("say --fuzz N or --replay SCHEDULE")


if __name__ == "__main__":
    main()
