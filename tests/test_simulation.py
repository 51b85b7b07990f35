"""Production cores under seeded faults: every schedule ends with right tokens and with every count back.

And the other way round: bugs planted one at a time are found within a bounded number of schedules, so the checks bite.
"""

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulated_router import SimRequest
from simulator import PROTOCOL, VOCAB, Faults, Simulator, run_schedule
from splitserve.config import ProtocolConfig
from splitserve.decode.sink import SinkSide
from splitserve.handover import Offer, ReadResult, SinkHandover, SourceHandover
from splitserve.kvconnector.block_pool import BlockPool
from splitserve.prefill.core import PrefillCore
from splitserve.prefill.sequence import BlockManager, Sequence
from splitserve.router.request_state import Update
from splitserve.step import StepPlan


def protocol(**changes: float) -> ProtocolConfig:
    return ProtocolConfig(**{name: getattr(PROTOCOL, name) for name in PROTOCOL.__struct_fields__} | changes)


SHORT_LEASES = protocol(lease_seconds=1.0, renew_interval_seconds=0.3)
PATIENT = protocol(dead_after_seconds=30.0, lease_seconds=30.0)

SHAPES = {
    "1P1D": {"prefill": 1, "decode": 1},
    "2P2D": {"prefill": 2, "decode": 2},
    "mixed": {"prefill": 0, "decode": 0, "mixed": 1},
    "1P1D, little memory": {"prefill": 1, "decode": 1, "num_blocks": 16},
}
QUIET = Faults()
LOSSY = Faults(drop=0.2, duplicate=0.2, max_delay=0.3)
BAD_READS = Faults(read_error=0.2, read_stuck=0.1)
ABORTS = Faults(abort=0.5, max_delay=0.1)
STEP_ERRORS = Faults(step_error=0.1)
SLOW_READS = Faults(read_seconds=0.1)
LEASES_EXPIRE = Faults(partitions=2, read_seconds=1.0)
EVERYTHING = Faults(
    drop=0.1,
    duplicate=0.1,
    max_delay=0.3,
    read_error=0.1,
    read_stuck=0.1,
    abort=0.3,
    step_error=0.03,
    partitions=1,
)
CAN_FAIL = (STEP_ERRORS, EVERYTHING)  # elsewhere every request that isn't aborted ends with all its tokens

seeds = st.integers(0, 2**32)
shapes = st.sampled_from(sorted(SHAPES))
bounded = settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])


@given(seed=seeds, shape=st.sampled_from(["1P1D", "2P2D", "1P1D, little memory"]))
@bounded
def test_a_quiet_schedule_hands_every_request_over(seed: int, shape: str) -> None:
    sim = run_schedule(seed, QUIET, **SHAPES[shape])
    expected = sum(len(request.output) > 1 for request in sim.router.requests.values())
    assert sim.num_handovers == expected, "a first token that ends its request cancels the hand-over"
    assert sim.num_handover_failures == 0
    assert all(request.failed is None for request in sim.router.requests.values())


@given(seed=seeds, shape=st.sampled_from(["1P1D", "2P2D"]))
@bounded
def test_lost_messages_cost_time_only(seed: int, shape: str) -> None:
    sim = run_schedule(seed, LOSSY, protocol=PATIENT, **SHAPES[shape])
    assert sim.num_handover_failures == 0
    assert sim.num_handovers == sum(len(request.output) > 1 for request in sim.router.requests.values())


@pytest.mark.parametrize(
    ("faults", "settings_of_protocol"),
    [
        (LOSSY, PROTOCOL),
        (BAD_READS, PROTOCOL),
        (ABORTS, PROTOCOL),
        (STEP_ERRORS, PROTOCOL),
        (LEASES_EXPIRE, SHORT_LEASES),
        (EVERYTHING, PROTOCOL),
        (EVERYTHING, SHORT_LEASES),
    ],
    ids=["lossy", "bad reads", "aborts", "step errors", "leases expire", "everything", "everything, short leases"],
)
@given(seed=seeds, shape=shapes)
@bounded
def test_every_schedule_ends_well(faults: Faults, settings_of_protocol: ProtocolConfig, seed: int, shape: str) -> None:
    sim = run_schedule(seed, faults, protocol=settings_of_protocol, **SHAPES[shape])
    if faults not in CAN_FAIL:
        assert [request.failed for request in sim.router.requests.values() if request.failed] == []


