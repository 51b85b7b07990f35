"""The whole engine loop, with real sockets and a clock for a device: tokens, failing steps, a device that is lost."""

import logging
import threading
import time
from array import array
from dataclasses import replace
from types import SimpleNamespace

import pytest
import zmq

from running_loop import ILLEGAL, FaultyRunner, running
from splitserve.benchmarks.engine.direct_router import DirectRouter
from splitserve.benchmarks.engine.paced_worker import build_loop
from splitserve.common.errors import DeviceLostError
from splitserve.engine.effects import StartRead
from splitserve.engine.loop import WorkerLoop
from splitserve.engine.steps.executor import StepExecutor
from splitserve.engine.steps.step_fit import MIN_FITTED_STEPS, StepFit
from splitserve.protocol.handover.reads import ReadCommand
from splitserve.protocol.messages.envelope import Body, Envelope
from splitserve.protocol.messages.membership import Heartbeat, Leave
from splitserve.protocol.messages.requests import FailureCode, LocalRequest, StepTokens
from splitserve.protocol.placement.step_model import StepModel, StepWork
from splitserve.protocol.request import Party, RequestKey, SamplingParams
from splitserve.protocol.step import UNKNOWN_TOKEN, Draw, StepOutput, StepPlan
from splitserve.protocol.wire import encode
from waiting import PATIENCE_SECONDS, wait_until


def test_every_token_comes_once_and_the_device_gets_its_next_step_in_time() -> None:
    runner = FaultyRunner()
    with running(runner) as run:
        for index in range(5):
            run.submit(f"r{index}", num_tokens=100 + index, max_tokens=40)
        run.submit("last", max_tokens=200)
        assert len(run.tokens_of("last")) == 200
    follow_ups = [plan for plan in runner.plans if UNKNOWN_TOKEN in [c.token_ids[0] for c in plan.chunks]]
    assert len(follow_ups) > 100, "steps were launched before the results of those before them were here"
    assert run.error is None


class QuickRunner:
    """Steps that take no time."""

    def run(self, plan: StepPlan) -> StepOutput:
        return StepOutput([None if chunk.sample is None else Draw((7,)) for chunk in plan.chunks])


