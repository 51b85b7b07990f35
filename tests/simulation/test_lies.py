"""Wrong offers of the simulator: each is one that the reader can detect."""

import random

import msgspec
import pytest

from schedules import random_schedule, run_schedule
from splitserve.protocol.messages.handover import OfferedBlock
from splitserve.simulation.faults import Faults, Shape
from splitserve.simulation.simulator import Simulator

SHAPE = Shape(num_blocks=8, tier_slots=6)


@pytest.mark.parametrize("block_id", [3, 8 + 2], ids=["block", "slot"])
def test_no_wrong_block_has_the_generation_of_the_true_one(block_id: int) -> None:
    """All slots begin with one generation, which a wrong slot would share with the true one."""
    sim = Simulator(0, Faults(lies=1.0), SHAPE)
    source = sim.living("prefill-0")
    chosen = random.Random(1)
    for number in chosen.sample(range(SHAPE.num_blocks), 4):
        source.generations[number] += chosen.randrange(1, 3)
    for slot in chosen.sample(range(SHAPE.tier_slots), 3):
        source.below.generations[slot] += chosen.randrange(1, 3)
    true_block = OfferedBlock(block_id, source.generation(block_id))
    lies = [sim.liar._other_block(source.party, 0, true_block) for _ in range(200)]
    readable = [lie for lie in lies if lie.block_id < source.num_readable]
    assert {lie.block_id < SHAPE.num_blocks for lie in readable} == {True, False}
    assert not [lie for lie in readable if source.generation(lie.block_id) == lie.generation]


def test_lies_about_prefixes_in_tiers_are_detected_with_several_choices() -> None:
    schedule = random_schedule(3941)
    assert schedule.faults.lies and schedule.shape.tier_slots
    run_schedule(msgspec.structs.replace(schedule, max_choices=4))
