"""The pace of launches on virtual time: steps are planned late, and the device waits no longer than without a pace.

A loop plans a step once there's room, a thread queues its forward pass and then its draws, a device runs it, and the
loop takes the result; all but the device take times that vary. The rules are those of the executor.
"""

import random
from dataclasses import dataclass
from statistics import mean

import pytest

from splitserve.engine.steps.launch_pace import LaunchPace
from splitserve.protocol.step import SampleSpec, ScheduledChunk, StepPlan

GREEDY = SampleSpec(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0, position=1)
PLAN = StepPlan([ScheduledChunk([1], 9, [0], GREEDY)] * 16)
NUM_STEPS = 600
WARM_UP = 100


@dataclass(frozen=True, slots=True)
class Machine:
    """Milliseconds that each part of a step usually takes."""

    forward: float  # on the device
    queueing: float  # of the forward pass, on the thread that launches
    drawing: float  # likewise, of the draws
    planning: float = 0.3  # by the loop, its wake-up included
    noticing: float = 0.1  # from a step's end to the loop's next round


@dataclass(frozen=True, slots=True)
class Course:
    """Means over the steps, in milliseconds."""

    idle: float  # time that the device waited for a step
    lead: float  # from a step's plan to its begin: a request that arrives meanwhile misses the step
    period: float


def course(machine: Machine, *, paced: bool) -> Course:
    """Run steps one after the other."""
    chance, pace = random.Random(7), LaunchPace()

    def takes(usual: float) -> float:
        seldom = chance.random() < 0.02
        return 1e-3 * usual * chance.uniform(0.9, 1.3 + 2.0 * seldom)

    idle, lead = [], []
    free = ended = noticed = before_noticed = 0.0  # of the thread that launches; of the last step; of the one before it
    for step in range(NUM_STEPS):
        wait = pace.seconds_to_wait(PLAN) if paced else 0.0
        room = before_noticed + wait
        planned = room + takes(machine.planning)
        queued = max(planned, free) + takes(machine.queueing)
        free = queued + takes(machine.drawing)
        began = max(queued, ended)
        idle.append(began - ended)
        lead.append(began - planned)
        ended = max(began + 1e-3 * machine.forward * chance.uniform(1.0, 1.02), free)
        before_noticed, noticed = noticed, max(noticed, ended + takes(machine.noticing))
        pace.note_step(PLAN, noticed - before_noticed if step else 1e-3 * machine.forward)
        pace.note_launch(queued - room)
    return Course(*(1e3 * mean(each[WARM_UP:]) for each in (idle, lead)), period=1e3 * ended / NUM_STEPS)


@pytest.mark.parametrize(
    "machine",
    [
        Machine(forward=4.7, queueing=0.5, drawing=0.7),
        Machine(forward=1.2, queueing=0.4, drawing=0.6),
        Machine(forward=0.6, queueing=0.4, drawing=0.8),  # the host is the slower one
        Machine(forward=0.2, queueing=0.3, drawing=0.3, planning=0.5),
    ],
    ids=lambda machine: f"{machine.forward} ms",
)
def test_the_device_waits_no_longer_than_at_the_fastest_pace(machine: Machine) -> None:
    late, at_once = course(machine, paced=True), course(machine, paced=False)
    assert late.period <= 1.002 * at_once.period
    assert late.idle <= at_once.idle + 0.002 * at_once.period


def test_a_device_that_is_the_slower_one_gets_its_steps_late() -> None:
    machine = Machine(forward=4.7, queueing=0.5, drawing=0.7)
    assert course(machine, paced=True).lead < course(machine, paced=False).lead - 3.0
