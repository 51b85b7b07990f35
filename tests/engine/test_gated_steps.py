"""A step that waits on the device for its sequence's load: when it's planned, when what comes of it counts."""

import threading
from typing import Any

import pytest

from core_driver import DECODE, KEY, NUM_BLOCKS, PREFILL, Worker, grant, prefill_request, sent
from splitserve.engine.effects import Effect
from splitserve.kvconnector.tiers.commands import CopyCommand, CopyNearsEnd, CopyResult
from splitserve.kvconnector.tiers.copies import LocalTierCopier
from splitserve.kvconnector.tiers.load_gates import LoadGates, layer_groups
from splitserve.protocol.messages.handover import Offer, Release
from splitserve.protocol.messages.requests import Abort, LocalRequest, RequestFailed, StepTokens
from splitserve.protocol.request import RequestKey, Role, SamplingParams
from splitserve.protocol.step import StepPlan
from splitserve.simulation.model import PROTOCOL, ROUTER
from waiting import PATIENCE_SECONDS, wait_until

PROMPT = list(range(10))  # two full blocks and a half
OTHER = RequestKey("other", 0)
MIXED = DECODE


def local(key: RequestKey, prompt: list[int] = PROMPT, max_tokens: int = 1) -> LocalRequest:
    return LocalRequest(key, prompt, SamplingParams(max_tokens=max_tokens), 60.0)


def worker_with_a_hit(max_tokens: int = 1, prompt: list[int] = PROMPT) -> Worker:
    """A mixed worker whose host tier has the prompt's full blocks, and a request for it, whose load is in flight."""
    mixed = Worker(Role.MIXED, MIXED, num_slots=8)
    mixed.hear(ROUTER, local(RequestKey("before", 0), prompt))
    mixed.run()
    mixed.core.state.blocks.pool.clear_prefix_index()
    mixed.hear(ROUTER, local(KEY, prompt, max_tokens))
    assert [copy.is_load for copy in mixed.copies] == [True]
    return mixed


def tokens(effects: list[Effect]) -> list[tuple[RequestKey, int, int]]:
    """Drawn ones, with the prompt's cached tokens."""
    deltas = [delta for body in sent(effects, StepTokens) for delta in body.deltas]  # type: ignore[attr-defined]
    return [(delta.key, token, delta.num_cached_tokens) for delta in deltas for token in delta.token_ids]


def planned(worker: Worker) -> StepPlan:
    plan = worker.plan()
    assert plan is not None
    return plan


# ---- when it's planned ----


def test_a_step_waits_for_a_load_that_nears_its_end() -> None:
    worker = worker_with_a_hit()
    assert worker.plan() is None, "who knows when it ends"
    worker.near_end()
    plan = planned(worker)
    [chunk] = plan.chunks
    assert (chunk.start, list(chunk.token_ids), chunk.gates) == (8, PROMPT[8:], (worker.copies[0].copy_id,))
    assert chunk.sample is not None and plan.gates == chunk.gates
    assert worker.plan() is None, "once"
    assert tokens(worker.end_copy()) == []
    assert tokens(worker.commit(plan)) == [(KEY, 3, 8)]
    worker.assert_idle()


def test_nobody_else_waits_for_it() -> None:
    worker = worker_with_a_hit()
    worker.hear(ROUTER, local(OTHER, [7, 7, 7], max_tokens=3))
    worker.near_end()
    for _ in range(3):  # a prompt's step, and those that decode
        plan = planned(worker)
        assert [(len(plan.chunks), plan.gates)] == [(1, ())]
        worker.commit(plan)
    assert planned(worker).gates


def test_a_long_rest_waits_for_all_of_the_load() -> None:
    worker = worker_with_a_hit(prompt=[*PROMPT[:8], *range(20, 29)])
    worker.core.state.blocks.tiers.tiers[0].index.forget(worker.copies[0].hashes[-1])
    [copy] = worker.copies
    assert len(copy.block_ids) == 4
    worker.near_end()
    [chunk] = planned(worker).chunks
    assert chunk.start == 16
    longer = worker_with_a_hit()
    longer.hear(ROUTER, Abort(KEY))
    longer.end_copies()
    longer.core.state.blocks.pool.clear_prefix_index()
    longer.hear(ROUTER, local(OTHER, [*PROMPT, *range(20, 30)]))
    longer.near_end()
    assert longer.plan() is None, "twelve tokens are more than a step takes"


