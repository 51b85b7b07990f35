"""Prompts that interrupt other requests: their share of a worker's time, and what placement makes of it."""

import math
import random
from dataclasses import dataclass, replace

import pytest

from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Party, Role
from splitserve.router.links.membership import Membership
from splitserve.router.links.worker_record import Charge
from splitserve.router.placement.policies import Disaggregated, Local, RequestShape
from splitserve.router.placement.prefill_queue import BUSY_SECONDS
from splitserve.simulation.replay.cluster import ClusterSpec, ReplayCluster, pool
from splitserve.simulation.replay.generated import Conversations
from splitserve.simulation.replay.worker import WorkerSpec
from worker_views import info

MODEL = StepModel(base=5e-3, per_decode=1e-4, per_context=1e-6, per_token=1e-4, per_pair=0.0, num_steps=1000)
NAMES = {"p": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}


@dataclass(eq=False)
class Sent:
    """A request of a random schedule."""

    charge: Charge
    worker: str  # of its prompt
    seconds: float  # of its prompt
    begin: float
    end: float = math.inf
    counts_from: float = math.inf  # time at which another request was first in flight as well


class Schedule:
    """Requests on three workers of a membership."""

    def __init__(self) -> None:
        self.members = Membership(1e9, 1e9)
        self.sent: list[Sent] = []
        for name, role in NAMES.items():
            self.members.register(Party(name, 1), info(name, role=role, max_num_batched_tokens=512), 0.0)
            self.record(name).step_model = MODEL

    def record(self, name: str):
        record = self.members.get(Party(name, 1))
        assert record is not None
        return record

    def send(self, placement: Disaggregated | Local, num_tokens: int, now: float) -> Sent:
        charge = self.members.charge(placement, RequestShape(num_tokens, 8), now)
        request = Sent(charge, placement.parties[0].engine_id, MODEL.prefill_seconds(0, num_tokens, 512), now)
        others = [each for each in self.sent if each.end == math.inf]
        for each in [request, *others] if others else []:
            each.counts_from = min(each.counts_from, now)
        self.sent.append(request)
        return request

    def end(self, request: Sent, now: float) -> None:
        request.charge.release(now)
        request.end = now

    def share(self, name: str, now: float) -> float:
        """Return the share of the time since a worker's first prompt that those took that met another request."""
        prompts = [each for each in self.sent if each.worker == name]
        if not prompts:
            return 0.0
        counted = [each for each in prompts if each.counts_from < math.inf]
        seconds = sum(each.seconds * math.exp((each.counts_from - now) / BUSY_SECONDS) for each in counted)
        in_all = BUSY_SECONDS * (1.0 - math.exp((prompts[0].begin - now) / BUSY_SECONDS))
        return min(1.0, seconds / in_all) if in_all else float(seconds > 0.0)


@pytest.mark.parametrize("seed", range(8))
def test_the_share_of_interrupting_prompts_is_that_of_a_plain_sum(seed: int) -> None:
    chosen, schedule, now = random.Random(seed), Schedule(), 50.0
    num_counted = 0
    for _ in range(150):
        now += chosen.expovariate(chosen.choice([0.3, 3.0]))
        running = [each for each in schedule.sent if each.end == math.inf]
        if running and chosen.random() < 0.5:
            schedule.end(chosen.choice(running), now)
        else:
            decode = Party(chosen.choice(["d0", "d1"]), 1)
            placement = Local(decode) if chosen.random() < 0.5 else Disaggregated(Party("p", 1), decode)
            request = schedule.send(placement, chosen.choice([10, 500, 3000]), now)
            if chosen.random() < 0.5:
                request.charge.first_token_out(now)
        later = now + chosen.choice([0.0, 0.0, 1.0, 100.0])
        for name in NAMES:
            expected = schedule.share(name, later)
            assert schedule.record(name).view(later).prompt_share == pytest.approx(expected, rel=1e-4)
            num_counted += 0.0 < expected < 1.0
        schedule.members.check_invariants()
    assert num_counted > 100


def test_a_client_that_waits_for_its_answers_interrupts_nothing() -> None:
    schedule, decode, now = Schedule(), Party("d0", 1), 50.0
    for _ in range(20):
        request = schedule.send(Local(decode), 1000, now)
        request.charge.first_token_out(now + 0.1)
        schedule.end(request, now + 0.4)
        now += 0.5
    view = schedule.record("d0").view(now)
    assert view.prompt_share == 0.0 and view.prefill_busy > 0.05 and view.prompt_seconds > 0.1


@pytest.mark.parametrize("per_token", [1e-5, 2.4e-5, 1e-4])
def test_on_an_idle_cluster_each_turn_is_computed_where_its_conversation_is(per_token: float) -> None:
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
            before = found[number - 1]
            assert (turn.is_local, turn.prefill) == (True, before.prefill)
            assert turn.cached_tokens > requests[number - 1].num_prompt_tokens - 512


def test_a_single_fit_of_a_pool_is_trusted_alike_for_all_of_its_workers() -> None:
    """Else a conversation would leave its worker for one that only seems quicker."""
    estimate = StepModel(2e-3, 9e-5, 7e-7, 7e-5, 1e-7)
    wild = StepModel(9e-3, 1e-4, 5e-6, 5e-4, 1e-7, num_steps=200)  # some coefficients are beyond its bounds
    schedule = Schedule()
    for name, model in (("d0", estimate), ("d1", estimate), ("d0", wild), ("d1", estimate)):
        schedule.members.heartbeat(Party(name, 1), schedule.record(name).load, 1.0, step_model=model)
    fitted, other = (schedule.record(name).step_model.coefficients for name in ("d0", "d1"))
    assert fitted == other != wild.coefficients
