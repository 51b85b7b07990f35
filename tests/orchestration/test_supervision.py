"""A cluster's workers under scaling, drains, upgrades and deaths: the supervisor under virtual time."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.common.errors import ConfigError
from splitserve.orchestration.cluster.restarts import MAX_QUICK_DEATHS, StartTimes
from splitserve.orchestration.cluster.rolling_upgrade import UpgradeState
from splitserve.orchestration.cluster.roster import KILL_GRACE_SECONDS, WorkerPhase
from splitserve.orchestration.spec.cluster_spec import DevicesSpec, ObjectivesSpec
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig
from supervised_machine import ENGINE, Machine, changed, serving, spec_of


def test_all_workers_start_and_get_ready() -> None:
    machine = Machine(spec_of())
    assert machine.names == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    assert machine.supervisor.names(WorkerPhase.READY) == frozenset()
    machine.ready()
    assert machine.supervisor.names(WorkerPhase.READY) == frozenset(machine.names)


def test_the_steps_of_a_start_are_timed() -> None:
    machine = Machine(spec_of(prefill=1, decode=1))
    worker = machine.supervisor.workers["decode-0"]
    assert worker.times == StartTimes(asked_at=0.0)
    machine.wait(2.0)
    machine.supervisor.on_placed("decode-0", machine.now)
    machine.wait(3.0)
    machine.ready()
    assert worker.times == StartTimes(asked_at=0.0, placed_at=2.0, ready_at=5.0)
    machine.wait(95.0)
    machine.supervisor.on_placed("decode-0", machine.now)  # late news of a worker that is ready
    machine.exit("decode-0", -9)
    assert worker.times == StartTimes(lost_at=100.0, asked_at=100.0), "one that had served comes back at once"
    machine.exit("decode-0", -9)
    assert worker.times == StartTimes(lost_at=100.0) and worker.due_at > 100.0
    machine.wait(10.0)
    assert worker.times == StartTimes(lost_at=100.0, asked_at=110.0)
    assert worker.times.moved(1000.0) == StartTimes(lost_at=1100.0, asked_at=1110.0)


def test_a_pool_grows_and_shrinks() -> None:
    machine = serving()
    assert machine.supervisor.scale("decode", 4, machine.now) == []
    machine.go_on()
    machine.ready()
    assert machine.names == ["decode-0", "decode-1", "decode-2", "decode-3", "prefill-0", "prefill-1"]
    machine.perform(machine.supervisor.scale("decode", 1, machine.now))
    assert machine.asked == {"decode-1", "decode-2", "decode-3"}, "the youngest go"
    machine.leave()
    assert machine.names == ["decode-0", "prefill-0", "prefill-1"]
    machine.perform(machine.supervisor.scale("decode", 2, machine.now))
    machine.go_on()
    assert "decode-1" in machine.names


def test_scaling_down_forgets_what_was_not_started_yet() -> None:
    machine = serving()
    machine.exit("decode-1", -9)
    machine.exit("decode-1", -9)  # quickly again: it waits now
    assert machine.names == ["decode-0", "prefill-0", "prefill-1"]
    machine.perform(machine.supervisor.scale("decode", 1, machine.now))
    machine.wait(100)
    assert machine.names == ["decode-0", "prefill-0", "prefill-1"]


def test_a_drained_worker_stays_away() -> None:
    machine = serving()
    machine.perform(machine.supervisor.drain("prefill-0", machine.now))
    assert machine.supervisor.names(WorkerPhase.LEAVING) == {"prefill-0"}
    machine.leave()
    machine.wait(1000)
    assert machine.names == ["decode-0", "decode-1", "prefill-1"]


def test_the_last_worker_of_a_role_is_drained_with_force_only() -> None:
    machine = serving()
    machine.perform(machine.supervisor.drain("decode-1", machine.now))
    with pytest.raises(ConfigError, match="decode-0 is the last decode worker"):
        machine.supervisor.drain("decode-0", machine.now)
    machine.perform(machine.supervisor.drain("decode-0", machine.now, force=True))
    assert machine.supervisor.names(WorkerPhase.LEAVING) == {"decode-0", "decode-1"}


def test_a_worker_that_an_operator_asked_through_the_router_stays_away() -> None:
    machine = serving()
    machine.supervisor.on_dismissed("prefill-0", machine.now)
    machine.supervisor.on_dismissed("prefill-0", machine.now)
    assert machine.supervisor.names(WorkerPhase.LEAVING) == {"prefill-0"}
    machine.exit("prefill-0", 0)
    machine.wait(1000)
    assert machine.names == ["decode-0", "decode-1", "prefill-1"]


def test_a_worker_that_does_not_leave_is_killed() -> None:
    machine = serving()
    machine.perform(machine.supervisor.drain("prefill-0", machine.now))
    drain_seconds = machine.supervisor.spec.protocol_config().drain_seconds
    assert machine.supervisor.next_due() == drain_seconds + KILL_GRACE_SECONDS
    machine.wait(drain_seconds)
    assert "prefill-0" in machine.names
    machine.wait(KILL_GRACE_SECONDS)
    assert "prefill-0" not in machine.names


def test_a_worker_that_dies_comes_back_and_in_the_end_does_not() -> None:
    machine = serving()
    for _ in range(MAX_QUICK_DEATHS):
        machine.exit("decode-0", -9)
        machine.wait(60)
        assert "decode-0" in machine.names
    assert not machine.supervisor.abandoned
    machine.exit("decode-0", -9)
    machine.wait(1000)
    assert "decode-0" not in machine.supervisor.workers
    [abandoned] = machine.supervisor.abandoned
    assert (abandoned.name, abandoned.pool) == ("decode-0", "decode")
    machine.perform(machine.supervisor.scale("prefill", 2, machine.now))
    assert machine.supervisor.abandoned == [abandoned]
    machine.perform(machine.supervisor.scale("decode", 2, machine.now))
    machine.wait(1)
    assert "decode-0" in machine.names and not machine.supervisor.abandoned


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda s: s.scale("cache", 1, 0.0), "no pool 'cache'; the pools are prefill, decode"),
        (lambda s: s.scale("decode", -1, 0.0), "must be between 0 and 4096, got -1"),
        (lambda s: s.scale("decode", 0, 0.0), "without decode the cluster couldn't serve"),
        (lambda s: s.drain("decode-7", 0.0), "no worker 'decode-7' to drain; there are decode-0, prefill-0, prefill-1"),
        (
            lambda s: s.drain("decode-0", 0.0),
            "decode-0 is the last decode worker: without it the cluster",
        ),
        (lambda s: s.begin_upgrade(spec_of(mixed=1), 0.0), "an upgrade keeps pools and roles"),
        (
            lambda s: s.begin_upgrade(simple_spec(EngineConfig(model="other"), num_prefill=2, num_decode=1), 0.0),
            "model differs from the running cluster's",
        ),
        (
            lambda s: s.begin_upgrade(msgspec.structs.replace(s.spec, objectives=ObjectivesSpec(ttft_ms=100)), 0.0),
            "objectives differs from the running cluster's",  # the router has them, and isn't replaced
        ),
        *(
            (
                lambda s, engine=engine: s.begin_upgrade(simple_spec(engine, num_prefill=2, num_decode=1), 0.0),
                message,
            )
            for engine, message in (
                (msgspec.structs.replace(ENGINE, kv_cache_dtype="fp8"), "kv_cache_dtype is fp8, the running .* auto"),
                (msgspec.structs.replace(ENGINE, block_size=32), "block_size is 32, the running cluster's not set"),
                (msgspec.structs.replace(ENGINE, dtype="bfloat16"), "dtype is bfloat16, the running cluster's auto"),
            )
        ),
        (
            lambda s: s.begin_upgrade(msgspec.structs.replace(s.spec, devices=DevicesSpec(share=True)), 0.0),
            "devices differs from the running cluster's",
        ),
    ],
)
def test_what_cannot_be_is_refused(operation, message: str) -> None:
    machine = serving(decode=1)
    with pytest.raises(ConfigError, match=message):
        operation(machine.supervisor)
    assert machine.names == ["decode-0", "prefill-0", "prefill-1"] and not machine.asked


# ---- upgrades ----


@settings(max_examples=300)
@given(st.randoms(use_true_random=False), st.sampled_from([None, 4, 5]))
def test_random_lives(chosen: random.Random, room: int | None) -> None:
    """Whatever happens when: unless workers die, an upgrade leaves no role without a ready one, and all ends well."""
    machine = Machine(spec_of(2, 2), room=room)
    machine.ready()
    deaths = chosen.random() < 0.5
    for _ in range(chosen.randrange(60)):
        event = chosen.randrange(8)
        if event == 0 and deaths and machine.running:
            machine.exit(chosen.choice(machine.names), chosen.choice([0, 1, -9]))
        elif event == 1 and machine.supervisor.names(WorkerPhase.STARTING):
            machine.ready(chosen.choice(sorted(machine.supervisor.names(WorkerPhase.STARTING))))
        elif event == 2 and machine.asked:
            machine.exit(chosen.choice(sorted(machine.asked)))
        elif event == 3:
            machine.wait(chosen.choice([0.0, 0.1, 5.0, 50.0]))
        elif event == 4:
            try_out(machine, lambda: machine.supervisor.begin_upgrade(changed(machine.supervisor.spec), machine.now))
        elif event == 5 and deaths and room is None:
            pool, count = chosen.choice(["prefill", "decode"]), chosen.randrange(1, 4)
            try_out(machine, lambda pool=pool, count=count: machine.supervisor.scale(pool, count, machine.now))
        elif event == 7:
            machine.lose_supervisor()
        elif event == 6 and deaths and room is None:
            name = chosen.choice(sorted(machine.supervisor.workers))
            try_out(machine, lambda name=name: machine.supervisor.drain(name, machine.now))
        if not deaths:
            roles = {machine.supervisor.workers[name].pool.role for name in machine.supervisor.names(WorkerPhase.READY)}
            assert roles == {"prefill", "decode"}, machine.log
    settle(machine)


def try_out(machine: Machine, operation) -> None:
    try:
        machine.perform(operation())
    except ConfigError:
        return
    machine.go_on()


def settle(machine: Machine) -> None:
    """When nothing fails any more, everything that was begun comes to its end."""
    for _ in range(60):
        machine.wait(60)
        machine.ready()
        machine.leave()
    supervisor = machine.supervisor
    assert not supervisor.names(WorkerPhase.LEAVING) and not supervisor.names(WorkerPhase.STARTING)
    assert set(machine.running) == set(supervisor.workers)
    if supervisor.upgrade is not None:
        assert supervisor.upgrade.state is not UpgradeState.RUNNING
        if supervisor.upgrade.state is UpgradeState.DONE:
            assert all(worker.revision == supervisor.revision for worker in supervisor.workers.values())