def test_a_load_that_failed_in_part_gates_nothing() -> None:
    worker = Worker(Role.MIXED, MIXED, num_slots=8)
    worker.core.state.blocks.tiers.tiers[0].max_blocks_per_load = 1
    worker.hear(ROUTER, local(RequestKey("before", 0)))
    worker.run()
    worker.core.state.blocks.pool.clear_prefix_index()
    worker.hear(ROUTER, local(KEY))
    worker.near_end(1)
    assert worker.plan() is None, "the first of two copies says nothing yet"
    worker.end_copy(is_good=False)
    assert worker.plan() is None
    worker.end_copy()
    assert [chunk.start for chunk in planned(worker).chunks] == [0]


# ---- what comes of it ----


def test_its_token_counts_when_the_load_has_ended() -> None:
    worker = worker_with_a_hit()
    worker.near_end()
    assert tokens(worker.commit(planned(worker))) == []
    assert worker.plan() is None
    assert tokens(worker.end_copy()) == [(KEY, 3, 8)]
    worker.assert_idle()


@pytest.mark.parametrize("load_ends_first", [True, False])
@pytest.mark.parametrize("step_fails", [True, False])
def test_a_failed_load_is_computed_and_nobody_sees_it(load_ends_first: bool, step_fails: bool) -> None:
    """Garbage may well make the step fail, too."""
    worker = worker_with_a_hit()
    worker.near_end()
    plan = planned(worker)
    effects = worker.end_copy(is_good=False) if load_ends_first else []
    assert worker.plan() is None, "its blocks are the step's"
    if step_fails:
        worker.core.fail_step("logits hold NaN", worker.now)
        effects += worker.tick()
    else:
        effects += worker.commit(plan, token=49)
    effects += [] if load_ends_first else worker.end_copy(is_good=False)
    assert tokens(effects) == [] and not sent(effects, RequestFailed)
    first, second = planned(worker), worker.plan()
    assert (first.chunks[0].start, len(first.chunks[0].token_ids), first.gates) == (0, 8, ())
    assert second is not None
    assert tokens(worker.commit(first) + worker.commit(second)) == [(KEY, 3, 0)]
    worker.end_copies()  # what failed goes down once more
    worker.assert_idle()


def test_what_was_loaded_before_the_failure_is_kept() -> None:
    worker = worker_with_a_hit()
    worker.near_end()
    plan = planned(worker)
    [copy] = worker.copies
    worker.core.handle_copy_result(CopyResult(copy.copy_id, 1, "damaged"), worker.now)
    worker.commit(plan)
    [chunk] = planned(worker).chunks
    assert (chunk.start, len(chunk.token_ids), chunk.gates) == (4, 6, ())


def test_a_load_that_is_not_trusted_any_more_is_computed() -> None:
    worker = worker_with_a_hit()
    worker.near_end()
    plan = planned(worker)
    worker.core.state.blocks.forget_prefixes()
    assert tokens(worker.commit(plan) + worker.end_copy()) == []
    assert planned(worker).chunks[0].start == 0


def test_a_step_that_fails_although_its_load_is_good_fails_its_request() -> None:
    worker = worker_with_a_hit()
    worker.near_end()
    planned(worker)
    worker.core.fail_step("device on fire", worker.now)
    assert not sent(worker.tick(), RequestFailed)
    [failure] = sent(worker.end_copy(), RequestFailed)
    assert isinstance(failure, RequestFailed) and failure.message == "device on fire"
    worker.assert_idle()


def test_a_load_with_a_step_is_not_given_up() -> None:
    worker = worker_with_a_hit()
    worker.near_end()
    plan = planned(worker)
    worker.wait(20.0)  # its deadline is long over
    assert tokens(worker.commit(plan) + worker.end_copy()) == [(KEY, 3, 8)]
    assert worker.core.load().tier_failures == 0


@pytest.mark.parametrize("load_ends_first", [True, False])
def test_blocks_of_an_aborted_request_stay_until_step_and_load_are_over(load_ends_first: bool) -> None:
    worker = worker_with_a_hit()
    worker.near_end()
    plan = planned(worker)
    worker.hear(ROUTER, Abort(KEY))
    held = worker.core.load().blocks_referenced
    assert held == 3
    ends = [worker.end_copy, lambda: worker.commit(plan)]
    first, second = ends if load_ends_first else reversed(ends)
    assert tokens(first()) == [] and worker.core.load().blocks_referenced == held
    assert tokens(second()) == []
    worker.assert_idle()


