"""The whole engine loop, with real sockets and a clock for a device: tokens, failing steps, a device that is lost."""

import logging
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq

from splitserve.benchmarks.direct_router import DirectRouter
from splitserve.benchmarks.paced_worker import PacedRunner, build_loop
from splitserve.errors import DeviceLostError
from splitserve.messages import (
    Envelope,
    FailureCode,
    Heartbeat,
    Leave,
    LocalRequest,
    RequestFailed,
    StepTokens,
    WorkerLoad,
)
from splitserve.prefill.executor import always_works
from splitserve.request import FinishReason, Party, RequestKey, SamplingParams
from splitserve.step import UNKNOWN_TOKEN, LaunchedStep, LaunchingRunner, StepOutput, StepPlan
from splitserve.wire import encode
from waiting import PATIENCE_SECONDS, wait_until

ILLEGAL = "CUDA error: an illegal memory access was encountered"


class FailedStep:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def wait(self) -> StepOutput:
        raise self.error


class FaultyRunner:
    """Steps of 5 ms. Step number ``fails_at`` fails when it's waited for; if sticky, so do all after it."""

    def __init__(self, fails_at: int = 0, *, is_sticky: bool = False) -> None:
        self.device = PacedRunner(0.005, 0.0, 0.0, vocab_size=1000)
        self.fails_at = fails_at
        self.is_sticky = is_sticky
        self.is_broken = False
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self.plans.append(plan)
        if self.is_broken and self.is_sticky:
            raise RuntimeError("CUDA error: unspecified launch failure")
        if len(self.plans) == self.fails_at:
            self.is_broken = True
            return FailedStep(RuntimeError(ILLEGAL))
        return self.device.launch(plan)

    def check_device(self) -> None:
        if self.is_broken and self.is_sticky:
            raise RuntimeError(ILLEGAL)


class Run:
    """One engine loop on a thread, a router that it is registered with, and how it ended."""

    def __init__(self, runner: LaunchingRunner, check_device: Callable[[], None], router: DirectRouter) -> None:
        self.router = router
        self.error: Exception | None = None
        self.loop, self.where = build_loop(router.membership, runner, check_device=check_device)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        router.meet(self.where)

    def _run(self) -> None:
        try:
            self.loop.run()
        except Exception as error:
            self.error = error

    def submit(self, name: str, num_tokens: int = 20, max_tokens: int = 1000) -> None:
        prompt, sampling = array("i", [1] * num_tokens), SamplingParams(max_tokens=max_tokens)
        self.router.send(LocalRequest(RequestKey(name), prompt, sampling, 60.0))

    def tokens_of(self, name: str) -> list[int]:
        """Tokens of one request until it ends, whatever else comes meanwhile."""
        tokens: list[int] = []
        while True:
            body = self.router.receive()
            assert isinstance(body, StepTokens), body
            for delta in body.deltas:
                if delta.key.request_id == name:
                    assert delta.position == len(tokens)
                    tokens += delta.token_ids
                    if delta.finish_reason is FinishReason.LENGTH:
                        return tokens

    def load(self) -> WorkerLoad:
        """As its next heartbeats report it."""
        while True:
            loads = [body.load for body in self.router.heard_by_membership() if isinstance(body, Heartbeat)]
            if loads:
                return loads[-1]
            assert self.thread.is_alive()
            time.sleep(0.01)

    def failure(self) -> RequestFailed:
        while True:
            body = self.router.receive()
            if isinstance(body, RequestFailed):
                return body


@contextmanager
def running(runner: LaunchingRunner, check_device: Callable[[], None] = always_works) -> Iterator[Run]:
    with DirectRouter() as router:
        run = Run(runner, check_device, router)
        try:
            yield run
        finally:
            run.loop.stop()
            run.thread.join(PATIENCE_SECONDS)
            assert not run.thread.is_alive()


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
        leave = run.router.heard_by_membership()[-1]
        assert isinstance(leave, Leave), "so that the router needn't miss its heartbeats"
        assert leave.error == str(run.error)
    for failure in failures:
        assert ILLEGAL in failure.message and "unspecified" not in failure.message
    assert isinstance(run.error, DeviceLostError)
    assert str(run.error) == (
        f"the device can't go on after step 8 (RuntimeError: {ILLEGAL}): paced-0 ends, to be started again"
    )
    assert caplog.text.count("Traceback") == 1, "the first error in full, and what it led to in a line"
