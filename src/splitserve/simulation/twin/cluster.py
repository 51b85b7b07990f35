"""A cluster's twin: the production router core, production worker cores, and clients that send a workload."""

import hashlib
import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from splitserve.protocol.config import ProtocolConfig, RouterConfig
from splitserve.protocol.messages.envelope import Body, Envelope
from splitserve.protocol.messages.handover import Offer
from splitserve.protocol.messages.membership import WorkerInfo
from splitserve.protocol.messages.requests import HandoverReport, TokenDelta
from splitserve.protocol.request import Party, SamplingParams
from splitserve.router.links.membership import Membership
from splitserve.router.placement.prefix_view import PrefixView
from splitserve.router.requests.active_request import ActiveRequest, RequestContext
from splitserve.router.requests.core import RouterCore
from splitserve.router.requests.effects import CancelTimer, Count, Deliver, Effect, Ended, Refuse, Send, SetTimer
from splitserve.router.requests.events import Event, FromWorker, Submit, Timer, TimerFired, WorkerReady
from splitserve.router.requests.queue.classes import Classes
from splitserve.router.requests.timeline.stages import all_stages
from splitserve.simulation.twin.models import Calibration
from splitserve.simulation.twin.worker import TwinWorker, WorkerSetup
from splitserve.simulation.virtual_clock import VirtualClock
from splitserve.workloads.conversation import Conversation, Turn, Workload

ROUTER = Party("router", 1)
HEARTBEAT_SECONDS = 1.0
START_SECONDS = 3.0
"""Time before the first arrival, in which workers register and connect."""
MAX_EXTRA_SECONDS = 3600.0
"""Time after the last arrival, and the longest pauses of a conversation, at which a run that doesn't end is cut."""
CUT = "the request still ran when the simulation was cut"
FILLER_TOKEN = 9
NUM_NAME_TOKENS = 16
_FILLER = array("i", [FILLER_TOKEN])
MAX_NAME_TOKEN = 990


@dataclass(frozen=True, slots=True)
class TwinSpec:
    """A cluster: its workers, its router's policy and objectives, the models of its machine."""

    workers: Sequence[WorkerSetup]
    calibration: Calibration
    policy: str = "least-loaded"
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)


@dataclass(slots=True)
class TurnTimes:
    """Times of one request, in seconds from the load's start."""

    conversation: str
    number: int
    arrived_at: float
    num_prompt_tokens: int
    num_output_tokens: int  # requested
    token_times: "array[float]" = field(default_factory=lambda: array("d"))  # of each output token, at the client
    num_cached_tokens: int = 0
    error: str = ""
    ended_at: float = 0.0


@dataclass(slots=True)
class TwinResult:
    """Result of a run."""

    turns: list[TurnTimes]
    seconds: float  # of virtual time, from the first arrival to the last end
    num_steps: dict[str, int]  # by worker
    busy_seconds: dict[str, float]  # in which a step ran, by worker
    step_tokens: dict[str, int]  # of prompts and outputs, by worker
    counts: Counter[str]  # finished requests by intended path, actual path and reason
    stages: dict[str, float] = field(default_factory=dict)  # mean seconds of each stage, over requests that had it
    handovers: list[HandoverReport] = field(default_factory=list)

    @property
    def busy_shares(self) -> dict[str, float]:
        """Share of the time in which a step ran, by worker."""
        return {name: busy / max(self.seconds, 1e-9) for name, busy in self.busy_seconds.items()}


