"""Rolling upgrades of a cluster's workers: the supervisor under virtual time."""

import pytest

from splitserve.common.errors import ConfigError
from splitserve.orchestration.cluster.restarts import MAX_QUICK_DEATHS
from splitserve.orchestration.cluster.rolling_upgrade import UpgradeState
from splitserve.orchestration.cluster.roster import WorkerPhase
from supervised_machine import Machine, changed, serving, spec_of


def test_an_upgrade_with_room_starts_each_successor_first() -> None:
    machine = serving(prefill=1, decode=2)
    machine.log.clear()
    target = changed(machine.supervisor.spec)
    machine.perform(machine.supervisor.begin_upgrade(target, machine.now))
    for _ in range(10):
        machine.go_on()
        machine.ready()
        machine.leave()
    assert machine.log == ["+prefill-1", "-prefill-0", "+decode-2", "-decode-0", "+decode-0", "-decode-1"]
    upgrade = machine.supervisor.upgrade
    assert upgrade is not None and upgrade.state is UpgradeState.DONE and upgrade.num_replaced == 3
    assert all(spec == target for spec in machine.running.values())


def test_an_upgrade_without_room_lets_each_one_leave_first() -> None:
    machine = Machine(spec_of(2, 2), room=4)
    machine.ready()
    machine.log.clear()
    target = changed(machine.supervisor.spec)
    machine.perform(machine.supervisor.begin_upgrade(target, machine.now))
    for _ in range(10):
        machine.go_on()
        machine.leave()
        machine.ready()
    turns = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    assert machine.log == [f"{sign}{name}" for name in turns for sign in "-+"]
    assert all(spec == target for spec in machine.running.values())
    assert machine.supervisor.upgrade is not None and machine.supervisor.upgrade.state is UpgradeState.DONE


def test_the_only_worker_of_a_pool_needs_room_for_its_successor() -> None:
    machine = Machine(spec_of(2, 1), room=3)
    machine.ready()
    with pytest.raises(
        ConfigError, match=r"no room for a successor beside the only worker of pool decode.*--allow-gap"
    ):
        machine.supervisor.begin_upgrade(changed(machine.supervisor.spec), machine.now)
    assert machine.supervisor.revision == 1
    machine.perform(machine.supervisor.begin_upgrade(changed(machine.supervisor.spec), machine.now, allow_gap=True))
    for _ in range(10):
        machine.leave()
        machine.ready()
    assert machine.supervisor.upgrade is not None and machine.supervisor.upgrade.state is UpgradeState.DONE


@pytest.mark.parametrize("room", [None, 4])
def test_a_successor_that_fails_ends_the_upgrade_and_the_others_stay(room: int | None) -> None:
    machine = Machine(spec_of(2, 2), room=room)
    machine.ready()
    before = machine.supervisor.spec
    machine.perform(machine.supervisor.begin_upgrade(changed(before), machine.now))
    machine.go_on()
    machine.leave()
    (successor,) = machine.supervisor.names(WorkerPhase.STARTING)
    machine.exit(successor, 2)
    upgrade = machine.supervisor.upgrade
    assert upgrade is not None and upgrade.state is UpgradeState.FAILED and upgrade.problem == f"{successor}: status 2"
    machine.wait(60)
    machine.ready()
    assert machine.names == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    assert all(spec == before for spec in machine.running.values()) and machine.supervisor.spec == before
    machine.perform(machine.supervisor.scale("decode", 3, machine.now))  # no upgrade in the way


@pytest.mark.parametrize("restart", [True, False])
def test_a_successor_that_fails_while_its_predecessor_leaves_comes_back_with_the_old_spec(restart: bool) -> None:
    machine = Machine(spec_of(1, 1), restart=restart)
    machine.ready()
    before = machine.supervisor.spec
    machine.perform(machine.supervisor.begin_upgrade(changed(before), machine.now))
    machine.go_on()
    machine.ready("prefill-1")
    assert machine.asked == {"prefill-0"}
    machine.exit("prefill-1", 2)
    upgrade = machine.supervisor.upgrade
    assert upgrade is not None and upgrade.state is UpgradeState.FAILED and upgrade.problem == "prefill-1: status 2"
    machine.leave()
    machine.ready()
    assert machine.names == ["decode-0", "prefill-1"]
    assert all(spec == before for spec in machine.running.values())


def test_a_worker_that_dies_during_an_upgrade_comes_back_as_it_was() -> None:
    machine = serving()
    before = machine.supervisor.spec
    machine.perform(machine.supervisor.begin_upgrade(changed(before), machine.now))
    machine.go_on()
    machine.exit("decode-1", -9)
    assert machine.running["decode-1"] == before
    with pytest.raises(ConfigError, match="an upgrade is in progress"):
        machine.supervisor.scale("decode", 3, machine.now)


