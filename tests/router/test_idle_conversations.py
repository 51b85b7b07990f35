"""The policy ``cost`` on a cluster that has nothing else to do: turns of a conversation go where their KV is."""

from dataclasses import replace

import pytest

from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Role
from splitserve.simulation.replay.cluster import ClusterSpec, ReplayCluster, pool
from splitserve.simulation.replay.generated import Conversations
from splitserve.simulation.replay.worker import WorkerSpec


@pytest.mark.parametrize("per_token", [1e-5, 2.4e-5, 1e-4])
def test_each_turn_finds_the_prefix_of_the_one_before(per_token: float) -> None:
    """Without objectives. One client sends turn after turn, and conversation after conversation."""
    worker = WorkerSpec("w", Role.MIXED, StepModel(4e-3, 1e-4, 1e-6, per_token, 1e-9, 1000), chunk_tokens=512)
    workers = [*pool(Role.PREFILL, 1, worker), *pool(Role.DECODE, 2, worker)]
    shape = Conversations((4000, 6000), (48, 60), 4, (60, 600), think_seconds=0.2, are_named=False)
    requests = shape.requests(10, 1.0, seed=1)
    firsts = [number for number, request in enumerate(requests) if request.follows is None]
    for number in firsts[1:]:
        requests[number] = replace(requests[number], arrives_at=0.3, follows=number - 1)
    found = ReplayCluster(ClusterSpec(workers)).run(requests).requests
    for number, turn in enumerate(found):
        if number not in firsts:
            assert turn.cached_tokens > requests[number - 1].num_prompt_tokens - 512
