"""The queue begins what can begin, whatever its head waits for; and predicts waits where requests seldom begin."""

from collections import Counter
from collections.abc import Iterator

import pytest

from full_worker import CLASSES, WORKER, FullWorker
from splitserve.protocol.cluster_report import WorkerLoad
from splitserve.protocol.messages.routers import RouterReport, WorkerUse
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Party, Role
from splitserve.router.http.api_error import ApiError
from splitserve.router.peers import peers
from splitserve.router.placement.policies import NoWorker, Placed
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.effects import SetTimer
from splitserve.router.requests.events import (
    Cancel,
    FromRouter,
    MeetRouters,
    PauseMode,
    PauseRequests,
    ResumeRequests,
    Timer,
    TimerFired,
    TimerKind,
)
from splitserve.router.requests.queue.fair_queue import BeginRate
from splitserve.router.requests.queue.gate import (
    MORE_TRIES,
    TRIES_OF_TENANT,
    TRY_MORE,
    TURN_SECONDS,
    WORKERS_OF_TURN,
)
from splitserve.router.requests.queue.tenants import Tenant
from splitserve.router.requests.queue.usage import TenantUsage

RESTARTED, OTHER = Party("m0", 2), Party("m1", 1)


def queued(full: FullWorker) -> list[str]:
    return [request.request_id for request in full.core.gate.queue.requests()]


def test_a_request_that_no_worker_takes_any_more_does_not_keep_others_waiting() -> None:
    full = FullWorker()
    full.submit("runs", "batch")
    full.submit("long", "batch", num_tokens=9_000)
    full.submit("short0", "batch")
    full.submit("short1", "batch")
    full.lose(WORKER)
    assert queued(full) == ["long", "short0", "short1"], "without a worker all keep their places"
    full.join(RESTARTED, max_model_len=4_000)
    full.finish_all()
    assert full.begun == ["runs", "short0", "short1"]
    full.now += 600.0
    full.handle(TimerFired(Timer(TimerKind.WAIT, "long")))
    assert "takes a sequence of 9010 tokens; the longest that they take has 4000" in full.refused["long"].reason
    assert full.refused["long"].retry_after_seconds == 0, "busy workers aren't the reason"
    assert not full.core.timers()


def test_a_request_that_waits_for_its_own_worker_lets_others_begin_elsewhere() -> None:
    full = FullWorker()
    full.join(OTHER, max_model_len=4_000)
    full.submit("runs", "batch", num_tokens=9_000)
    full.submit("long0", "batch", num_tokens=9_000)
    full.submit("short0", "batch")
    assert full.begun == ["runs", "short0"], "the other worker was idle"
    full.submit("long1", "batch", num_tokens=9_000)
    full.submit("short1", "batch")
    assert full.begun == ["runs", "short0"] and queued(full) == ["long0", "long1", "short1"]
    full.handle(Cancel("short0"))
    assert full.begun == ["runs", "short0", "short1"] and queued(full) == ["long0", "long1"]
    full.lose(WORKER)
    full.handle(Cancel("runs"))
    full.join(RESTARTED)
    assert full.begun == ["runs", "short0", "short1", "long0"], "the first in the queue is the first to be tried"


def test_only_a_few_of_those_who_wait_for_a_worker_are_tried_at_others(monkeypatch: pytest.MonkeyPatch) -> None:
    full = FullWorker()
    full.join(OTHER, max_model_len=4_000)
    full.submit("runs", "batch", num_tokens=9_000)
    full.submit("elsewhere", "batch")
    for number in range(20):
        full.submit(f"long{number}", "batch", num_tokens=9_000)
    full.submit("short", "batch")
    tried = Counter[str]()
    place = full.core.placer.first

    def first(request: ActiveRequest, now: float) -> Placed | NoWorker:
        tried[request.request_id] += 1
        return place(request, now)

    monkeypatch.setattr(full.core.placer, "first", first)
    full.handle(Cancel("elsewhere"))
    assert tried == {f"long{number}": 1 for number in range(TRIES_OF_TENANT + MORE_TRIES)}