@pytest.mark.parametrize("room", [None, 4])
def test_an_upgrade_goes_on_after_its_supervisor_was_lost(room: int | None) -> None:
    machine = Machine(spec_of(2, 2), room=room)
    machine.ready()
    target = changed(machine.supervisor.spec)
    machine.perform(machine.supervisor.begin_upgrade(target, machine.now))
    for _ in range(10):
        machine.go_on()
        machine.lose_supervisor()
        machine.leave()
        machine.lose_supervisor()
        machine.ready()
    assert machine.supervisor.upgrade is not None and machine.supervisor.upgrade.state is UpgradeState.DONE
    assert machine.supervisor.upgrade.num_replaced == 4
    assert all(spec == target for spec in machine.running.values())


@pytest.mark.parametrize("is_drained", [False, True])
def test_an_upgrade_goes_on_if_the_old_worker_left_while_there_was_no_supervisor(is_drained: bool) -> None:
    machine = Machine(spec_of(2, 2), room=4)
    machine.ready()
    target = changed(machine.supervisor.spec)
    machine.perform(machine.supervisor.begin_upgrade(target, machine.now))
    assert machine.asked == {"prefill-0"}
    machine.supervisor.workers["prefill-0"].wanted = not is_drained
    machine.running.pop("prefill-0")
    machine.asked.clear()
    machine.lose_supervisor()
    for _ in range(10):
        machine.go_on()
        machine.ready()
        machine.leave()
    assert machine.supervisor.upgrade is not None and machine.supervisor.upgrade.state is UpgradeState.DONE
    assert len(machine.names) == 3 + (not is_drained)
    assert all(spec == target for spec in machine.running.values())


def test_an_old_worker_that_died_needs_no_goodbye() -> None:
    machine = serving()
    machine.perform(machine.supervisor.begin_upgrade(changed(machine.supervisor.spec), machine.now))
    machine.go_on()
    machine.exit("prefill-0", -9)
    machine.exit("prefill-0", -9)
    assert machine.supervisor.workers["prefill-0"].phase is WorkerPhase.WAITING
    machine.ready("prefill-2")
    assert "-prefill-0" not in machine.log
    for _ in range(10):
        machine.wait(60)
        machine.ready()
        machine.leave()
    assert machine.supervisor.upgrade is not None and machine.supervisor.upgrade.state is UpgradeState.DONE
    assert len(machine.names) == 4


@pytest.mark.parametrize("room", [None, 3])
def test_a_successor_that_an_operator_drains_ends_the_upgrade(room: int | None) -> None:
    machine = Machine(spec_of(2, 1), room=room)
    machine.ready()
    before = machine.supervisor.spec
    machine.perform(machine.supervisor.begin_upgrade(changed(before), machine.now, allow_gap=True))
    machine.go_on()
    machine.leave()
    (successor,) = machine.supervisor.names(WorkerPhase.STARTING)
    machine.supervisor.on_dismissed(successor, machine.now)
    machine.exit(successor, 0)
    upgrade = machine.supervisor.upgrade
    assert upgrade is not None and upgrade.state is UpgradeState.FAILED
    assert upgrade.problem == f"{successor}: it left for good before its turn was over"
    machine.wait(60)
    machine.ready()
    assert successor not in machine.names and all(spec == before for spec in machine.running.values())
    machine.perform(machine.supervisor.scale("decode", 2, machine.now))  # no upgrade in the way


def test_a_successor_that_was_drained_while_there_was_no_supervisor_ends_the_upgrade() -> None:
    machine = serving()
    machine.perform(machine.supervisor.begin_upgrade(changed(machine.supervisor.spec), machine.now))
    machine.go_on()
    (successor,) = machine.supervisor.names(WorkerPhase.STARTING)
    machine.supervisor.on_dismissed(successor, machine.now)
    machine.running.pop(successor)
    machine.lose_supervisor()
    assert machine.supervisor.upgrade is not None and machine.supervisor.upgrade.state is UpgradeState.FAILED
    assert len(machine.names) == 4


def test_a_worker_that_crashes_for_the_last_time_in_its_turn_is_replaced() -> None:
    machine = Machine(spec_of(1, 1), room=2)
    for _ in range(MAX_QUICK_DEATHS):
        machine.exit("prefill-0", 1)
        machine.wait(60)
    target = changed(machine.supervisor.spec)
    machine.perform(machine.supervisor.begin_upgrade(target, machine.now, allow_gap=True))
    machine.exit("prefill-0", 1)
    assert machine.running["prefill-0"] == target
    for _ in range(10):
        machine.ready()
        machine.leave()
    assert machine.supervisor.upgrade is not None and machine.supervisor.upgrade.state is UpgradeState.DONE
