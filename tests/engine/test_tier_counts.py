"""The counts of tiers in a worker's heartbeat."""

import msgspec
import pytest

from core_driver import DECODE, Worker, of
from splitserve.engine.effects import StartCopy
from splitserve.kvconnector.tiers.commands import CopyCommand, CopyResult
from splitserve.protocol.messages.requests import LocalRequest
from splitserve.protocol.request import RequestKey, Role, SamplingParams
from splitserve.simulation.model import LAYOUT, ROUTER


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_bytes_are_those_of_all_ranks(num_ranks: int) -> None:
    layout = msgspec.structs.replace(LAYOUT, tensor_parallel_size=num_ranks)
    worker = Worker(Role.MIXED, DECODE, num_blocks=32, num_slots=64, layout=layout)
    worker.hear(ROUTER, LocalRequest(RequestKey("r"), list(range(1, 14)), SamplingParams(max_tokens=1), 60.0))
    effects = worker.tick()
    while not (commands := [each.command for each in of(effects, StartCopy)]):
        plan = worker.plan()
        effects = worker.tick(0.25) if plan is None else worker.commit(plan)
    for command in commands:
        assert isinstance(command, CopyCommand)
        worker.core.handle_copy_result(CopyResult(command.copy_id, len(command.block_ids)), worker.now)
    (tier,) = worker.core.load().tiers
    assert tier.stored_blocks > 0
    assert tier.stored_bytes == tier.stored_blocks * layout.block_bytes * num_ranks
