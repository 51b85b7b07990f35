"""The envelope of all messages, and the version of their schema."""

from typing import TypeAlias

import msgspec

from splitserve.protocol.messages.handover import (
    Grant,
    GrantDelayed,
    GrantRequest,
    Offer,
    OfferAck,
    PeerHello,
    PeerRefused,
    PeerWelcome,
    PrefixGrant,
    Release,
    Withdrawn,
)
from splitserve.protocol.messages.membership import (
    Draining,
    Heartbeat,
    Leave,
    Register,
    Registered,
    RegisterRefused,
)
from splitserve.protocol.messages.operators import BeginDrain, PrefixCacheReset, ResetPrefixCache, SetFrozen
from splitserve.protocol.messages.requests import (
    Abort,
    ClockReading,
    DecodeRequest,
    Introduce,
    LocalRequest,
    PeerGone,
    PrefillRequest,
    Profile,
    Profiled,
    PromptLogprobs,
    ReadClock,
    RequestFailed,
    StepTokens,
)
from splitserve.protocol.messages.routers import AskRouter, RouterAnswer, RouterReport, SentPrefixes
from splitserve.protocol.request import Party

SCHEMA_VERSION = 27

Body: TypeAlias = (
    Register
    | Registered
    | RegisterRefused
    | Heartbeat
    | Draining
    | Leave
    | PrefillRequest
    | DecodeRequest
    | LocalRequest
    | Abort
    | Introduce
    | PeerGone
    | ReadClock
    | Profile
    | SetFrozen
    | ResetPrefixCache
    | BeginDrain
    | StepTokens
    | PromptLogprobs
    | RequestFailed
    | ClockReading
    | Profiled
    | PrefixCacheReset
    | PeerHello
    | PeerWelcome
    | PeerRefused
    | GrantRequest
    | GrantDelayed
    | Grant
    | PrefixGrant
    | Offer
    | OfferAck
    | Release
    | Withdrawn
    | RouterReport
    | SentPrefixes
    | AskRouter
    | RouterAnswer
)


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message with its sender and receiver. ``to`` is None only while the receiver's incarnation is unknown
    (Register, PeerHello)."""

    sender: Party
    to: Party | None
    body: Body