class TwinCluster:
    """The cluster. :meth:`run` replays one workload."""

    def __init__(self, spec: TwinSpec, seed: int = 0, *, leaps: bool = True) -> None:
        """``leaps``: decode steps of an unchanged batch are caught up on together; no time depends on it."""
        self.leaps = leaps
        self.clock = VirtualClock()
        self.protocol = spec.protocol
        self.link, self.host, self.copies = spec.calibration.link, spec.calibration.host, spec.calibration.copies
        self.membership = Membership(spec.protocol.dead_after_seconds, spec.protocol.tombstone_seconds)
        config = RouterConfig(
            model="twin",
            served_model_name="twin",
            policy=spec.policy,
            ttft_objective_ms=spec.ttft_ms,
            tpot_objective_ms=spec.tpot_ms,
            max_requests_in_flight=1 << 20,
            protocol=spec.protocol,
        )
        self.core = RouterCore(config, self.membership, PrefixView(), random.Random(seed))
        classes = Classes.declared((), spec.ttft_ms, spec.tpot_ms)
        self.context = RequestContext(request_class=classes.of(""))  # of all requests
        self.workers: dict[Party, TwinWorker] = {}
        self._timers: dict[Timer, object] = {}
        self._talks: dict[str, _Talk] = {}  # by request
        self._drawn: dict[str, array[float]] = {}  # by request: when its tokens reach the router
        self._num_running = 0
        self.counts: Counter[str] = Counter()
        self._stage_seconds: Counter[str] = Counter()
        self._stage_counts: Counter[str] = Counter()
        self._handovers: list[HandoverReport] = []
        for setup in spec.workers:
            self._register(setup)
        self._performers: dict[type, Callable[[Any], object]] = {
            Send: lambda effect: self.send(ROUTER, effect.to, effect.body),
            Deliver: self._deliver,
            Refuse: lambda effect: self._talks.pop(effect.request_id).on_refused(effect.reason),
            SetTimer: self._set_timer,
            CancelTimer: lambda effect: self._timers.pop(effect.timer, None),
            Count: self._count,
            Ended: self._end_request,
        }

    # ---- running ----

    def run(self, workload: Workload, seed: int = 0) -> TwinResult:
        """Replay a workload to its end, and return its result. A cluster runs one workload only."""
        self._heartbeat()
        talks = [_Talk(self, conversation, seed) for conversation in workload.conversations]
        self._num_running = len(talks)
        for talk in talks:
            self.clock.at(START_SECONDS + talk.conversation.start_seconds, talk.begin)
        last = workload.conversations[-1].start_seconds
        pauses = max(sum(turn.think_seconds for turn in each.turns) for each in workload.conversations)
        ends_at = START_SECONDS + last + pauses + MAX_EXTRA_SECONDS
        self.clock.run(lambda: not self._num_running or self.clock.now > ends_at)
        for talk in talks:
            talk.cut()
        turns = sorted((turn for talk in talks for turn in talk.turns), key=lambda turn: turn.arrived_at)
        names = {worker.setup.name: worker for worker in self.workers.values()}
        seconds = max((turn.ended_at for turn in turns), default=0.0)
        return TwinResult(
            turns=turns,
            seconds=seconds,
            num_steps={name: worker.num_steps for name, worker in names.items()},
            busy_seconds={name: worker.busy_seconds_until(START_SECONDS + seconds) for name, worker in names.items()},
            step_tokens={name: worker.core.state.counters.step_tokens.total for name, worker in names.items()},
            counts=self.counts,
            stages={name: self._stage_seconds[name] / count for name, count in self._stage_counts.items()},
            handovers=self._handovers,
        )

    @property
    def load_seconds(self) -> float:
        """The time since the load's start."""
        return self.clock.now - START_SECONDS

    def submit(self, talk: "_Talk", request: ActiveRequest) -> None:
        """Hand a request to the router's core."""
        self._talks[request.request_id] = talk
        self._handle(Submit(request))

    def note_drawn(self, delta: TokenDelta, times: Sequence[float]) -> None:
        """Note when a worker sent the tokens of ``delta``: the router gets them later, together with others."""
        known = self._drawn.setdefault(delta.key.request_id, array("d"))
        end = delta.position + len(times)
        known.extend([0.0] * (end - len(known)))
        later = self.host.message_seconds
        known[delta.position : end] = array("d", [time + later for time in times])

    def on_talk_ended(self) -> None:
        """Note that a conversation is over."""
        self._num_running -= 1

    def send(self, sender: Party, to: Party, body: Body) -> None:
        """Send a message, which arrives after the host's time for messages."""
        if to == ROUTER:
            self.clock.after(self.host.message_seconds, lambda: self._handle(FromWorker(sender, body)))
        else:
            envelope = Envelope(sender=sender, to=to, body=body)
            seconds = self.host.offer_seconds if isinstance(body, Offer) else self.host.message_seconds
            self.clock.after(seconds, lambda: self.workers[to].deliver(envelope))

    def _handle(self, event: Event) -> None:
        effects: list[Effect] = self.core.handle(event, self.clock.now)
        for effect in effects:
            performer = self._performers.get(type(effect))
            if performer is not None:
                performer(effect)

    def _deliver(self, effect: Deliver) -> None:
        if effect.update.token_ids:
            times = self._drawn[effect.request_id]
            self._talks[effect.request_id].on_tokens(len(effect.update.token_ids), times)

    def _end_request(self, effect: Ended) -> None:
        request = effect.request
        request_id = request.request_id
        if request.timeline.attempts:
            for stages in all_stages(request.timeline, has_handover=request.state.handover is not None):
                self._stage_seconds.update(stages)
                self._stage_counts.update(stages.keys())
        if request.state.handover is not None:
            self._handovers.append(request.state.handover)
        self._drawn.pop(request_id, None)
        self._talks.pop(request_id).on_ended(effect.request)

    def _count(self, effect: Count) -> None:
        if effect.metric == "requests_finished":
            self.counts[" ".join(effect.labels)] += effect.amount

    def _set_timer(self, effect: SetTimer) -> None:
        timer, mark = effect.timer, object()
        self._timers[timer] = mark
        self.clock.at(effect.at, lambda: self._on_timer(timer, mark))

    def _on_timer(self, timer: Timer, mark: object) -> None:
        if self._timers.get(timer) is mark:
            del self._timers[timer]
            self._handle(TimerFired(timer))

    # ---- membership ----

    def _register(self, setup: WorkerSetup) -> None:
        worker = TwinWorker(self, setup)
        self.workers[worker.party] = worker
        info = WorkerInfo(
            party=worker.party,
            role=setup.role,
            endpoint="",
            pid=0,
            layout=setup.layout,
            num_blocks=setup.num_blocks[0],
            max_num_seqs=setup.engine.max_num_seqs,
            max_model_len=setup.max_model_len,
            vocab_size=setup.vocab_size,
            prefix_caching=setup.engine.enable_prefix_caching,
            max_num_batched_tokens=setup.engine.max_num_batched_tokens,
            max_num_prefill_tokens=setup.engine.max_num_prefill_tokens_beside_decode,
            max_num_sized_tokens=setup.engine.max_num_prefill_tokens_within_objective,
        )
        registration = self.membership.register(worker.party, info, self.clock.now)
        assert registration.refusal is None, registration.refusal
        self.membership.link_up(worker.party)
        self.core.handle(WorkerReady(worker.party), self.clock.now)

    def _heartbeat(self) -> None:
        """Take a heartbeat of each worker, and await the next ones."""
        for party, worker in self.workers.items():
            load, links, model = worker.load(), worker.core.links(), worker.times.model
            self.membership.heartbeat(party, load, self.clock.now, links, step_model=model)
        self.clock.after(HEARTBEAT_SECONDS, self._heartbeat)