@pytest.mark.parametrize("num_long", [TRIES_OF_TENANT, 30])
def test_an_idle_worker_gets_a_request_that_waits_behind_many_for_another_worker(num_long: int) -> None:
    full = FullWorker()
    full.join(OTHER, max_model_len=4_000)
    full.submit("runs", "batch", num_tokens=9_000)
    full.submit("elsewhere", "batch")
    for number in range(num_long):
        full.submit(f"long{number}", "batch", num_tokens=9_000)
    for number in range(3):
        full.submit(f"short{number}", "batch")
    full.finish("elsewhere")
    num_turns = full.try_more()
    assert full.begun == ["runs", "elsewhere", "short0"] and not full.core.timers() & {TRY_MORE}
    assert num_turns <= num_long / MORE_TRIES + 1
    full.finish("short0")
    full.try_more()
    assert full.begun[3:] == ["short1"], "the next one, though its turn had been the last"
    for number in range(num_long):
        full.handle(Cancel(f"long{number}"))
    full.finish("short1")
    full.finish("runs")
    full.try_more()
    assert full.begun[4:] == ["short2"] and not full.core.timers() & {TRY_MORE}


def test_nothing_more_is_tried_while_no_worker_that_decodes_has_room() -> None:
    full = FullWorker()
    full.join(Party("p0", 1), role=Role.PREFILL, slots=8)
    full.submit("runs", "batch")
    for number in range(20):
        full.submit(f"waits{number}", "batch")
    full.handle(Cancel("waits3"))
    assert full.try_more() == 0 and full.begun == ["runs"]


def test_a_pause_ends_the_search_for_a_request_that_may_begin_and_its_end_begins_it_anew() -> None:
    full = FullWorker()
    full.join(OTHER, max_model_len=4_000)
    full.submit("runs", "batch", num_tokens=9_000)
    full.submit("elsewhere", "batch")
    for number in range(30):
        full.submit(f"long{number}", "batch", num_tokens=9_000)
    full.submit("short", "batch")
    full.finish("elsewhere")
    assert TRY_MORE in full.core.timers()
    full.handle(PauseRequests(PauseMode.WAIT))
    full.try_more()
    assert full.begun == ["runs", "elsewhere"]
    full.handle(ResumeRequests())
    full.try_more()
    assert full.begun == ["runs", "elsewhere", "short"]


def test_requests_that_begin_behind_one_that_waits_for_long_leave_nothing_in_the_queue() -> None:
    full = FullWorker()
    full.join(OTHER, max_model_len=4_000)
    full.submit("runs", "batch", num_tokens=9_000)
    full.submit("long", "batch", num_tokens=9_000)
    for number in range(20):
        full.submit(f"short{number}", "batch")
    for request_id in [f"short{number}" for number in range(19)]:
        full.finish(request_id)
    assert queued(full) == ["long"] and full.begun[-1] == "short19"
    (lane,) = (lane for lanes in full.core.gate.queue._lanes.values() for lane in lanes.values())
    assert len(lane.waiting) == 1


def test_requests_keep_their_places_while_no_worker_decodes() -> None:
    full = FullWorker()
    full.submit("runs", "batch")
    full.submit("first", "batch")
    full.lose(WORKER)
    full.handle(Cancel("runs"))
    full.join(OTHER, role=Role.PREFILL)
    assert queued(full) == ["first"]
    full.join(RESTARTED)
    assert full.begun == ["runs", "first"]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[FullWorker]:
    """Two requests that have waited for a worker's prompt, which is computed by now, as predicted: no event told."""
    full = FullWorker(slots=2)
    model = StepModel(base=8e-3, per_token=8e-4, num_steps=1000)
    full.membership.heartbeat(WORKER, WorkerLoad(), full.now, step_model=model)
    full.submit("runs", "batch", num_tokens=1_000)
    full.submit("first", "batch")
    full.submit("second", "batch")
    assert queued(full) == ["first", "second"]
    full.now += 10.0
    yield full