def test_the_loops_time_between_steps_counts_where_they_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions by the fitted model, and plans by a calibration, would else be too quick."""
    loop_seconds = 0.004
    with running(FaultyRunner()) as run:
        loop, commit_step = run.loop, run.loop._core.commit_step

        def commit_slowly(outcome: StepOutput, now: float) -> None:
            time.sleep(loop_seconds)
            commit_step(outcome, now)

        monkeypatch.setattr(loop._core, "commit_step", commit_slowly)
        monkeypatch.setattr(loop, "_step_fit", StepFit(StepModel(1e-3, 1e-4, 1e-7, 1e-6, 1e-9)))
        executor = StepExecutor(QuickRunner(), loop._io.waker.wake)
        loop._io.executor.close(1.0)
        monkeypatch.setattr(loop, "_io", replace(loop._io, executor=executor))
        run.submit("r", max_tokens=2 * MIN_FITTED_STEPS)
        assert run.tokens_of("r") == [7] * (2 * MIN_FITTED_STEPS)
        assert loop._step_fit.model.num_steps >= MIN_FITTED_STEPS
        assert loop._step_fit.model.seconds(StepWork(1, 40)) > 0.9 * loop_seconds


def test_a_launch_is_put_off_for_a_sequence_whose_kv_is_landing() -> None:
    plans, launched, may_wait = iter("abc"), [], [True, False]
    core = SimpleNamespace(is_landing=True, plan_step=lambda _now: next(plans))
    executor = SimpleNamespace(has_room=True, is_idle=True, put_off=lambda: may_wait.pop(0))

    def launch(plan: str) -> None:
        launched.append(plan)
        executor.has_room = False

    executor.launch = launch
    loop = object.__new__(WorkerLoop)
    loop._step_end, loop._error, loop._core, loop._io = None, None, core, SimpleNamespace(executor=executor)  # type: ignore[assignment]
    loop._launch(0.0)
    assert launched == [], "a moment later the sequence may be there"
    loop._launch(0.0)
    assert launched == ["a"], "it can't be put off any longer"
    core.is_landing, executor.has_room = False, True
    loop._launch(0.0)
    assert launched == ["a", "b"] and may_wait == []


class Awaited:
    """A connector with reads that take ``num_turns`` more turns of the loop."""

    def __init__(self, num_turns: int, *, awaits_beside_steps: bool) -> None:
        self.num_turns = num_turns
        self.awaits_beside_steps = awaits_beside_steps
        self.commands: list[bool] = []
        self.has_left = False

    def read(self, _command: object, *, awaited: bool) -> None:
        self.commands.append(awaited)

    def is_landing(self) -> bool:
        self.num_turns -= 1
        return self.num_turns >= 0

    def leave(self) -> None:
        self.has_left = True


@pytest.mark.parametrize(
    ("state", "beside", "arrives", "waits"),
    [
        ("idle", True, [False, False, False], [0.0, 0.0, 5.0]),
        ("idle", True, [False, True], [0.0, 0.0]),
        ("idle", False, [False, False, False], [0.0, 0.0, 5.0]),
        ("put off", True, [False, False, False], [0.0, 0.0, 5.0]),
        ("a step runs", True, [False], [5.0]),
        ("a step runs", False, [False], [5.0]),
    ],
)
def test_a_worker_without_anything_to_do_stays_awake_for_a_read_that_is_about_to_end(
    state: str, beside: bool, arrives: list[bool], waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Awake beside a step it would get in the way of the threads that launch steps; there it looks at the read before
    it plans the next one, or leaves it to the connector."""
    slept: list[float] = []

    def wait(seconds: float) -> bool:
        slept.append(seconds)
        return arrives.pop(0)

    connector = Awaited(2, awaits_beside_steps=beside)
    executor = SimpleNamespace(is_idle=state == "idle", is_put_off=state == "put off", is_about_to_have_room=False)
    loop = object.__new__(WorkerLoop)
    loop._sockets = SimpleNamespace(wait=wait)  # type: ignore[assignment]
    loop._io = SimpleNamespace(connector=connector, executor=executor)  # type: ignore[assignment]
    monkeypatch.setattr(loop, "_seconds_until_due", lambda: 5.0)
    for count in (64, 65):
        loop._perform([StartRead(ReadCommand(1, Party("prefill-0", 1), range(count), range(count)))])
    assert connector.commands == [state == "idle" or beside, state == "idle"]
    loop._wait()
    assert slept == waits and arrives == []
    assert connector.has_left == (state == "a step runs" and not beside)


def test_right_before_a_launch_the_loop_rehearses_and_stays_awake() -> None:
    calls: list[float | str] = []
    executor = SimpleNamespace(
        is_idle=False, is_put_off=False, is_about_to_have_room=True, rehearse=lambda: calls.append("rehearsal")
    )
    loop = object.__new__(WorkerLoop)
    loop._sockets = SimpleNamespace(wait=calls.append)  # type: ignore[assignment]
    loop._io = SimpleNamespace(  # type: ignore[assignment]
        connector=Awaited(0, awaits_beside_steps=True), executor=executor
    )
    loop._wait()
    assert calls == ["rehearsal", 0.0]


