"""Effects that a worker's core asks its loop for. The core itself performs no I/O, so a simulator can replace the
loop."""

from dataclasses import dataclass, field

from splitserve.kvconnector.tiers.commands import AnyCommand
from splitserve.protocol.handover.reads import ReadCommand, Readers
from splitserve.protocol.messages.envelope import Body
from splitserve.protocol.messages.handover import PeerWelcome
from splitserve.protocol.messages.requests import PeerRef
from splitserve.protocol.request import Party


@dataclass(frozen=True, slots=True)
class Send:
    """A message to a party that is connected to us, or that we dialled."""

    to: Party
    body: Body


@dataclass(frozen=True, slots=True)
class Dial:
    """Connect to a peer's endpoint, so that messages can be sent to it."""

    peer: PeerRef


@dataclass(frozen=True, slots=True)
class HangUp:
    """Drop the connection to a dialled peer."""

    peer: Party


@dataclass(frozen=True, slots=True)
class Connect:
    """Let the KV connector prepare reads from a peer."""

    peer: Party
    welcome: PeerWelcome


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Let the KV connector forget a peer: its reads become terminal."""

    peer: Party


@dataclass(frozen=True, slots=True)
class StartRead:
    command: ReadCommand


@dataclass(frozen=True, slots=True)
class StartCopy:
    """Copy blocks between the device and a tier below it, or make sure that a tier's are never used again."""

    command: AnyCommand


@dataclass(frozen=True, slots=True)
class Serve:
    """Change of the peers' activity here: the connector makes progress for it from now on."""

    readers: Readers


@dataclass(frozen=True, slots=True)
class Incident:
    """An event that must never happen; operators must be alerted."""

    description: str


Effect = Send | Dial | HangUp | Connect | Disconnect | StartRead | StartCopy | Serve | Incident


@dataclass(slots=True)
class Outbox:
    """Effects in the order in which they must happen."""

    effects: list[Effect] = field(default_factory=list)

    def send(self, to: Party, body: Body) -> None:
        self.effects.append(Send(to, body))

    def put(self, effect: Effect) -> None:
        self.effects.append(effect)

    def take(self) -> list[Effect]:
        effects, self.effects = self.effects, []
        return effects
