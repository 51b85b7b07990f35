"""Prompts beside outputs on one worker, as the policy ``cost`` predicts them: plain snapshots."""

import pytest

from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Party, Role
from splitserve.router.placement.cost import cost
from splitserve.router.placement.policies import Disaggregated, Local, RequestShape, Snapshot
from splitserve.router.placement.worker_times import RESIDUAL, later_prompts
from splitserve.router.requests.objectives import Objectives
from worker_views import view

MODEL = StepModel(base=5e-3, per_decode=2e-5, per_context=4e-8, per_token=2e-5, per_pair=0.0, num_steps=1000)
NONE, LOOSE, TIGHT = Objectives(0.0, 0.0), Objectives(0.5, 0.03), Objectives(0.5, 0.012)
SHAPE = RequestShape(1024, 128)
USUAL = {"prompt_seconds": 0.0255}
"""Prompts of 1,024 tokens."""


def worker(name, role, *, running=0, waiting=0, length=1024, **fields):
    sizes = {"max_num_seqs": 64, "max_model_len": 100_000, "kv_capacity_tokens": 800_000}
    counts = {"num_requests": running + waiting, "num_decoding": running, "decoding_tokens": running * length}
    chunks = {"chunk_tokens": 8192, "shared_chunk_tokens": 320, "step_model": MODEL, "token_bytes": 1 << 17}
    links = {"link_rates": {"p": 1e11, "p0": 1e11, "p1": 1e11}}
    return view(name, role, **(sizes | counts | chunks | links | {"context_tokens": running * length} | fields))


def place(*workers, objectives=NONE, shape=SHAPE):
    return cost(Snapshot(tuple(workers), objectives, output_tokens=shape.max_tokens), shape)


def test_a_prompt_beside_an_output_takes_the_step_in_flight_and_a_step_per_chunk():
    """26 chunks of 8,192 tokens, each in a step that also decodes: the sum of the steps, without their base twice."""
    mixed = worker("m", Role.MIXED, running=1, num_placed=1)
    step = MODEL.decode_seconds(1, 1024 + 64)
    placement = place(mixed, shape=RequestShape(8192, 128))
    assert placement.ttft_seconds == pytest.approx(RESIDUAL * step + 26 * step + 8192 * MODEL.per_token)


def test_prompts_that_come_later_interrupt_an_output_by_the_chunks_of_mixed_steps():
    """Not by the large chunk in which an idle worker computes this prompt."""
    busy = {"prefill_busy": 0.1, "prompt_share": 0.2, "prompt_seconds": 0.17}
    idle, other = worker("m0", Role.MIXED, **busy), worker("m1", Role.MIXED, running=2, waiting=1, **busy)
    assert place(idle, other, objectives=LOOSE, shape=RequestShape(8192, 64)) == Local(idle.party)


def test_on_a_young_cluster_prompts_of_decode_workers_tell_how_many_will_come_to_prefill():
    """The first request of an idle cluster stayed on the decode worker, so prefill has had none."""
    prefill = worker("p", Role.PREFILL)
    decode = worker("d", Role.DECODE, running=1, prompt_share=0.5, **USUAL)
    assert place(prefill, decode) == Disaggregated(prefill.party, decode.party)


def test_a_queue_counts_as_long_as_it_takes_beside_outputs():
    decode = worker("d", Role.DECODE, running=8)
    mixing = worker("p0", Role.PREFILL, running=4, queue_seconds=0.1, prompt_share=0.5, **USUAL)
    plain = worker("p1", Role.PREFILL, queue_seconds=0.13, prompt_share=0.5, num_placed=9, **USUAL)
    assert place(mixing, plain, decode) == Disaggregated(plain.party, decode.party)


def test_an_output_keeps_off_a_prefill_worker_that_could_not_keep_up_beside_it():
    """Prompts fill 0.9 of its time, and beside outputs they take 1.6 times as long."""
    decode = worker("d", Role.DECODE, running=39)
    prefill = worker("p", Role.PREFILL, waiting=1, queue_seconds=0.026, prompt_share=0.9, prefill_busy=0.05, **USUAL)
    assert place(prefill, decode, objectives=TIGHT) == Disaggregated(prefill.party, decode.party)
    quiet = worker("p", Role.PREFILL, prompt_share=0.02, prefill_busy=0.02, **USUAL)
    assert place(quiet, decode, objectives=TIGHT) == Local(quiet.party)


def test_an_output_on_prefill_delays_prompts_the_more_the_busier_it_is():
    step = MODEL.decode_seconds(1, 1088)

    def added(share, running=0, objective=1.0):
        prefill = worker("p", Role.PREFILL, running=running)
        before = MODEL.decode_seconds(running, running * 1088) if running else 0.0
        later = later_prompts(prefill, 0.0255, share, 128, (before, step), objective=objective)
        return sum(later.after) - sum(later.before)

    assert 0.0 < added(0.3) < added(0.5) / 2, "longer steps, and longer waits for each other"
    assert added(0.9) > 2 * added(0.6), "and a queue that grows"
    assert added(0.3, objective=0.0) == pytest.approx(added(0.6, objective=0.0)), "longer steps alone"
    assert added(0.9, objective=0.0) > 5 * added(0.6, objective=0.0)
    assert added(0.9, running=8) < added(0.9) / 2, "the worker mixes already"


def test_outputs_leave_a_full_decode_worker_before_requests_wait_there():
    """Each that waits keeps those after it waiting, too."""
    shape = RequestShape(2048, 512)
    prefill = worker("p", Role.PREFILL, prompt_share=0.4, prefill_busy=0.3, prompt_seconds=0.046)
    full = worker("d", Role.DECODE, running=64, length=2048)
    room = worker("d", Role.DECODE, running=48, length=2048)
    assert place(prefill, full, objectives=LOOSE, shape=shape) == Local(Party("p", 1))
    assert place(prefill, room, objectives=LOOSE, shape=shape) == Disaggregated(prefill.party, room.party)


def test_a_prefill_worker_without_a_model_takes_part():
    """It has just registered, and other workers have told theirs."""
    prefill = worker("p", Role.PREFILL, step_model=StepModel())
    decode = worker("d", Role.DECODE, running=1, prompt_share=0.5, **USUAL)
    assert place(prefill, decode).parties[0] == prefill.party
