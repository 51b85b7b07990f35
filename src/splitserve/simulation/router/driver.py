"""The router's side of the simulator: the production core, driven by simulated links, timers and clients.

The core decides everything about requests. This driver does under virtual time the work that
:mod:`splitserve.router.requests.dispatcher` does with an event loop and :mod:`splitserve.router.links.fleet` with
sockets: links come up and break, heartbeats arrive or don't.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from splitserve.protocol.cluster_report import WorkerState
from splitserve.protocol.config import RouterConfig
from splitserve.protocol.kv_event_batch import KVEvent
from splitserve.protocol.messages.envelope import Body
from splitserve.protocol.messages.membership import WorkerInfo
from splitserve.protocol.messages.operators import BeginDrain, PrefixCacheReset, ResetPrefixCache, SetFrozen
from splitserve.protocol.messages.requests import Abort, PromptLogprobs, RequestFailed, StepTokens, TokenDelta
from splitserve.protocol.messages.routers import RouterReport
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Party, Role, SamplingParams
from splitserve.router.links.membership import Membership
from splitserve.router.placement.prefix_view import PrefixView
from splitserve.router.requests.core import RouterCore
from splitserve.router.requests.effects import (
    Begun,
    CachesAreReset,
    CancelTimer,
    Count,
    CountTokens,
    Deliver,
    Effect,
    Ended,
    Log,
    Observe,
    PauseIsFollowed,
    Refuse,
    Send,
    SetTimer,
    Stale,
    TellLimits,
    TellRouters,
)
from splitserve.router.requests.events import (
    Event,
    FromRouter,
    FromWorker,
    NotSent,
    RouterLost,
    Timer,
    TimerFired,
    WorkerLost,
    WorkerReady,
)
from splitserve.simulation.router.checks import Attempt, RouterChecks
from splitserve.simulation.router.client import SimClient
from splitserve.simulation.router.kv_feed import SimKVFeed
from splitserve.simulation.router.pause_checks import PauseChecks

if TYPE_CHECKING:
    from splitserve.simulation.simulator import Simulator
    from splitserve.simulation.worker.driver import SimWorker

TICK_SECONDS = 0.25
LINK_SECONDS = 0.2  # the longest time that a link takes to come up


class SimRouter:
    """The simulated router: clients submit to it, workers register with it and report to it. ``others``: the names of
    the other routers on the port."""

    def __init__(self, sim: "Simulator", party: Party, others: Sequence[str] = ()) -> None:
        self.sim = sim
        self.party = party
        self.alive = True
        self.heard: dict[Party, RouterReport] = {}  # the last reports of the other routers
        self.clients: dict[str, SimClient] = {}
        self.membership = Membership(sim.protocol.dead_after_seconds, sim.protocol.tombstone_seconds)
        self.prefixes = PrefixView()
        policy = sim.shape.policy
        config = RouterConfig(
            model="sim",
            served_model_name="sim",
            protocol=sim.protocol,
            policy=policy,
            name=party.engine_id,
            peers=dict.fromkeys(others, ""),
        )
        self.core = RouterCore(config, self.membership, self.prefixes, sim.random)
        self.checks = RouterChecks(self)
        self.pauses = PauseChecks(self)
        self._feeds: dict[Party, SimKVFeed] = {}
        self._links: set[Party] = set()  # workers whose link is up
        self._timers: dict[Timer, object] = {}  # pending, each with a mark of its own
        self._effects: deque[Effect] = deque()
        self._is_performing = False
        self._was_dropped = False  # whether the core dropped the message that is being handled
        self._able_at: list[tuple[float, bool]] = []
        self._performers: dict[type, Callable[[Any], object]] = {
            Send: self._send,
            TellRouters: lambda effect: sim.routers.tell(self.party, effect.to, effect.body),
            Deliver: lambda effect: self.clients[effect.request_id].on_update(effect.update),
            Begun: lambda effect: self.clients[effect.request_id].on_begun(),
            TellLimits: lambda effect: self._asking(effect.question_id).on_limits(effect.limits),
            Refuse: lambda effect: self._asking(effect.request_id).on_refused(effect.request_id),
            SetTimer: self._set_timer,
            CancelTimer: lambda effect: self._timers.pop(effect.timer, None),
            Count: self.checks.on_count,
            CountTokens: self._observe,
            Observe: self._observe,
            Ended: self.checks.on_ended,
            CachesAreReset: lambda _effect: self.checks.on_caches_reset(),
            PauseIsFollowed: self._on_pause_followed,
            Stale: self._drop,
            Log: lambda effect: sim.note(effect.text),
        }
        sim.after(TICK_SECONDS, self.tick)

    # ---- the core's driver ----

    def handle(self, event: Event) -> None:
        """Hand an event to the core, perform its effects, and check the invariants."""
        self._perform(event)
        if not self._is_performing:
            self.checks.after_event()

    def _perform(self, event: Event) -> None:
        before = self.pauses.before(event)
        effects = self.core.handle(event, self.sim.now)
        self.pauses.after(event, before, effects)
        self._effects.extend(effects)
        if self._is_performing:
            return
        self._is_performing = True
        while self._effects:
            effect = self._effects.popleft()
            self._performers[type(effect)](effect)
        self._is_performing = False

    @property
    def pending_timers(self) -> set[Timer]:
        """Timers that are set and have not fired."""
        return set(self._timers)

    def _send(self, effect: Send) -> None:
        to, body = effect.to, effect.body
        self.checks.on_send(to, body)
        is_full = not isinstance(body, Abort) and self.sim.random.random() < self.sim.faults.unsent
        if to in self._links and not is_full:
            self.sim.send(self.party, to, body)
            return
        if not isinstance(body, Abort | SetFrozen | ResetPrefixCache):
            for key in (body.key, *body.siblings):  # type: ignore[union-attr]
                self.checks.on_not_sent(to, key)
                self.clients[key.request_id].was_unsent = True
        self.handle(NotSent(to, body))

    def _set_timer(self, effect: SetTimer) -> None:
        timer, mark = effect.timer, object()
        assert effect.at >= self.sim.now, f"{timer} is set for a time that is over"
        self._timers[timer] = mark
        self.sim.at(effect.at, lambda: self._on_timer(timer, mark))

    def _on_timer(self, timer: Timer, mark: object) -> None:
        if self.alive and self._timers.get(timer) is mark:
            del self._timers[timer]
            self.handle(TimerFired(timer))

    @staticmethod
    def _observe(effect: Observe | CountTokens) -> None:
        assert effect.seconds >= 0, f"a time below 0: {effect}"

    def _on_pause_followed(self, _effect: PauseIsFollowed) -> None:
        self.pauses.on_followed()
        self.sim.routers.on_pause_followed(self)

    def _drop(self, effect: Stale) -> None:
        self._was_dropped = True
        self.sim.note(f"router drops {effect.kind} of {effect.detail} from {effect.sender}")

    def _asking(self, newcomer_id: str) -> SimClient:
        return self.clients[newcomer_id.partition("?")[0]]

    # ---- clients and workers ----

    def submit(self, request_id: str, prompt: list[int], wanted: int | SamplingParams, num_choices: int = 1) -> None:
        """Start a client with one prompt; each of its choices may be left early, as the faults say. ``wanted``: the
        request's parameters, or only its number of tokens."""
        sampling = wanted
        if isinstance(sampling, int):
            sampling = SamplingParams(max_tokens=sampling, seed=self.sim.random.getrandbits(32))
        if self.sim.faults.scored:
            of_output, of_prompt = ((None, 0)[sampling.seed >> bit & 1] for bit in (0, 1))
            sampling = msgspec.structs.replace(sampling, logprobs=of_output, prompt_logprobs=of_prompt)
        client = self.clients[request_id] = SimClient(self, request_id, prompt, sampling)
        if self.sim.random.random() < self.sim.faults.abort:
            client.leave_some_time()
        for choice in range(1, num_choices):
            sibling = client.add_sibling(choice)
            self.clients[sibling.request_id] = sibling
            if self.sim.random.random() < self.sim.faults.abort:
                sibling.leave_once_begun()
        client.ask()

    def on_message(self, sender: Party, body: Body) -> None:
        """Handle a worker's message; nothing arrives over a link that is down."""
        if sender not in self._links:
            return
        for news in body.deltas if isinstance(body, StepTokens) else [body]:
            if isinstance(news, PromptLogprobs | PrefixCacheReset):
                self._perform(FromWorker(sender, news))
                self.checks.after_event()
            elif isinstance(news, TokenDelta | RequestFailed):
                request = self.clients[news.key.request_id].request
                assert request is not None, f"a message of {news.key}, which was never submitted"
                before, self._was_dropped = Attempt(request.state), False
                self._perform(FromWorker(sender, StepTokens([news]) if isinstance(news, TokenDelta) else news))
                if not self._was_dropped:
                    self.checks.on_taken_in(sender, news, before)
                self.checks.after_event()

    # ---- membership ----

    def on_started(self, worker: "SimWorker") -> None:
        """Register a worker, dial it, and await its heartbeats."""
        info = WorkerInfo(
            party=worker.party,
            role=worker.role,
            endpoint="",
            pid=0,
            layout=worker.core.state.layout,
            num_blocks=worker.num_blocks,
            max_num_seqs=4,
            max_model_len=worker.core.state.max_model_len,
            vocab_size=worker.core.state.vocab_size,
        )
        registration = self.membership.register(worker.party, info, self.sim.now)
        assert registration.refusal is None, registration.refusal
        self._feeds[worker.party] = SimKVFeed(self, worker)
        self.dial(worker)
        self.heartbeat(worker)

    def dial(self, worker: "SimWorker") -> None:
        """Bring up the link to a worker after a while."""
        self.sim.after(self.sim.random.uniform(0.001, LINK_SECONDS), lambda: self.on_link_up(worker))

    def on_link_up(self, worker: "SimWorker") -> None:
        """Tell the core that a worker can get requests, unless it is gone."""
        party = worker.party
        record = self.membership.get(party)
        is_wanted = record is not None and record.state is not WorkerState.LOST
        if self.alive and worker.alive and is_wanted and party not in self._links:
            self._links.add(party)
            self.membership.link_up(party)
            self.handle(WorkerReady(party))
            self.checks.on_ready(party)
            self._feeds[party].subscribe()

    def is_linked(self, party: Party) -> bool:
        """Return whether the link to a worker is up."""
        return party in self._links

    def on_kv_events(self, worker: "SimWorker", events: list[KVEvent]) -> None:
        """Publish a worker's KV events to the prefix view, once it has registered here."""
        if worker.party in self._feeds:
            self._feeds[worker.party].publish(events)

    def heartbeat(self, worker: "SimWorker") -> None:
        """Take a worker's heartbeat with its load, and await the next one."""
        if not self.alive:
            return
        if not worker.can_run(lambda: self.heartbeat(worker)):
            return
        worker.settle()  # the loop wakes up for its heartbeat
        load, model = worker.core.load(), some_step_model(worker.party)
        if self.membership.heartbeat(worker.party, load, self.sim.now, step_model=model) is WorkerState.LOST:
            self.dial(worker)
        if worker.drain_clock.has_begun:
            self.membership.drain(worker.party)
        self.sim.after(self.sim.protocol.heartbeat_seconds, lambda: self.heartbeat(worker))

    def tick(self) -> None:
        """Declare silent workers lost, as the membership does regularly."""
        if not self.alive:
            return
        for party in self.membership.expire(self.sim.now):
            self.on_lost(party)
        self.checks.after_event()
        able = any(view.role is not Role.PREFILL for view in self.membership.snapshot(self.sim.now).workers)
        self._able_at.append((self.sim.now, able))
        self.sim.after(TICK_SECONDS, self.tick)

    def was_able_since(self, since: float) -> bool:
        """Return whether a worker was present that can serve any request alone."""
        return any(able for time, able in self._able_at if time >= since)

    def on_draining(self, party: Party) -> None:
        """Take note that a worker drains."""
        self.membership.drain(party)

    def begin_drain(self, party: Party) -> bool:
        """Let a worker drain, as an operator asks for; return whether its link took the message."""
        is_full = self.sim.random.random() < self.sim.faults.unsent
        if is_full or party not in self._links:
            return False
        self.sim.send(self.party, party, BeginDrain())
        self.membership.drain(party)
        return True

    def on_leave(self, party: Party) -> None:
        """Handle a worker's goodbye."""
        if self.membership.leave(party):
            self.on_lost(party)

    def on_connection_closed(self, party: Party) -> None:
        """Handle the end of a worker's membership connection."""
        if self.membership.lose(party):
            self.on_lost(party)

    def on_lost(self, party: Party) -> None:
        """Take down the link to a worker, and tell the core."""
        self._links.discard(party)
        self.prefixes.forget(party)
        self.checks.on_lost(party)
        self.handle(WorkerLost(party, "is lost"))

    # ---- other routers ----

    def on_router_message(self, event: FromRouter) -> None:
        """Take a message of another router."""
        before, self._was_dropped = self.heard, False
        if isinstance(event.body, RouterReport):
            others = {party: each for party, each in before.items() if party.engine_id != event.sender.engine_id}
            self.heard = others | {event.sender: event.body}
        self._perform(event)
        if self._was_dropped:
            self.heard = before
        self.checks.after_event()

    def on_router_lost(self, event: RouterLost) -> None:
        """Take note that another router is gone."""
        self.heard.pop(event.router, None)
        self.handle(event)

    # ---- the end ----

    @property
    def num_prompts(self) -> int:
        """Number of prompts that clients came with."""
        return sum(client.first is None for client in self.clients.values())

    @property
    def is_done(self) -> bool:
        """Return whether all requests have ended, with the router if it died."""
        return not self.alive or all(client.is_done for client in self.clients.values())

    @property
    def failures(self) -> list[str]:
        """Messages that clients got about failed requests."""
        states = [client.request.state for client in self.clients.values() if client.request is not None]
        return [state.failure.message for state in states if state.failure is not None]

    def has_ended(self, num_requests: int) -> bool:
        """Return whether all ``num_requests`` prompts were submitted, and all their choices have ended."""
        return self.num_prompts == num_requests and self.is_done

    def check_end(self) -> None:
        """Check that each request ended with the right tokens: all of them, if any worker could compute them."""
        for client in self.clients.values():
            assert client.is_done, f"{client.request_id} never ended"
            client.check_answer()
        self.checks.at_end()


def some_step_model(party: Party) -> StepModel:
    """Return a step-time model that has nothing to do with the worker's steps: no answer depends on predictions."""
    chosen = random.Random(str(party))
    coefficients = [10.0 ** chosen.uniform(-9.0, -1.0) for _ in range(6)]
    return StepModel.of(coefficients, chosen.choice([0, 10, 1000]))