def test_steps_behind_it_count_after_it() -> None:
    """And there are two at most, as ever."""
    worker = worker_with_a_hit(max_tokens=2)
    worker.near_end()
    gated = planned(worker)
    worker.hear(ROUTER, local(OTHER, [7, 7, 7]))
    other = planned(worker)
    assert other.gates == ()
    assert tokens(worker.commit(gated) + worker.commit(other, token=5)) == []
    assert worker.plan() is None
    assert tokens(worker.end_copy()) == [(KEY, 3, 8), (OTHER, 5, 0)]
    assert tokens(worker.commit(planned(worker), token=6)) == [(KEY, 6, 8)], "it decodes"
    worker.assert_idle()


def test_decode_hears_of_blocks_when_they_are_good() -> None:
    worker = Worker(Role.PREFILL, PREFILL, num_blocks=NUM_BLOCKS, num_slots=8)
    for key in (OTHER, KEY):
        worker.hear(ROUTER, prefill_request(key))
        worker.hear(DECODE, grant(key))
        if key == OTHER:
            worker.run()
            worker.hear(DECODE, Release(OTHER, True))
            worker.core.state.blocks.pool.clear_prefix_index()
    worker.near_end()
    plan = planned(worker)
    assert plan.gates
    assert not sent(worker.commit(plan), Offer)
    effects = worker.end_copy()
    [offer] = sent(effects, Offer)
    assert isinstance(offer, Offer) and offer.last and len(offer.spans[0].blocks) == 3
    assert tokens(effects) == [(KEY, 3, 8)]
    worker.wait(PROTOCOL.lease_seconds + 1.0)


# ---- groups of layers ----


def test_groups_of_layers() -> None:
    sizes = {num: [group.num_layers for group in layer_groups(num)] for num in (1, 2, 4, 16, 28, 32)}
    assert sizes[1] == [1] and sizes[2] == [1, 1] and sizes[4] == [1, 1, 1, 1]
    assert sizes[16] == [4, 4, 4, 2, 1, 1]
    assert sizes[28] == [6, 7, 7, 4, 2, 1, 1]
    assert sizes[32] == [8, 8, 8, 4, 2, 1, 1]
    for num_layers in range(1, 130):
        groups = layer_groups(num_layers)
        layers = [layer for first, count in groups for layer in range(first, first + count)]
        assert layers == list(range(num_layers))
        assert groups[-1].num_layers == 1


def test_a_launch_waits_until_copies_are_queued_and_for_no_load_that_is_over() -> None:
    gates, seen, events = LoadGates(4), [], ["first", "second"]

    def launch() -> None:
        for layer in gates.first_layers:
            seen.append(gates.event(7, layer))

    assert gates.event(7, 0) is None, "it isn't there"
    gates.open(7)
    launching = threading.Thread(target=launch, daemon=True)
    launching.start()
    for group, event in zip(gates.groups[:2], events, strict=True):
        launching.join(0.02)
        assert launching.is_alive()
        gates.queued(7, group, event)  # type: ignore[arg-type]
    wait_until(lambda: seen)
    gates.close(7)
    launching.join(PATIENCE_SECONDS)
    assert seen[0] == "first" and seen[1:] in (["second", None, None], [None, None, None])


class GatedStore:
    """Tells of the load's near end in its middle; ``fails`` after that."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.told = threading.Event()

    def load_gated(self, copy_id: int, block_ids: Any, slots: Any, tell_near_end: Any) -> None:
        tell_near_end()
        assert self.told.wait(PATIENCE_SECONDS)
        if self.fails:
            raise RuntimeError("gone")

    def store(self, block_ids: Any, slots: Any, hashes: Any) -> None: ...

    load = store

    def clear(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("fails", [False, True])
def test_the_near_end_is_told_before_the_end(fails: bool) -> None:
    woken, store = threading.Semaphore(0), GatedStore(fails=fails)
    copies = LocalTierCopier({"host": store}, woken.release)
    copies.start(CopyCommand(4, "host", True, [1, 2], [3, 4], [b"a", b"b"]))
    assert woken.acquire(timeout=PATIENCE_SECONDS)
    assert copies.results() == [CopyNearsEnd(4)]
    store.told.set()
    assert woken.acquire(timeout=PATIENCE_SECONDS)
    [result] = copies.results()
    assert isinstance(result, CopyResult) and (result.copy_id, result.num_good) == (4, 0 if fails else 2)
    copies.start(CopyCommand(5, "host", False, [1], [3], [b"a"]))
    assert woken.acquire(timeout=PATIENCE_SECONDS)
    assert [result.copy_id for result in copies.results()] == [5]
    copies.close(PATIENCE_SECONDS)
