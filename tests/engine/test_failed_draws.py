"""A draw that can't be made fails its own request, and no other one of the step."""

from array import array

from core_driver import DECODE, Worker, sent
from splitserve.protocol.messages.requests import FailureCode, LocalRequest, RequestFailed, StepTokens
from splitserve.protocol.request import RequestKey, Role, SamplingParams
from splitserve.protocol.step import Draw, StepOutput
from splitserve.simulation.model import ROUTER


def test_a_failed_draw_ends_its_request_alone() -> None:
    worker = Worker(Role.MIXED, DECODE)
    keys = [RequestKey("constrained"), RequestKey("other")]
    for key in keys:
        worker.hear(ROUTER, LocalRequest(key, array("i", [1, 2, 3]), SamplingParams(max_tokens=3), 60.0))
    plan = worker.plan()
    assert plan is not None and len(plan.chunks) == 2
    worker.core.commit_step(StepOutput([Draw((0,), error="the grammar is too complex"), Draw((7,))]), worker.now)
    effects = worker.tick()
    assert sent(effects, RequestFailed) == [
        RequestFailed(keys[0], FailureCode.INVALID, "the grammar is too complex"),
    ]
    (tokens,) = sent(effects, StepTokens)
    assert [(delta.key, delta.token_ids) for delta in tokens.deltas] == [(keys[1], [7])]
    worker.run()
    worker.assert_idle()