@given(
    seed=seeds,
    shape=shapes,
    faults=st.builds(
        Faults,
        drop=st.floats(0, 0.4),
        duplicate=st.floats(0, 0.4),
        max_delay=st.floats(0.001, 1.0),
        read_error=st.floats(0, 0.4),
        read_stuck=st.floats(0, 0.3),
        abort=st.floats(0, 1),
        step_error=st.floats(0, 0.2),
        read_seconds=st.floats(0.001, 2.0),
        partitions=st.integers(0, 3),
        partition_seconds=st.floats(0.1, 12.0),
    ),
)
@bounded
def test_any_mix_of_faults(seed: int, shape: str, faults: Faults) -> None:
    run_schedule(seed, faults, **SHAPES[shape])


def test_the_same_seed_gives_the_same_schedule() -> None:
    first, second = (run_schedule(5, EVERYTHING, **SHAPES["2P2D"]) for _ in range(2))
    assert first.trace == second.trace
    assert first.trace != run_schedule(6, EVERYTHING, **SHAPES["2P2D"]).trace


# ---- planted bugs ----

Plant = Callable[[pytest.MonkeyPatch], None]


def generations_unchecked(patch: pytest.MonkeyPatch) -> None:
    original = SinkHandover.on_read_result

    def believe(self: SinkHandover, result: ReadResult, now: float) -> None:
        read = self.reads_in_flight.get(result.read_id)
        if read is not None and result.error is None:
            result = dataclasses.replace(result, generations=[block.generation for block in read.remote])
        original(self, result, now)

    patch.setattr(SinkHandover, "on_read_result", believe)


def published_before_verified(patch: pytest.MonkeyPatch) -> None:
    original = SinkSide._keep_verified

    def publish_early(self: SinkSide, sequence: Sequence, handover: SinkHandover) -> None:
        original(self, sequence, handover)
        num_computed = sequence.num_computed
        posted = handover.first_block + handover.statistics.num_blocks
        sequence.num_computed = min(posted * self._state.blocks.block_size, len(sequence.token_ids))
        self._state.blocks.publish_computed(sequence)
        sequence.num_computed = num_computed

    patch.setattr(SinkSide, "_keep_verified", publish_early)


def freed_while_a_read_is_in_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "quarantine", BlockPool.release)
    patch.setattr(BlockPool, "lift_quarantine", lambda self, block_ids: None)


def offered_before_the_step_completed(patch: pytest.MonkeyPatch) -> None:
    original = PrefillCore.plan_step

    def offer_at_launch(self: PrefillCore, now: float) -> StepPlan | None:
        plan = original(self, now)
        for planned in self._step:
            if planned.chunk.sample is None:
                planned.sequence.num_computed += len(planned.chunk.token_ids)
                self.source.on_computed(planned.sequence, now)
                planned.sequence.num_computed -= len(planned.chunk.token_ids)
        self.source.poll(now)
        return plan

    patch.setattr(PrefillCore, "plan_step", offer_at_launch)


def offers_sent_once(patch: pytest.MonkeyPatch) -> None:
    original = SourceHandover.poll

    def send_once(self: SourceHandover, now: float) -> Offer | None:
        offer = original(self, now)
        self._offer_due_at = float("inf")
        return offer

    def renew_only(self: SourceHandover, now: float) -> None:
        self.lease_expires_at = now + self._lease_seconds

    patch.setattr(SourceHandover, "poll", send_once)
    patch.setattr(SourceHandover, "renew", renew_only)


def generation_kept_when_taken(patch: pytest.MonkeyPatch) -> None:
    original = BlockPool.allocate

    def take(self: BlockPool, num_blocks: int, *, after: int | None = None) -> list[int] | None:
        taken = original(self, num_blocks, after=after)
        for block_id in taken or ():
            self._generations[block_id] -= 1
        return taken

    patch.setattr(BlockPool, "allocate", take)