def test_whoever_leaves_the_queue_lets_others_begin(held: FullWorker) -> None:
    held.handle(Cancel("first"))
    assert held.begun == ["runs", "second"]


def test_a_deadline_in_the_queue_lets_others_begin(held: FullWorker) -> None:
    held.handle(TimerFired(Timer(TimerKind.QUEUE, "first")))
    assert held.begun == ["runs", "second"] and held.refused.keys() == {"first"}


def test_a_newcomer_that_finds_room_lets_those_before_it_begin(held: FullWorker) -> None:
    held.submit("third", "batch")
    assert held.begun == ["runs", "first"] and queued(held) == ["second", "third"]


def test_a_newcomer_that_finds_no_room_lets_those_before_it_begin_if_no_end_will(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = FullWorker(slots=2)
    full.join(OTHER, max_model_len=20_000)
    model = StepModel(base=8e-3, per_token=8e-4, num_steps=1000)
    for worker in (WORKER, OTHER):
        full.membership.heartbeat(worker, WorkerLoad(), full.now, step_model=model)
    full.submit("elsewhere", "batch", num_tokens=15_000)
    full.submit("runs", "batch", num_tokens=1_000)
    full.submit("first", "batch")
    full.now += 10.0
    full.submit("second", "batch", num_tokens=15_000)
    assert full.begun == ["elsewhere", "runs"] and queued(full) == ["first", "second"]
    monkeypatch.setattr(full.core.gate, "_num_of_tenant", Counter())  # as if nothing ran here any more
    full.submit("third", "batch", num_tokens=15_000)
    assert full.begun == ["elsewhere", "runs", "first"] and queued(full) == ["second", "third"]


def test_a_newcomer_begins_where_there_is_room_that_the_queue_does_not_take() -> None:
    full = FullWorker()
    full.join(OTHER, max_model_len=4_000, slots=8)
    full.submit("runs", "batch", num_tokens=9_000)
    full.submit("long", "batch", num_tokens=9_000)
    for number in range(4):
        full.submit(f"short{number}", "batch")
    assert full.begun == ["runs", "short0", "short1", "short2", "short3"] and queued(full) == ["long"]


def test_a_newcomer_that_begins_at_once_is_not_refused_for_the_queue_of_another_worker() -> None:
    full = FullWorker()
    full.join(OTHER, max_model_len=4_000, slots=8)
    full.submit("runs", "batch", num_tokens=9_000, max_tokens=500)
    full.submit("short", "batch")
    for number in range(3):
        full.submit(f"long{number}", "batch", num_tokens=9_000)
    full.now += 10.0
    full.finish("runs")
    full.now += 10.0
    full.submit("urgent", num_tokens=9_000)
    full.submit("newcomer")
    assert full.begun == ["runs", "short", "long0", "newcomer"] and not full.refused
    assert queued(full) == ["long1", "long2", "urgent"]


def test_a_request_begins_when_a_router_that_filled_the_worker_falls_silent() -> None:
    full = FullWorker(name="router", peers={"router-1": "tcp://127.0.0.1:1"})
    full.handle(MeetRouters())
    use = WorkerUse(WORKER, 1)
    full.handle(FromRouter(Party("router-1", 1), RouterReport(1, 1, 1, 1, 0, workers=[use])))
    full.submit("waits", "batch")
    assert queued(full) == ["waits"]
    full.now += peers.LOST_SECONDS + 0.1
    full.handle(TimerFired(peers.REPORT))
    assert full.begun == ["waits"]


def test_the_first_token_of_a_retry_lets_others_begin() -> None:
    full = FullWorker(slots=8)
    full.join(OTHER, slots=8)
    model = StepModel(base=8e-3, per_token=8e-4, num_steps=1000)
    for worker in (WORKER, OTHER):
        full.membership.heartbeat(worker, WorkerLoad(), full.now, step_model=model)
    full.submit("a", "batch", num_tokens=1_000)
    placement = full.requests["a"].state.placement
    assert placement is not None
    full.token("a")
    full.lose(placement.parties[0])
    full.submit("b", "batch")
    assert full.requests["a"].state.num_attempts == 2 and queued(full) == ["b"]
    full.now += 1.0
    full.token("a")
    assert full.begun == ["a", "b"]


@pytest.mark.parametrize("model", [None, StepModel(base=20e-3, per_token=1e-4, num_steps=1000)])
@pytest.mark.parametrize("num_waiting", [1, 2, 7])
def test_waits_are_predicted_where_outputs_take_minutes(model: StepModel | None, num_waiting: int) -> None:
    """Four slots, outputs of 100 s: one request begins each 25 s, before those that wait."""
    full = FullWorker(slots=4)
    if model is not None:
        full.membership.heartbeat(WORKER, WorkerLoad(), full.now, step_model=model)
    for number in range(4):
        full.submit(f"first{number}", "batch")
        full.token(f"first{number}")
        full.now += 25.0
    for number in range(num_waiting):
        full.submit(f"waiting{number}", "batch")
    num_hopeless, objective = 0, CLASSES[1].ttft_ms / 1e3
    for round_ in range(12):
        full.submit(f"next{round_}", "batch", priority=0)
        full.finish(full.begun[round_])
        full.token(f"next{round_}")
        began_at = full.now
        for name, seconds in ((f"early{round_}", 1.0), (f"late{round_}", 24.0)):
            full.now = began_at + seconds
            wait = 25.0 * (1 + len(queued(full))) - seconds
            full.submit(name, "batch")
            assert name not in full.refused or wait > objective, full.refused[name].reason
            num_hopeless += name in full.refused
            full.handle(Cancel(name))
        full.now = began_at + 25.0
    assert full.begun[4:] == [f"next{round_}" for round_ in range(12)]
    assert (num_hopeless > 10) == (num_waiting == 7), "175 s are too long"
    assert all(refuse.retry_after_seconds < 400 for refuse in full.refused.values())


def test_a_rate_follows_a_change_in_either_direction() -> None:
    rate, now = BeginRate(), 0.0
    rate.advance(now, is_busy=True)

    def begin(count: int, seconds: float) -> float:
        nonlocal now
        for _ in range(count):
            now += seconds
            rate.advance(now, is_busy=True)
            rate.note_begun(100.0)
        return rate.tokens_per_second()

    assert begin(10, 25.0) == pytest.approx(4.0, rel=0.1)
    assert begin(100, 0.1) > 500.0
    assert begin(100, 0.1) == pytest.approx(1000.0, rel=0.1)
    assert begin(8, 25.0) == pytest.approx(4.0, rel=0.5)
    now += 3600.0
    rate.advance(now, is_busy=True)
    assert rate.tokens_per_second() == pytest.approx(400 / 3700, rel=0.2), "an hour without one tells no more than that"


def test_more_outputs_than_a_tenant_may_have_never_fit() -> None:
    usage, tenant = TenantUsage(), Tenant(name="team", max_requests_in_flight=2)
    with pytest.raises(
        ApiError, match=r"3 outputs in one request \(prompts times n\); at most 2 of team fit"
    ) as caught:
        usage.admit(tenant, 3, 0.0, "n")
    assert (caught.value.status, caught.value.param) == (400, "n")
    usage.admit(tenant, 2, 0.0)
    with pytest.raises(ApiError, match="try again") as caught:
        usage.admit(tenant, 1, 0.0)
    assert caught.value.status == 429


def test_turns_beside_many_workers_come_less_often() -> None:
    full = FullWorker()
    for number in range(31):
        full.join(Party(f"small{number}", 1), max_model_len=4_000)
    full.submit("runs", "batch", num_tokens=9_000)
    for number in range(30):
        full.submit(f"long{number}", "batch", num_tokens=9_000)
    effects = full.handle(Cancel("runs"))
    (timer,) = (each for each in effects if isinstance(each, SetTimer) and each.timer == TRY_MORE)
    assert timer.at == pytest.approx(full.now + 32 / WORKERS_OF_TURN * TURN_SECONDS)