class _Talk:
    """One running conversation."""

    def __init__(self, twin: TwinCluster, conversation: Conversation, seed: int) -> None:
        self._twin = twin
        self._seed = seed
        self.conversation = conversation
        self.turns: list[TurnTimes] = []
        self._tokens = array("i")  # of the conversation so far

    def begin(self) -> None:
        """Send the next turn."""
        number = len(self.turns)
        turn = self.conversation.turns[number]
        self._tokens = self._tokens + _new_tokens(turn, self._seed)
        twin, now = self._twin, self._twin.clock.now
        request_id = f"{self.conversation.name}/{number}"
        sampling = SamplingParams(max_tokens=turn.num_output_tokens)
        self.turns.append(
            TurnTimes(self.conversation.name, number, twin.load_seconds, len(self._tokens), turn.num_output_tokens)
        )
        prepared_at = now + twin.host.prepare_seconds
        request = ActiveRequest.new(request_id, self._tokens, sampling, now, twin.context, prepared_at=prepared_at)
        twin.clock.at(prepared_at, lambda: twin.submit(self, request))

    def on_tokens(self, count: int, times: Sequence[float]) -> None:
        """Note tokens that the router delivers; ``times``: when all of the request's tokens reached it."""
        received = self.turns[-1].token_times
        later = self._twin.host.deliver_seconds - START_SECONDS
        received.extend(time + later for time in times[len(received) : len(received) + count])

    def cut(self) -> None:
        """Let the turn that still runs at the run's end fail."""
        if self.turns and not self.turns[-1].ended_at:
            self.turns[-1].error, self.turns[-1].ended_at = CUT, self._twin.load_seconds

    def on_refused(self, reason: str) -> None:
        """End with a refused turn."""
        turn = self.turns[-1]
        turn.error, turn.ended_at = reason, self._twin.load_seconds
        self._tokens = array("i")
        self._twin.on_talk_ended()

    def on_ended(self, request: ActiveRequest) -> None:
        """Go on after the pause before the next turn, if there is one."""
        turn, state = self.turns[-1], request.state
        turn.num_cached_tokens = state.num_cached_tokens
        turn.ended_at = self._twin.load_seconds + self._twin.host.deliver_seconds
        if state.failure is not None:
            turn.error = state.failure.message
        if turn.error or len(self.turns) == len(self.conversation.turns):
            self._tokens = array("i")
            self._twin.on_talk_ended()
            return
        self._tokens = self._tokens + array("i", state.delivered_ids)
        self._twin.clock.after(self.conversation.turns[len(self.turns)].think_seconds, self.begin)


def _new_tokens(turn: Turn, seed: int) -> "array[int]":
    tokens = array("i")
    for piece in turn.pieces:
        tokens.extend(_name_tokens(f"{seed} {piece.name}")[: piece.num_tokens])
        tokens.extend(_FILLER * (piece.num_tokens - NUM_NAME_TOKENS))
    return tokens


def _name_tokens(name: str) -> Sequence[int]:
    """Return the first tokens of a piece: they tell it from all others, since blocks are known by all that is before
    them, and which tokens follow changes no time."""
    digest = hashlib.blake2b(name.encode(), digest_size=2 * NUM_NAME_TOKENS).digest()
    return [FILLER_TOKEN + 1 + number % MAX_NAME_TOKEN for number in memoryview(digest).cast("H")]