def blocks_given_back_during_a_step(patch: pytest.MonkeyPatch) -> None:
    def drop_now(self: object, sequence: Sequence) -> None:
        sequence.ended = True
        in_step, sequence.in_step = sequence.in_step, False
        self.blocks.give_back(sequence)  # type: ignore[attr-defined]
        sequence.in_step = in_step

    patch.setattr("splitserve.prefill.engine_state.EngineState.drop_blocks", drop_now)


def published_before_computed(patch: pytest.MonkeyPatch) -> None:
    original = BlockManager.reserve

    def reserve(self: BlockManager, sequence: Sequence, headroom: int = 0) -> bool:
        if not original(self, sequence, headroom):
            return False
        computed, sequence.num_computed = sequence.num_computed, len(sequence.token_ids)
        self.publish_computed(sequence)
        sequence.num_computed = computed
        return True

    patch.setattr(BlockManager, "reserve", reserve)


def release_never_sent(patch: pytest.MonkeyPatch) -> None:
    original = Simulator.send

    def send(self: Simulator, sender: object, to: object, body: object) -> None:
        if type(body).__name__ != "Release":
            original(self, sender, to, body)  # type: ignore[arg-type]

    def never(self: SourceHandover, now: float) -> Offer | None:
        self.lease_expires_at = float("inf")
        return poll(self, now)

    poll = SourceHandover.poll
    patch.setattr(Simulator, "send", send)
    patch.setattr(SourceHandover, "poll", never)


def one_lossy_schedule(seed: int) -> None:
    sim = run_schedule(seed, LOSSY, protocol=PATIENT)
    assert sim.num_handover_failures == 0


def one_schedule(faults: Faults, **options: object) -> Callable[[int], None]:
    def run(seed: int) -> None:
        run_schedule(seed, faults, **options)  # type: ignore[arg-type]

    return run


EXPIRING = one_schedule(LEASES_EXPIRE, protocol=SHORT_LEASES, decode=2, num_blocks=16, num_requests=24)


@pytest.mark.parametrize(
    ("plant", "run"),
    [
        (generations_unchecked, EXPIRING),
        (generation_kept_when_taken, EXPIRING),
        (published_before_verified, one_schedule(SLOW_READS)),
        (freed_while_a_read_is_in_flight, one_schedule(BAD_READS)),
        (offered_before_the_step_completed, one_schedule(QUIET)),
        (offers_sent_once, one_lossy_schedule),
        (blocks_given_back_during_a_step, one_schedule(ABORTS)),
        (published_before_computed, one_schedule(QUIET)),
        (release_never_sent, one_schedule(QUIET)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_bug_is_found(plant: Plant, run: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    num_schedules = 300
    plant(monkeypatch)
    for seed in range(num_schedules):
        try:
            run(seed)
        except (AssertionError, KeyError, IndexError):
            return
    pytest.fail(f"{num_schedules} schedules didn't notice")


def test_a_preempted_request_is_not_overtaken_by_newcomers_for_ever() -> None:
    sim = Simulator(1, QUIET, num_blocks=16)
    ends: dict[str, float] = {}
    original = sim.router.apply

    def apply(request: SimRequest, update: Update) -> None:
        if update.ended:
            ends[request.state.request_id] = sim.now
        original(request, update)

    sim.router.apply = apply  # type: ignore[method-assign]
    num_requests, interval_seconds = 200, 0.012  # faster than they can be served
    for index in range(num_requests):
        prompt = [sim.random.randrange(VOCAB) for _ in range(sim.random.choice([3, 9, 17, 30]))]
        sim.at(index * interval_seconds, lambda i=index, p=prompt: sim.router.submit(f"r{i}", p, 20))  # type: ignore[misc]
    sim.run(until=300.0)
    sim.check_end()
    decode = next(worker for worker in sim.workers.values() if worker.party.engine_id == "decode-0")
    assert decode.core.load().preemptions > 0
    first_ones = [ends[f"r{index}"] for index in range(10)]
    assert max(first_ones) < max(ends.values()) / 4, "first come, first served"
