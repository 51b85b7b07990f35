"""A worker's whole loop with real sockets and a clock for a device."""

import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from splitserve.benchmarks.engine.direct_router import DirectRouter
from splitserve.benchmarks.engine.paced_runner import PacedRunner
from splitserve.benchmarks.engine.paced_worker import build_loop
from splitserve.engine.steps.failures import always_works
from splitserve.protocol.messages.membership import Heartbeat, WorkerLoad
from splitserve.protocol.messages.requests import LocalRequest, RequestFailed, StepTokens
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import FinishReason, RequestKey, SamplingParams
from splitserve.protocol.step import LaunchedStep, LaunchingRunner, StepOutput, StepPlan
from waiting import PATIENCE_SECONDS

ILLEGAL = "CUDA error: an illegal memory access was encountered"


class FailedStep:
    queued_at = 0.0

    def __init__(self, error: Exception) -> None:
        self.error = error

    def wait(self) -> StepOutput:
        raise self.error


class FaultyRunner:
    """Steps of 5 ms. Step number ``fails_at`` fails when it's waited for; if sticky, so do all after it."""

    def __init__(self, fails_at: int = 0, *, is_sticky: bool = False) -> None:
        self.device = PacedRunner(StepModel(0.005), vocab_size=1000)
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
