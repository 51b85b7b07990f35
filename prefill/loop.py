"""The engine loop of every worker: receive, handle results, schedule, launch, send. Decisions are the core's."""

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import psutil

from splitserve.config import WorkerConfig
from splitserve.errors import DeviceLostError, HandshakeError
from splitserve.kvconnector.connector import KVConnector
from splitserve.kvconnector.tier_copies import Copies, TierCopies
from splitserve.messages import (
    Draining,
    Envelope,
    Heartbeat,
    Leave,
    Profile,
    Profiled,
    Register,
    Registered,
    RegisterRefused,
    WorkerInfo,
)
from splitserve.prefill.awake_cores import Cores, SleepyCores
from splitserve.prefill.core import EngineCore
from splitserve.prefill.drain import Drain
from splitserve.prefill.effects import (
    Connect,
    Dial,
    Disconnect,
    Effect,
    HangUp,
    Incident,
    Send,
    Serve,
    StartCopy,
    StartRead,
)
from splitserve.prefill.executor import Executor, StepFailure
from splitserve.prefill.kv_event_socket import NoKVEvents, PublishesKVEvents
from splitserve.prefill.sockets import WorkerSockets
from splitserve.prefill.step_profiler import NoProfiler, Profiler
from splitserve.prefill.step_times import StepTimes
from splitserve.request import Party

logger = logging.getLogger(__name__)

REGISTER_INTERVAL_SECONDS = 5.0
COMPLAINT_INTERVAL_SECONDS = 5.0
STOP_SECONDS = 1.0
REFUSED_PERIODS = 2.0
"""Times ``dead_after_seconds`` that a worker is refused for now until it counts as refused for good."""
_PIPE_BYTES = 4096