def test_heartbeats_count_what_could_not_be_delivered_and_what_was_no_message() -> None:
    with running(FaultyRunner()) as run:
        with zmq.Context() as context, context.socket(zmq.DEALER) as link:
            link.setsockopt(zmq.LINGER, 0)
            link.connect(run.where.endpoint)
            link.send(b"GET / HTTP/1.1")
            request = LocalRequest(RequestKey("r"), array("i", [1] * 20), SamplingParams(max_tokens=1000), 60.0)
            link.send(encode(Envelope(Party("gone soon", 2), run.where.party, request)))
            assert link.poll(PATIENCE_SECONDS * 1000), "no token comes"
            wait_until(lambda: run.load().malformed_messages == 1, "what is no message isn't counted")
            assert run.load().undeliverable_messages == 0
        wait_until(lambda: run.load().undeliverable_messages > 0, "tokens for a router that is gone aren't counted")


def test_a_sequence_decodes_in_the_step_right_after_its_prompt() -> None:
    runner = FaultyRunner()
    with running(runner) as run:
        run.submit("r", max_tokens=4)
        run.tokens_of("r")
    prompt, *decodes = runner.plans
    assert prompt.num_tokens == 20
    assert [plan.num_tokens for plan in decodes] == [1, 1, 1], "no step was without it, and none too many"


def test_a_step_that_fails_ends_its_requests_with_its_error(caplog: pytest.LogCaptureFixture) -> None:
    with running(FaultyRunner(fails_at=5)) as run, caplog.at_level(logging.ERROR):
        run.submit("doomed")
        failure = run.failure()
        assert (failure.key, failure.code) == (RequestKey("doomed"), FailureCode.INTERNAL)
        assert failure.message == f"RuntimeError: {ILLEGAL}"
        run.submit("next", max_tokens=5)
        assert len(run.tokens_of("next")) == 5
    assert run.error is None
    assert "step 5 failed" in caplog.text and caplog.text.count("Traceback") == 1


def test_a_worker_whose_device_is_lost_tells_everybody_why_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    runner = FaultyRunner(fails_at=8, is_sticky=True)
    with running(runner, runner.check_device) as run, caplog.at_level(logging.ERROR):
        run.submit("a")
        run.submit("b", num_tokens=3)
        failures = [run.failure(), run.failure()]
        run.thread.join(PATIENCE_SECONDS)
        assert not run.thread.is_alive(), "it goes by itself"
        heard: list[object] = []

        def has_left() -> bool:
            heard.extend(run.router.heard_by_membership())
            return any(isinstance(message, Leave) for message in heard)

        wait_until(has_left, "it leaves without a word: the router has to miss its heartbeats")
        assert [message.error for message in heard if isinstance(message, Leave)] == [str(run.error)]
    for failure in failures:
        assert ILLEGAL in failure.message and "unspecified" not in failure.message
    assert isinstance(run.error, DeviceLostError)
    assert str(run.error) == (
        f"the device can't go on after step 8 (RuntimeError: {ILLEGAL}): paced-0 ends, to be started again"
    )
    assert caplog.text.count("Traceback") == 1, "the first error in full, and what it led to in a line"


def test_a_worker_serves_two_routers_and_leaves_both() -> None:
    """It is registered once both have accepted it."""
    with DirectRouter() as one, DirectRouter() as other:
        loop, where = build_loop(f"{one.membership},{other.membership}", FaultyRunner())
        thread = threading.Thread(target=loop.run)
        thread.start()
        try:
            one.meet(where)
            assert not loop.registered
            other.meet(where)
            wait_until(lambda: loop.registered, "both have accepted it")
            for name, router in (("a", one), ("b", other)):
                router.send(LocalRequest(RequestKey(name), array("i", [1] * 20), SamplingParams(max_tokens=5), 60.0))
                assert isinstance(router.receive(), StepTokens)
            heard = {router: list[Body]() for router in (one, other)}
            for router in heard:
                wait_until(
                    lambda r=router: any(isinstance(b, Heartbeat) for b in heard[r] + r.heard_by_membership()),  # type: ignore[misc]
                    "a router gets no heartbeat",
                )
        finally:
            loop.stop()
            thread.join(PATIENCE_SECONDS)
        for router in (one, other):
            assert isinstance(router.heard_by_membership()[-1], Leave)
