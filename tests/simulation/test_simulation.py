"""Production state machines under seeded faults: every schedule ends with right tokens and with every count back.

What a schedule is: ``schedules.py``. That these checks bite: ``test_planted_bugs.py``.
"""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import LONG_WAITS, SHORT_LEASES, Schedule, num_schedules, quiet_seconds, run_schedule
from splitserve.router.placement.policies import Disaggregated
from splitserve.router.requests.effects import Deliver
from splitserve.simulation.faults import Faults, Shape
from splitserve.simulation.model import VOCAB
from splitserve.simulation.simulator import Simulator

ONE_EACH, TWO_EACH = Shape(), Shape(prefill=2, decode=2)
LITTLE_MEMORY = Shape(num_blocks=16)
ONE_MIXED, TWO_MIXED = Shape(prefill=0, decode=0, mixed=1), Shape(prefill=0, decode=0, mixed=2)
DISAGGREGATED = [ONE_EACH, TWO_EACH, LITTLE_MEMORY, Shape(prefill=1, decode=2), Shape(prefill=2, decode=1)]

QUIET = Faults()
LOSSY = Faults(drop=0.2, duplicate=0.2, max_delay=0.3)
BAD_READS = Faults(read_error=0.2, read_stuck=0.1, post_error=0.1)
LATE_READS = Faults(read_late=0.3, read_seconds=0.3, disconnect_seconds=2.0)
ABORTS = Faults(abort=0.5, max_delay=0.1)
STEP_ERRORS = Faults(step_error=0.1)
LEASES_EXPIRE = Faults(partitions=2, read_seconds=1.0)
HALF_OPEN = Faults(mutes=1, partition_seconds=100.0)
DEATHS = Faults(kills=3, freezes=1, step_seconds=0.1)
DRAINS = Faults(drains=3, step_seconds=0.1)
DAMAGE = Faults(damage=0.1)
OTHER_ROUNDING = Faults(kills=3, read_error=0.2, rounding=True, step_seconds=0.1)
EVERYTHING = Faults(
    drop=0.1, duplicate=0.1, max_delay=0.3, read_error=0.1, read_stuck=0.1, abort=0.3, step_error=0.03, partitions=1,
    kills=1, freezes=1,
)  # fmt: skip

NUM_SCHEDULES = num_schedules(8)  # of each kind

seeds = st.integers(0, 2**32)
bounded = settings(max_examples=NUM_SCHEDULES)


@given(seed=seeds, shape=st.sampled_from(DISAGGREGATED))
@bounded
def test_a_quiet_schedule_hands_every_request_over(seed: int, shape: Shape) -> None:
    sim = run_schedule(Schedule(seed=seed, shape=shape))
    check_handovers(sim)
    assert sim.num_handover_failures == 0
    assert sim.router.failures == []


@given(seed=seeds, shape=st.sampled_from([ONE_EACH, TWO_EACH]))
@bounded
def test_lost_messages_cost_time_only(seed: int, shape: Shape) -> None:
    sim = run_schedule(Schedule(seed=seed, faults=LOSSY, shape=shape, protocol=LONG_WAITS))
    assert sim.num_handover_failures == 0
    check_handovers(sim)


def check_handovers(sim: Simulator) -> None:
    """Check that all requests of a pair of workers were handed over, but for those that ended at prefill, with the
    first token or the second one. Until both workers are there, one computes all."""
    by_pairs = [
        len(client.output)
        for client in sim.router.clients.values()
        if client.request is not None and isinstance(client.request.state.placement, Disaggregated)
    ]
    at_least, at_most = (sum(length > shortest for length in by_pairs) for shortest in (2, 1))
    assert at_least <= sim.num_handovers <= at_most


@given(seed=seeds, prefill=st.integers(1, 2))
@bounded
def test_a_half_open_prefill_worker_costs_a_rung_and_no_request(seed: int, prefill: int) -> None:
    sim = run_schedule(Schedule(seed=seed, faults=HALF_OPEN, shape=Shape(prefill=prefill)))
    assert sim.router.failures == []


