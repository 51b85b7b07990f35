"""Messages between the router and workers: requests, their tokens, their failures, profiles.

``token_ids`` is the prompt, on the wire as the bytes of its int32. ``output_ids`` are tokens that the client already
has, when another attempt continues a request: they are authoritative, and their KV is computed and handed over like
the prompt's. ``cache_salt`` isolates prefix caches: the KV of a request is shared with requests of the same salt only.
``priority``: lower is sooner; carried for policies, none of which reads it yet. ``late_grant``: decode reserves no room
before prefill asks for it, since other prompts come first; else it reserves room at once, as if prefill had asked.
``itl_seconds``: the objective for gaps between output tokens, which bounds the prompts computed beside them; 0: none.
"""

from enum import StrEnum
from typing import Annotated, TypeAlias

import msgspec

from splitserve.protocol.messages.base import Message
from splitserve.protocol.messages.logprobs import Logprobs
from splitserve.protocol.messages.marks import MAX_MARKS, Mark
from splitserve.protocol.request import MAX_CHOICES, FinishReason, Party, RequestKey, SamplingParams
from splitserve.protocol.token_ids import TokenIds
from splitserve.protocol.wire_numbers import Count, Seconds, Size, TokenId

MAX_CACHE_SALT_CHARS = 256
CacheSalt: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_CACHE_SALT_CHARS)]

Marks: TypeAlias = Annotated[list[Mark], msgspec.Meta(max_length=MAX_MARKS)]

Siblings: TypeAlias = Annotated[list[RequestKey], msgspec.Meta(max_length=MAX_CHOICES - 1)]


class PeerRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The other side of a hand-over: its identity and its endpoint."""

    party: Party
    endpoint: str


class PrefillRequest(Message, frozen=True):
    """Compute the prompt's KV, draw the first token, offer the KV to ``decode``. ``prefix`` may have the KV of more of
    the prompt than the receiver: read it from there, if that can be, and compute the rest."""

    key: RequestKey
    token_ids: TokenIds
    sampling: SamplingParams
    decode: PeerRef
    deadline_seconds: Seconds
    output_ids: list[TokenId] = []
    cache_salt: CacheSalt = ""
    priority: int = 0
    siblings: Siblings = []
    late_grant: bool = False
    prefix: PeerRef | None = None


class DecodeRequest(Message, frozen=True):
    """Reserve room for the prompt, pull its KV from ``prefill``, go on from the first token."""

    key: RequestKey
    token_ids: TokenIds
    sampling: SamplingParams
    prefill: PeerRef
    deadline_seconds: Seconds
    output_ids: list[TokenId] = []
    cache_salt: CacheSalt = ""
    priority: int = 0
    late_grant: bool = False
    siblings: Siblings = []
    itl_seconds: Seconds = 0.0


class LocalRequest(Message, frozen=True):
    """Do both phases here. ``prefix`` may have the KV of more of the prompt than the receiver: read it from there, if
    that can be."""

    key: RequestKey
    token_ids: TokenIds
    sampling: SamplingParams
    deadline_seconds: Seconds
    output_ids: list[TokenId] = []
    prefix: PeerRef | None = None
    cache_salt: CacheSalt = ""
    priority: int = 0
    siblings: Siblings = []
    itl_seconds: Seconds = 0.0


class Abort(Message, frozen=True):
    key: RequestKey


class Introduce(Message, frozen=True):
    """A prefill worker that later requests may name: decode connects to it now, not with the first request."""

    peer: PeerRef


class PeerGone(Message, frozen=True):
    """A worker that the router has lost, or that has left: the receiver drops its connection to it, unless a request
    there still reads from it. If the router was wrong, the next request that names ``peer`` makes a new connection."""

    peer: Party


class ReadClock(Message, frozen=True):
    """A question for the worker's clock, answered at once. ``asked_at``: the router's monotonic clock."""

    asked_at: Seconds


class Profile(Message, frozen=True):
    """Record the next ``num_steps`` steps, or those of ``timeout_seconds``, with a profiler."""

    profile_id: str
    num_steps: Size
    timeout_seconds: Seconds


class HandoverReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cost of a hand-over, measured by decode. ``read_seconds`` is the sum of the reads' durations; reads may
    overlap. The marks beside it have its times."""

    prefill: str
    transport: str
    blocks: Count
    bytes: Count
    cached_tokens: Count
    reads: Count
    read_seconds: Seconds = 0.0


class TokenDelta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """New tokens of one request. ``position`` is the index among the output tokens of ``token_ids[0]``.

    ``num_cached_tokens`` counts the prompt's tokens whose KV was found in this worker's prefix cache. ``logprobs`` are
    those of the tokens, where the request wants them. ``marks`` are those since the last message about the request: of
    its way to its first token here.
    """

    key: RequestKey
    position: Count
    token_ids: list[TokenId]
    finish_reason: FinishReason | None = None
    num_cached_tokens: Count = 0
    handover: HandoverReport | None = None
    logprobs: Logprobs | None = None
    marks: Marks = []


class StepTokens(Message, frozen=True):
    """All new tokens of one engine step: one message per step, not one per request."""

    deltas: list[TokenDelta]


class PromptLogprobs(Message, frozen=True):
    """Log-probabilities of adjacent tokens of a prompt, from its token number ``position`` on. A worker sends them in
    the prompt's order, and before the first output token that it draws."""

    key: RequestKey
    position: Count
    logprobs: Logprobs


class FailureCode(StrEnum):
    """The reason for which a worker failed a request."""

    INVALID = "invalid"  # the request can never run here (too long, bad tokens): the client's fault
    OVERLOADED = "overloaded"  # no room in bounded queues
    DEADLINE = "deadline"  # the request's deadline passed
    HANDOVER = "handover"  # the peer died, refused, withdrew or the bytes couldn't be trusted
    INTERNAL = "internal"  # a step failed


class RequestFailed(Message, frozen=True):
    key: RequestKey
    code: FailureCode
    message: str


class ClockReading(Message, frozen=True):
    """The answer to ReadClock, sent ``at`` seconds of the worker's monotonic clock, which its marks have, too."""

    asked_at: Seconds
    at: Seconds


class Profiled(Message, frozen=True):
    """The result of a recording: ``error`` says why it failed, "" if it is in the file ``trace`` on the worker.

    The device was busy for ``busy_seconds`` of the recorded ``seconds``; ``long_gap_seconds`` is the sum of its idle
    gaps of more than 20 us.
    """

    profile_id: str
    error: str = ""
    trace: str = ""
    num_steps: Count = 0
    seconds: Seconds = 0.0
    busy_seconds: Seconds = 0.0
    long_gap_seconds: Seconds = 0.0
