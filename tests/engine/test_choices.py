"""Several choices of one prompt in a worker: first tokens drawn together, full blocks shared, a partial one copied."""

import pytest

from core_driver import DECODE, KEY, PROMPT, SAMPLING, Worker, sent
from splitserve.engine.effects import Effect
from splitserve.protocol.messages.requests import Abort, FailureCode, LocalRequest, RequestFailed, StepTokens
from splitserve.protocol.request import RequestKey, Role
from splitserve.protocol.step import Draw, StepOutput, StepPlan
from splitserve.simulation.model import BLOCK_SIZE, ROUTER, layout_of

SIBLINGS = [RequestKey("r1"), RequestKey("r2")]
OTHERS = (Draw((4,)), Draw((5,)))


def computed(worker: Worker, prompt: list[int] = PROMPT) -> StepPlan:
    """Let the worker compute a prompt up to the step that draws its first tokens, and return that."""
    worker.hear(ROUTER, LocalRequest(KEY, prompt, SAMPLING, 60.0, siblings=SIBLINGS))
    while (plan := worker.plan()) is not None and plan.chunks[0].sample is None:
        worker.commit(plan)
    assert plan is not None
    return plan


def drawn(worker: Worker, first: Draw) -> list[Effect]:
    worker.core.commit_step(StepOutput([first]), worker.now)
    return worker.tick()


def outputs(effects: list[Effect]) -> dict[RequestKey, list[int]]:
    deltas = [delta for body in sent(effects, StepTokens) for delta in body.deltas]  # type: ignore[attr-defined]
    return {delta.key: list(delta.token_ids) for delta in deltas}


def test_choices_begin_together_and_compute_no_token_of_the_prompt() -> None:
    worker = Worker(Role.MIXED, DECODE)
    (chunk,) = computed(worker).chunks
    assert [(spec.choice, spec.position) for spec in chunk.others] == [(1, len(PROMPT)), (2, len(PROMPT))]
    effects = drawn(worker, Draw((3,), others=OTHERS))
    assert outputs(effects) == {KEY: [3], SIBLINGS[0]: [4], SIBLINGS[1]: [5]}
    plan = worker.plan()
    assert plan is not None
    first, *others = sorted(plan.chunks, key=lambda each: each.token_ids[0])
    num_full = len(PROMPT) // BLOCK_SIZE
    assert [list(each.token_ids) for each in (first, *others)] == [[3], [4], [5]]
    for other in others:
        assert (other.start, other.block_ids[:num_full]) == (len(PROMPT), first.block_ids[:num_full])
        (copy,) = other.copies
        assert (copy.source, copy.target) == (first.block_ids[num_full], other.block_ids[num_full])
    assert len({each.block_ids[num_full] for each in plan.chunks}) == 3 and not first.copies
    worker.commit(plan)
    following = worker.plan()
    assert following is not None and not any(each.copies for each in following.chunks), "a copy is made once"
    worker.commit(following)
    worker.run()
    assert worker.core.state.counters.prompt_tokens == len(PROMPT)
    worker.assert_idle()


def test_a_prompt_of_full_blocks_needs_no_copies() -> None:
    worker = Worker(Role.MIXED, DECODE)
    computed(worker, PROMPT[: 2 * BLOCK_SIZE])
    drawn(worker, Draw((3,), others=OTHERS))
    plan = worker.plan()
    assert plan is not None and len(plan.chunks) == 3 and not any(chunk.copies for chunk in plan.chunks)
    worker.commit(plan)
    worker.run()
    assert worker.core.state.counters.prompt_tokens == 2 * BLOCK_SIZE
    worker.assert_idle()


def test_each_group_has_its_copy() -> None:
    worker = Worker(Role.MIXED, DECODE, layout=layout_of(window=6))
    computed(worker)
    drawn(worker, Draw((3,), others=OTHERS))
    plan = worker.plan()
    assert plan is not None
    copying = [chunk for chunk in plan.chunks if chunk.copies]
    assert len(copying) == 2
    for chunk in copying:
        places = {copy.group: copy.target for copy in chunk.copies}
        assert places == {0: chunk.block_ids[-1], 1: chunk.table(1).block_ids[-1]}
    worker.commit(plan)
    worker.run()
    worker.assert_idle()


@pytest.mark.parametrize("is_planned", [False, True])
def test_the_partial_block_stays_until_it_is_copied(is_planned: bool) -> None:
    """The first choice ends with its first token, and a sibling is aborted before or while its copy is made."""
    worker = Worker(Role.MIXED, DECODE)
    computed(worker)
    drawn(worker, Draw((3,), others=OTHERS))
    plan = worker.plan() if is_planned else None
    for key in (KEY, SIBLINGS[0]):
        worker.hear(ROUTER, Abort(key))
    if plan is None:
        plan = worker.plan()
        assert plan is not None and len(plan.chunks) == 1
    pool = worker.core.state.blocks.pool
    assert all(pool.num_holders(copy.source) for chunk in plan.chunks for copy in chunk.copies)
    worker.commit(plan)
    worker.run()
    worker.assert_idle()


def test_without_room_a_choice_begins_like_one_that_was_preempted() -> None:
    worker = Worker(Role.MIXED, DECODE, num_blocks=6)
    computed(worker)
    pool = worker.core.state.blocks.pool
    taken = pool.allocate(pool.num_available)
    assert taken is not None
    worker.core.commit_step(StepOutput([Draw((3,), others=OTHERS)]), worker.now)
    pool.release(taken)
    assert outputs(worker.tick()) == {KEY: [3], SIBLINGS[0]: [4], SIBLINGS[1]: [5]}
    plan = worker.plan()
    assert plan is not None and not any(chunk.copies for chunk in plan.chunks)
    worker.commit(plan)
    worker.run()
    worker.assert_idle()


def test_a_draw_that_fails_ends_its_choice_alone() -> None:
    worker = Worker(Role.MIXED, DECODE)
    computed(worker)
    effects = drawn(worker, Draw((3,), others=(Draw((0,), error="the grammar is too complex"), Draw((5,)))))
    assert sent(effects, RequestFailed) == [
        RequestFailed(SIBLINGS[0], FailureCode.INVALID, "the grammar is too complex")
    ]
    assert outputs(effects) == {KEY: [3], SIBLINGS[1]: [5]}
    worker.run()
    worker.assert_idle()