@pytest.mark.parametrize(
    ("faults", "protocol"),
    [
        (LOSSY, {}),
        (BAD_READS, {}),
        (LATE_READS, {}),
        (ABORTS, {}),
        (STEP_ERRORS, {}),
        (LEASES_EXPIRE, SHORT_LEASES),
        (HALF_OPEN, {}),
        (DEATHS, {}),
        (DEATHS, SHORT_LEASES),
        (DRAINS, {}),
        (DAMAGE, {}),
        (OTHER_ROUNDING, {}),
        (EVERYTHING, {}),
        (EVERYTHING, SHORT_LEASES),
    ],
    ids=lambda value: next((name.lower() for name, it in globals().items() if it is value), ""),
)
@given(seed=seeds, shape=st.sampled_from([*DISAGGREGATED, ONE_MIXED, TWO_MIXED]))
@bounded
def test_every_schedule_ends_well(faults: Faults, protocol: dict[str, float], seed: int, shape: Shape) -> None:
    """``run_schedule`` checks that no request fails without need; see ``SimRouter.check_end`` and ``RouterChecks``."""
    run_schedule(Schedule(seed=seed, faults=faults, shape=shape, protocol=protocol))


def test_damaged_blocks_are_noticed_counted_and_never_used() -> None:
    sims = [run_schedule(Schedule(seed=seed, faults=DAMAGE, shape=TWO_EACH)) for seed in range(20)]
    counters = [worker.core.load() for sim in sims for worker in sim.workers.values()]
    assert sum(load.kv_mismatches for load in counters) > 10
    assert sum(load.handovers for load in counters) > 10
    assert any("differs from what was offered" in line for sim in sims for line in sim.trace)


some = st.integers(0, 3)


@given(
    seed=seeds,
    shape=st.sampled_from([*DISAGGREGATED, ONE_MIXED, TWO_MIXED]),
    faults=st.builds(
        Faults,
        drop=st.floats(0, 0.4),
        duplicate=st.floats(0, 0.4),
        max_delay=st.floats(0.001, 1.0),
        post_error=st.floats(0, 0.3),
        read_error=st.floats(0, 0.4),
        read_stuck=st.floats(0, 0.3),
        read_late=st.floats(0, 0.3),
        abort=st.floats(0, 1),
        step_error=st.floats(0, 0.2),
        step_seconds=st.floats(0.002, 0.3),
        read_seconds=st.floats(0.001, 2.0),
        partitions=some,
        mutes=some,
        kills=some,
        freezes=some,
        drains=some,
        partition_seconds=st.floats(0.1, 12.0),
        rounding=st.booleans(),
        damage=st.floats(0, 0.3),
    ),
)
@settings(parent=bounded, max_examples=2 * NUM_SCHEDULES)
def test_any_mix_of_faults(seed: int, shape: Shape, faults: Faults) -> None:
    run_schedule(Schedule(seed=seed, faults=faults, shape=shape))


def test_a_schedule_can_be_replayed_from_its_command() -> None:
    schedule = Schedule(seed=5, faults=EVERYTHING, shape=TWO_EACH, protocol=SHORT_LEASES)
    text = schedule.command.split("'")[1]
    again = msgspec.json.decode(text, type=Schedule)
    assert again == schedule
    trace = run_schedule(again).trace
    assert trace == run_schedule(schedule).trace
    assert trace != run_schedule(msgspec.structs.replace(schedule, seed=6)).trace


def test_a_preempted_request_is_not_overtaken_by_newcomers_for_ever() -> None:
    sim = Simulator(1, QUIET, LITTLE_MEMORY)
    ends: dict[str, float] = {}
    original = sim.router._performers[Deliver]

    def deliver(effect: Deliver) -> None:
        if effect.update.ended:
            ends[effect.request_id] = sim.now
        original(effect)

    sim.router._performers[Deliver] = deliver
    num_requests, interval_seconds = 100, 0.012  # faster than they can be served
    for index in range(num_requests):
        prompt = [sim.random.randrange(VOCAB) for _ in range(sim.random.choice([3, 9, 17, 30]))]
        sim.at(1.0 + index * interval_seconds, lambda i=index, p=prompt: sim.router.submit(f"r{i}", p, 20))  # type: ignore[misc]
    while sim.now < 300.0 and not sim.router.has_ended(num_requests):
        sim.run(until=sim.now + 1.0)
    sim.run(until=sim.now + quiet_seconds(QUIET) + sim.protocol.lease_seconds)
    sim.check_end()
    decode = sim.living("decode-0")
    assert decode.core.load().preemptions > 0
    first_ones = [ends[f"r{index}"] for index in range(10)]
    assert max(first_ones) < max(ends.values()) / 4, "first come, first served"
