"""The exchange with the other router processes on one port: a connection to the membership socket of each, which is
protected as the workers' connections are. Must be created, used and closed on the event loop's thread.

Messages may get lost with a connection; the core's next report makes up for them.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import zmq

from splitserve.protocol.config import RouterConfig
from splitserve.protocol.messages.envelope import Body, Envelope
from splitserve.protocol.messages.routers import AskRouter, RouterAnswer, RouterReport, SentPrefixes, Topic
from splitserve.protocol.request import Party
from splitserve.protocol.wire import encode
from splitserve.router.links.fleet import Fleet
from splitserve.router.links.links import LoopSocket, new_socket
from splitserve.router.peers.peers import Peers
from splitserve.router.requests.effects import TellRouters
from splitserve.router.requests.events import Event, FromRouter, MeetRouters, RouterLost

ANSWER_SECONDS = 0.5
HEAR_SECONDS = 1.0
READY_SECONDS = 5.0
_LOOK_SECONDS = 0.01

log = logging.getLogger(__name__)


class _RouterLink:
    """The connection to one other router, which ZMQ makes again whenever it ends."""

    def __init__(self, fleet: Fleet, endpoint: str, on_up: Callable[[], None], on_down: Callable[[], None]) -> None:
        self._on_up = on_up
        self._on_down = on_down
        socket = new_socket(fleet.context, zmq.DEALER)
        fleet.security.protect_connecting(socket)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # what can't be sent now is out of date later
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._monitor = LoopSocket(monitor, self._on_event)
        self._socket = LoopSocket(socket, lambda _frames: None)
        socket.connect(endpoint)

    def send(self, data: bytes) -> None:
        self._socket.send([data])

    def close(self) -> None:
        self._socket.socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def _on_event(self, frames: list[bytes]) -> None:
        event = int.from_bytes(frames[0][:2], "little")
        (self._on_up if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else self._on_down)()


@dataclass(slots=True)
class _Question:
    """A question to the other routers: the names of those that have not answered, and the answers."""

    waiting: set[str]
    answers: dict[str, bytes] = field(default_factory=dict)
    is_answered: asyncio.Event = field(default_factory=asyncio.Event)


class Exchange:
    """``answers``: how this router answers the others' questions, by topic."""

    def __init__(self, config: RouterConfig, fleet: Fleet, peers: Peers, handle: Callable[[Event], None]) -> None:
        self.answers: dict[Topic, Callable[[str], bytes]] = {}
        self.reload_tenants: Callable[[], None] = lambda: None
        self._fleet = fleet
        self._peers = peers
        self._handle = handle
        self._loop = asyncio.get_running_loop()
        self._questions: dict[int, _Question] = {}
        self._num_questions = 0
        self._links = {
            name: _RouterLink(fleet, endpoint, partial(handle, MeetRouters(name)), partial(self._on_down, name))
            for name, endpoint in config.peers.items()
        }
        if self._links:
            fleet.on_router = self._on_message

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()
        for question in self._questions.values():
            question.is_answered.set()

    async def catch_up(self) -> None:
        """Begin the exchange, and wait shortly until this router knows what the others do, and has as many workers as
        they have: the first requests then find what they need."""
        if not self._links:
            return
        self._handle(MeetRouters())
        begun_at = self._loop.time()
        while self._lacks_something(self._loop.time() - begun_at):
            await asyncio.sleep(_LOOK_SECONDS)

    def _lacks_something(self, seconds: float) -> bool:
        most = max((report.num_ready for report in self._peers.reports), default=0)
        lacks_workers = self._fleet.num_ready < most and seconds < READY_SECONDS
        return lacks_workers or (seconds < HEAR_SECONDS and not self._peers.are_all_heard)

    def tell(self, effect: TellRouters) -> None:
        """Send a message to one router, or to all."""
        self._send(effect.body, effect.to)

    def tell_tenants_changed(self) -> None:
        """Let the other routers read the file of tenants again."""
        self._send(AskRouter(0, "tenants"))

    async def ask(self, topic: Topic, argument: str = "") -> dict[str, bytes]:
        """Return the other routers' answers by their names; those that don't answer in time are left out."""
        parties = self._peers.parties
        if not parties:
            return {}
        self._num_questions += 1
        number, question = self._num_questions, _Question({party.engine_id for party in parties})
        self._questions[number] = question
        for party in parties:
            self._send(AskRouter(number, topic, argument), party)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await question.is_answered.wait()
        except TimeoutError:
            log.warning("no answer about %s from %s", topic, ", ".join(sorted(question.waiting)))
        finally:
            del self._questions[number]
        return question.answers

    def _send(self, body: Body, to: Party | None = None) -> None:
        data = encode(Envelope(self._fleet.party, to, body))
        for name, link in self._links.items():
            if to is None or name == to.engine_id:
                link.send(data)

    def _on_message(self, sender: Party, body: Body) -> bool:
        """Take a message from the membership socket; return False if it isn't one of another router."""
        if sender.engine_id not in self._links:
            return False
        if isinstance(body, RouterReport | SentPrefixes):
            self._handle(FromRouter(sender, body))
        elif isinstance(body, AskRouter):
            self._on_question(sender, body)
        elif isinstance(body, RouterAnswer):
            self._on_answer(sender, body)
        else:
            return False
        return True

    def _on_question(self, sender: Party, body: AskRouter) -> None:
        if body.topic == "tenants":
            self.reload_tenants()
        elif (answer := self.answers.get(body.topic)) is not None:
            self._send(RouterAnswer(body.question_id, answer(body.argument)), sender)

    def _on_answer(self, sender: Party, body: RouterAnswer) -> None:
        question = self._questions.get(body.question_id)
        if question is not None and sender.engine_id in question.waiting:
            question.waiting.discard(sender.engine_id)
            question.answers[sender.engine_id] = body.content
            if not question.waiting:
                question.is_answered.set()

    def _on_down(self, name: str) -> None:
        for party in self._peers.parties:
            if party.engine_id == name:
                log.warning("router %s is gone; its streams have ended", party)
                self._handle(RouterLost(party))