class Waker:
    """Lets other threads, and signal handlers, end the loop's wait."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._is_closed = False

    def wake(self) -> None:
        """Has no effect once closed: a second signal, or a thread that was stuck, may come late."""
        if self._is_closed:
            return
        try:
            os.write(self._write_fd, b"\0")
        except BlockingIOError:
            return  # the pipe is full: the loop wakes up anyway

    def drain(self) -> None:
        try:
            while len(os.read(self.read_fd, _PIPE_BYTES)) == _PIPE_BYTES:
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        self._is_closed = True
        os.close(self.read_fd)
        os.close(self._write_fd)


class WorkerLoop:
    """Owns the sockets; drives one core. ``run`` returns after :meth:`stop`, or when a :meth:`drain` is over."""

    def __init__(
        self,
        config: WorkerConfig,
        core: EngineCore,
        connector: KVConnector,
        executor: Executor,
        *,
        sockets: WorkerSockets,
        waker: Waker,
        info: WorkerInfo,
        profiler: Profiler | None = None,
        copies: Copies | None = None,
        kv_events: PublishesKVEvents | None = None,
        cores: Cores | None = None,
        rank_pids: Sequence[int] = (),
        explain: Callable[[Exception], Exception] | None = None,
    ) -> None:
        """``rank_pids``: processes of its other ranks, whose memory counts as the worker's; ``explain`` finds what is
        behind an error that came from one of them."""
        self._config = config
        self._core = core
        self._connector = connector
        self._executor = executor
        self._sockets = sockets
        self._waker = waker
        self._info = info
        self._pids = (os.getpid(), *rank_pids)
        self._explain = explain
        self._step_times = StepTimes()
        self._profiler = profiler or NoProfiler()
        self._copies: Copies = copies or TierCopies({}, waker.wake)
        self._kv_events = kv_events or NoKVEvents()
        self._cores = cores or SleepyCores()
        self._profile: tuple[Party, str] | None = None  # who asked for the recording under way, and its id
        self._error: Exception | None = None
        self._drain = Drain(config.protocol.drain_seconds)
        self._drain_requested = False
        self._stopping = False
        self._registered = False
        self._token = ""
        self._refusal = ""
        self._refused_since = math.inf
        self._complaint_due_at = time.monotonic() + COMPLAINT_INTERVAL_SECONDS
        self._heartbeat_due_at = 0.0
        self._register_due_at = 0.0
        sockets.watch(waker.read_fd)

    def stop(self) -> None:
        """End :meth:`run`. Callable from a signal handler or another thread."""
        self._stopping = True
        self._waker.wake()

    def end_with(self, error: Exception) -> None:
        """End :meth:`run` by raising ``error``. Callable like :meth:`stop`."""
        self._error = error
        self.stop()

    def drain(self) -> None:
        """Take no more requests, finish those that are here, end :meth:`run`; asked twice: end it now.

        Callable like :meth:`stop`.
        """
        self._stopping = self._stopping or self._drain_requested
        self._drain_requested = True
        self._waker.wake()

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def registered(self) -> bool:
        """Whether membership has accepted this worker."""
        return self._registered

    def run(self) -> None:
        """Serve until :meth:`stop`. Raises :class:`DeviceLostError` when no step can run any more, and
        :class:`HandshakeError` when membership refuses this worker for good."""
        try:
            while not self._stopping:
                self.run_once()
            if self._error is not None:
                raise self._error
        except Exception as error:
            self._error = error if self._explain is None else self._explain(error)
            raise
        finally:  # after an error too: membership hears at once that this worker is gone
            self._sockets.send_membership(Leave("" if self._error is None else str(self._error)))
            self._executor.close(STOP_SECONDS)
            self._copies.close(STOP_SECONDS)
            self._connector.close()
            self._sockets.close()
            self._waker.close()

    def run_once(self) -> None:
        """One round: wait for something to do, then do all of it."""
        self._sockets.wait(self._seconds_until_due())
        self._waker.drain()
        now = time.monotonic()
        if self._drain_requested and not self._drain.has_begun:
            self._begin_drain(now)
        for envelope in self._sockets.receive():
            if isinstance(envelope.body, Profile) and envelope.to == self._info.party:
                self._on_profile(envelope.sender, envelope.body)
            else:
                self._core.handle(envelope, now)
        self._cores.note(not self._core.is_idle, now)
        for envelope in self._sockets.receive_membership():
            self._on_membership(envelope, now)
        for event in self._connector.events():
            self._core.handle_connector_event(event, now)
        for copied in self._copies.results():
            self._core.handle_copy_result(copied, now)
        self._take_results(now)
        self._core.tick(now)
        self._perform(self._core.take_effects())  # tokens leave before the next step is planned
        self._launch(now)
        self._perform(self._core.take_effects())
        self._kv_events.publish(self._core.state.blocks, now)
        self._report_profile()
        self._keep_membership(now)
        self._end_drain(now)

    def _on_membership(self, envelope: Envelope, now: float) -> None:
        if envelope.to != self._info.party:
            return
        if isinstance(envelope.body, RegisterRefused):
            self._on_refused(envelope.body, now)
        elif isinstance(envelope.body, Registered):
            self._registered, self._token = True, envelope.body.token
            self._refusal, self._refused_since = "", math.inf

    def _on_refused(self, refused: RegisterRefused, now: float) -> None:
        """Ask again, unless that is of no use: then the worker ends, and its launcher starts another incarnation."""
        self._registered, self._refusal = False, refused.reason
        self._refused_since = min(self._refused_since, now)
        has_waited = now - self._refused_since > REFUSED_PERIODS * self._config.protocol.dead_after_seconds
        if (refused.for_good or has_waited) and self._error is None:
            self.end_with(HandshakeError(f"the router refuses {self._config.engine_id}: {refused.reason}"))

    def _on_profile(self, sender: Party, body: Profile) -> None:
        why_not = self._profiler.begin(body.num_steps, body.timeout_seconds)
        if why_not:
            self._sockets.send(sender, Profiled(body.profile_id, why_not))
        else:
            self._profile = sender, body.profile_id

    def _report_profile(self) -> None:
        if self._profiler.is_late:
            self._executor.call(self._profiler.before_step)
        result = self._profiler.result()
        if result is None or self._profile is None:
            return
        (asker, profile_id), busy = self._profile, result.busy
        report = Profiled(
            profile_id,
            result.error,
            result.trace,
            result.num_steps,
            busy.seconds,
            busy.busy_seconds,
            busy.long_gap_seconds,
        )
        self._sockets.send(asker, report)

    def _begin_drain(self, now: float) -> None:
        """The router hears of it first, so that requests go elsewhere from now on."""
        self._drain.begin(now)
        self._sockets.send_membership(Draining())
        self._core.drain()
        logger.info("draining: %d requests are here", self._core.load().requests_tracked)

    def _end_drain(self, now: float) -> None:
        if self._drain.is_over(self._core.is_idle, now):
            self._stopping = True
            left = self._core.load().requests_tracked
            log_level = logging.WARNING if left else logging.INFO
            logger.log(log_level, "drained: %s, %d requests left; leaving", self._drain.reason, left)

    def _take_results(self, now: float) -> None:
        while (result := self._executor.result()) is not None:
            warning = self._step_times.note(result.plan, result.seconds)
            if warning is not None:
                logger.warning("%s", warning)
            if isinstance(result.outcome, StepFailure):
                self._on_step_failure(result.outcome, now)
            else:
                self._core.commit_step(result.outcome, now)

    def _on_step_failure(self, failure: StepFailure, now: float) -> None:
        """The first failure is told in full, what it led to in a line. Without a device, the requests go elsewhere."""
        if failure.cause is None:
            logger.error("step %d failed", failure.step, exc_info=failure.error)
        else:
            logger.error("step %d failed because of step %d", failure.step, failure.cause.step)
        self._core.fail_step(str(failure), now)
        if failure.device_lost and self._error is None:
            engine_id = self._config.engine_id
            text = (
                f"the device can't go on after step {failure.step} ({failure}): {engine_id} ends, to be started again"
            )
            self.end_with(DeviceLostError(text))

    def _launch(self, now: float) -> None:
        while self._executor.has_room and self._error is None:
            plan = self._core.plan_step(now)
            if plan is None:
                return
            self._executor.launch(plan)

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(to, body):
                    self._sockets.send(to, body)
                case StartRead(command):
                    self._connector.read(command)
                case StartCopy(copy):
                    self._copies.start(copy)
                case Serve(active):
                    self._connector.serve(active)
                case Dial(peer):
                    self._sockets.dial(peer)
                case HangUp(peer):
                    self._sockets.hang_up(peer)
                case Connect(peer, welcome):
                    self._connector.connect(peer, welcome)
                case Disconnect(peer):
                    self._connector.disconnect(peer)
                case Incident(description):
                    logger.error("%s", description)

    def _keep_membership(self, now: float) -> None:
        if self._sockets.has_new_membership_connection():
            self._register_due_at = now
        if now >= self._register_due_at and not self._drain.has_begun:  # repeated: membership may have restarted
            interval = REGISTER_INTERVAL_SECONDS if self._registered else self._config.protocol.heartbeat_seconds
            self._register_due_at = now + interval
            self._sockets.send_membership(Register(info=self._info, token=self._token))
        if now >= self._complaint_due_at:
            self._complaint_due_at = now + COMPLAINT_INTERVAL_SECONDS
            self._complain()
        if self._core.take_news() or now >= self._heartbeat_due_at:
            self._heartbeat_due_at = now + self._config.protocol.heartbeat_seconds
            load = msgspec.structs.replace(self._core.load(), resident_bytes=_resident_bytes(self._pids))
            heartbeat = Heartbeat(load=load, links=self._core.links(), clock_seconds=time.time())
            self._sockets.send_membership(heartbeat)
            if self._drain.has_begun:  # after the heartbeat, which makes a lost worker a candidate again
                self._sockets.send_membership(Draining())

    def _complain(self) -> None:
        """Say it where somebody looks for the reason that no request comes here."""
        if self._refusal:
            logger.error("the router refuses this worker: %s", self._refusal)
        elif not self._registered:
            endpoint = self._config.membership
            logger.warning("no answer from %s: is the router there, and has it the same shared secret?", endpoint)
            self._sockets.revive_membership()

    def _seconds_until_due(self) -> float:
        register_due_at = float("inf") if self._drain.has_begun else self._register_due_at
        due_at = min(self._core.next_deadline(), self._heartbeat_due_at, register_due_at, self._drain.next_deadline())
        due_at = min(due_at, self._kv_events.next_deadline())
        return due_at - time.monotonic()


def _resident_bytes(pids: Sequence[int]) -> int:
    """Of those processes that live."""
    num_bytes = 0
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            num_bytes += psutil.Process(pid).memory_info().rss
    return num_bytes
