"""The engine loop of every worker: receive, handle results, schedule, launch, send. Decisions are the core's."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from splitserve.common.errors import DeviceLostError
from splitserve.engine.core import EngineCore
from splitserve.engine.drain import Drain
from splitserve.engine.effects import (
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
from splitserve.engine.io.kv_event_socket import NoKVEvents, PublishesKVEvents
from splitserve.engine.io.membership_client import MembershipClient
from splitserve.engine.io.request_log import RequestLog
from splitserve.engine.io.sleepy_cores import Cores, SleepyCores
from splitserve.engine.io.sockets import WorkerSockets
from splitserve.engine.io.waker import Waker
from splitserve.engine.profiling.step_profiler import NoProfiler, Profiler
from splitserve.engine.steps.executor import Executor
from splitserve.engine.steps.failures import StepFailure
from splitserve.engine.steps.step_fit import StepFit
from splitserve.engine.steps.step_times import StepTimes
from splitserve.kvconnector.tiers.copies import TierCopier
from splitserve.kvconnector.transfer.connector import KVConnector
from splitserve.protocol.config import WorkerConfig
from splitserve.protocol.handover.reads import ReadCommand
from splitserve.protocol.messages.envelope import Body
from splitserve.protocol.messages.operators import BeginDrain
from splitserve.protocol.messages.requests import ClockReading, Profile, Profiled, ReadClock
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Party

logger = logging.getLogger(__name__)

STOP_SECONDS = 1.0
MOST_BLOCKS_BESIDE_STEPS = 64
"""Most blocks of a read that the loop waits for itself while steps run; a longer one goes to a reading thread."""
UNKNOWN_STEPS = StepModel()


@dataclass(frozen=True, slots=True)
class WorkerIO:
    """Everything through which a worker acts on the outside. The loop closes it."""

    sockets: WorkerSockets  # to routers, membership and peers
    waker: Waker  # ends the loop's wait
    connector: KVConnector  # reads KV of peers
    executor: Executor  # runs steps on the device
    copies: TierCopier  # between the device and the tiers below it
    profiler: Profiler = field(default_factory=NoProfiler)  # records steps on request
    kv_events: PublishesKVEvents = field(default_factory=NoKVEvents)  # announces what is cached here
    cores: Cores = field(default_factory=SleepyCores)  # are kept awake while there is work


class WorkerLoop:
    """Owns the sockets; drives one core. ``run`` returns after :meth:`stop`, or when a :meth:`drain` is over."""

    def __init__(
        self,
        config: WorkerConfig,
        core: EngineCore,
        io: WorkerIO,
        membership: MembershipClient,
        explain: Callable[[Exception], Exception] | None = None,
        *,
        estimate: StepModel = UNKNOWN_STEPS,
    ) -> None:
        """``explain`` finds the cause of an error that came from another rank. ``estimate`` of its steps' times."""
        self._engine_id = config.engine_id
        self._request_log = RequestLog(writes_lines=config.request_log)
        self._core = core
        self._io = io
        self._sockets = io.sockets
        self._membership = membership
        self._explain = explain
        self._step_times = StepTimes()
        self._step_fit = StepFit(estimate)
        self._step_end: float | None = None  # of the last step whose result was taken in this round
        self._follows: float | None = None  # end of the step behind which the step in flight was launched at once
        core.scheduler.step_model = estimate
        self._profile: tuple[Party, str] | None = None  # the party that asked for the recording in progress, and its id
        self._error: Exception | None = None
        self._drain = Drain(config.protocol.drain_seconds)
        self._drain_requested = False
        self.on_dismissed: Callable[[], None] = lambda: None  # called when an operator asks this worker to leave
        self._stopping = False
        io.sockets.watch(io.waker.read_fd)

    def stop(self) -> None:
        """End :meth:`run`. Callable from a signal handler or another thread."""
        self._stopping = True
        self._io.waker.wake()

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
        self._io.waker.wake()

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def registered(self) -> bool:
        """Return whether membership has accepted this worker."""
        return self._membership.registered

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
        finally:  # after an error too: membership is informed at once that this worker is gone
            self._membership.leave("" if self._error is None else str(self._error))
            self._io.executor.close(STOP_SECONDS)
            self._io.copies.close(STOP_SECONDS)
            self._io.connector.close()
            self._sockets.close()
            self._io.waker.close()

    def run_once(self) -> None:
        """One round: wait for something to do, then do all of it."""
        self._wait()
        self._io.waker.drain()
        now = time.monotonic()
        if self._drain_requested and not self._drain.has_begun:
            self._begin_drain(now)
        for envelope in self._sockets.receive():
            log_message("from", envelope.sender, envelope.body)
            body, is_for_me = envelope.body, envelope.to == self._core.state.me
            if isinstance(body, Profile) and is_for_me:
                self._on_profile(envelope.sender, body)
            elif isinstance(body, BeginDrain) and is_for_me:
                self._on_dismissal()
            elif isinstance(body, ReadClock) and is_for_me:
                self._sockets.send(envelope.sender, ClockReading(body.asked_at, time.monotonic()))
            else:
                self._core.handle(envelope, time.monotonic())  # after its arrival, which marks rely on
        now = time.monotonic()
        self._io.cores.note(not self._core.is_idle, now)
        refusal = self._membership.receive(now)
        if refusal is not None and self._error is None:
            self.end_with(refusal)
        self._core.on_routers(self._membership.routers, now)
        for event in self._io.connector.events():
            self._core.handle_connector_event(event, now)
        for copied in self._io.copies.results():
            self._core.handle_copy_result(copied, now)
        self._take_results(now)
        self._core.tick(now)
        self._perform(self._core.take_effects())  # tokens leave before the next step is planned
        self._launch(now)
        self._perform(self._core.take_effects())
        self._io.kv_events.publish(self._core.state.blocks, now)
        self._report_profile()
        self._membership.keep(self._core, self._step_fit, now)
        self._end_drain(now)

    def _wait(self) -> None:
        """Sleep until there is something to do. Stay awake for reads that are about to end if the device is idle or the
        launch of a step is put off for them."""
        executor, connector = self._io.executor, self._io.connector
        if executor.is_idle or executor.is_put_off:
            while connector.is_landing():
                if self._sockets.wait(0.0):
                    return
        elif not connector.awaits_beside_steps:
            connector.leave()
        if executor.is_about_to_have_room:
            executor.rehearse()
            self._sockets.wait(0.0)
        else:
            self._sockets.wait(self._seconds_until_due())

    def _on_dismissal(self) -> None:
        """Drain, as an operator asked. A second request has no effect."""
        if not self._drain_requested:
            self.on_dismissed()
            self.drain()

    def _on_profile(self, sender: Party, body: Profile) -> None:
        why_not = self._io.profiler.begin(body.num_steps, body.timeout_seconds)
        if why_not:
            self._sockets.send(sender, Profiled(body.profile_id, why_not))
        else:
            self._profile = sender, body.profile_id

    def _report_profile(self) -> None:
        if self._io.profiler.is_late:
            self._io.executor.call(self._io.profiler.before_step)
        result = self._io.profiler.result()
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
        """Begin the drain. The router is informed first, so that requests go elsewhere from now on."""
        self._drain.begin(now)
        self._membership.drain()
        self._core.drain()
        logger.info("draining: %d requests are here", self._core.load().requests_tracked)

    def _end_drain(self, now: float) -> None:
        if self._drain.is_over(self._core.is_idle, now):
            self._stopping = True
            left = self._core.load().requests_tracked
            log_level = logging.WARNING if left else logging.INFO
            logger.log(log_level, "drained: %s, %d requests left; leaving", self._drain.reason, left)

    def _take_results(self, now: float) -> None:
        self._step_end = None
        while (result := self._io.executor.result()) is not None:
            self._step_end = result.ended
            warning = self._step_times.note(result.plan, result.seconds)
            self._core.state.counters.step_seconds += result.seconds
            if warning is not None:
                logger.warning("%s", warning)
            if isinstance(result.outcome, StepFailure):
                self._on_step_failure(result.outcome, now)
            else:
                # A step that waited for nothing but this loop takes the loop's time, too: the next one will, as well.
                began = result.ended - result.seconds
                seconds = result.seconds if self._follows is None else result.ended - min(began, self._follows)
                self._step_fit.note(result.plan, seconds, now)
                self._core.scheduler.step_model = self._step_fit.model
                self._core.commit_step(result.outcome, now)

    def _on_step_failure(self, failure: StepFailure, now: float) -> None:
        """Log the first failure in full, and its consequences in a line each. If the device is lost, end the worker, so
        that its requests go elsewhere."""
        if failure.cause is None:
            logger.error("step %d failed", failure.step, exc_info=failure.error)
        else:
            logger.error("step %d failed because of step %d", failure.step, failure.cause.step)
        self._core.fail_step(str(failure), now)
        if failure.device_lost and self._error is None:
            engine_id = self._engine_id
            text = (
                f"the device can't go on after step {failure.step} ({failure}): {engine_id} ends, to be started again"
            )
            self.end_with(DeviceLostError(text))

    def _launch(self, now: float) -> None:
        while self._io.executor.has_room and self._error is None:
            if self._core.is_landing and self._io.executor.put_off():
                return
            plan = self._core.plan_step(now)
            if plan is None:
                return
            self._follows = self._step_end if self._io.executor.is_idle else None
            self._io.executor.launch(plan)

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(to, body):
                    log_message("to", to, body)
                    self._sockets.send(to, body)
                    self._request_log.note_sent(body)
                case StartRead(command):
                    self._io.connector.read(command, awaited=self._awaits(command))
                case StartCopy(copy):
                    self._io.copies.start(copy)
                case Serve(readers):
                    self._io.connector.serve(readers)
                case Dial(peer):
                    self._sockets.dial(peer)
                case HangUp(peer):
                    self._sockets.hang_up(peer)
                case Connect(peer, welcome):
                    self._io.connector.connect(peer, welcome)
                case Disconnect(peer):
                    self._io.connector.disconnect(peer)
                case Incident(description):
                    logger.error("%s", description)

    def _awaits(self, command: ReadCommand) -> bool:
        """Return whether this thread is to wait for a read. Beside steps it looks at reads before it plans the next
        one, and queues the copies of a few blocks only: more would delay that."""
        if self._io.executor.is_idle:
            return True
        return self._io.connector.awaits_beside_steps and len(command.local_blocks) <= MOST_BLOCKS_BESIDE_STEPS

    def _seconds_until_due(self) -> float:
        due_at = min(
            self._core.next_deadline(),
            self._membership.next_deadline(),
            self._drain.next_deadline(),
            self._io.kv_events.next_deadline(),
        )
        return due_at - time.monotonic()


def log_message(direction: str, peer: Party | None, body: Body) -> None:
    """Log a message about one request, at level DEBUG: the request's id finds its way through every process."""
    if logger.isEnabledFor(logging.DEBUG) and (key := getattr(body, "key", None)) is not None:
        logger.debug("request %s: %s %s %s", key, type(body).__name__, direction, peer)
