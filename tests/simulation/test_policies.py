"""Every policy under random faults: no answer depends on where a request is placed, and every charge is released."""

import msgspec
import pytest

from schedules import random_schedule, run_schedule
from splitserve.protocol.placement.policies import PLACEMENT_POLICIES

NUM_SCHEDULES = 8


@pytest.mark.parametrize("policy", PLACEMENT_POLICIES)
def test_random_schedules(policy: str) -> None:
    for seed in range(NUM_SCHEDULES):
        schedule = random_schedule(seed)
        shape = msgspec.structs.replace(schedule.shape, policy=policy)
        run_schedule(msgspec.structs.replace(schedule, shape=shape))
