"""Every message between processes, as typed structs: one file, one schema version.

Who sends what:

    worker  -> membership: Register, Heartbeat, Draining, Leave  membership -> worker: Registered, RegisterRefused
    router  -> worker:     PrefillRequest, DecodeRequest, LocalRequest, Abort, Introduce, Profile
    worker  -> router:     StepTokens, RequestFailed, Profiled
    decode  -> prefill:    PeerHello, Grant, PrefixGrant, OfferAck, Release
    prefill -> decode:     PeerWelcome, PeerRefused, Offer, Withdrawn

Every message travels in an :class:`Envelope` that names the sender's incarnation, and the receiver's where the
sender knows it. Everything is decoded strictly; see :mod:`splitserve.wire`. Durations are relative (seconds):
clocks of two machines are never compared.
"""

from enum import StrEnum
from typing import Annotated, TypeAlias

import msgspec

from splitserve.counters import WorkerLoad
from splitserve.memory_records import LayoutRecord, RankMemory
from splitserve.request import FinishReason, Party, RequestKey, Role, SamplingParams
from splitserve.token_ids import TokenIds
from splitserve.wire_numbers import BlockHash, Count, Digest, NonNegative, Seconds, Size, TokenId, Unsigned

SCHEMA_VERSION = 8
MAX_RANKS = 64
MAX_CPUS = 4096
MAX_DEVICES = 256
MAX_OPERATIONS = 64
MAX_LINKS = 4096
MAX_HASHES = 1 << 16
MAX_TOKEN = 64


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag is the class's name."""


# ---- what workers say of themselves ----


class WorkerPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a worker runs, for whoever looks for the reason of something. ``machine`` is its host's name; ``cpus`` the
    hardware threads that it may use, on ``num_cores`` physical cores (a CPU quota counted in), ``num_threads`` those
    that compute. It has ``kv_bytes`` of KV memory and a host tier of ``host_kv_bytes``; ``remote_bytes`` of both lie on
    another NUMA node than they should.
    ``memlock_bytes`` is how much memory it may lock (None: any amount, or not known), ``max_open_files`` how many files
    it may open.
    ``ucx_tls``: transports that UCX may choose from, as its environment says; "" for its own choice. ``rdma_devices``:
    those that it sees. ``kernels``: which backend runs each operation."""

    machine: str = ""
    version: str = ""
    device: str = ""
    cpus: Annotated[list[Count], msgspec.Meta(max_length=MAX_CPUS)] = []
    num_threads: Count = 0
    remote_bytes: Count = 0
    num_cores: Count = 0
    kv_bytes: Count = 0
    host_kv_bytes: Count = 0
    memlock_bytes: Count | None = None
    max_open_files: Count = 0
    ucx_tls: str = ""
    rdma_devices: Annotated[list[str], msgspec.Meta(max_length=MAX_DEVICES)] = []
    kernels: Annotated[dict[str, str], msgspec.Meta(max_length=MAX_OPERATIONS)] = {}


class WorkerInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker as membership knows it. ``endpoint`` is the ZMQ address that routers and peers connect to,
    ``kv_events_endpoint`` the one for subscribers to its KV events; "" if it publishes none. With
    ``prefix_caching`` it reuses the KV of earlier prompts."""

    party: Party
    role: Role
    endpoint: str
    pid: Count
    layout: LayoutRecord
    num_blocks: Size
    max_num_seqs: Size
    max_model_len: Size
    vocab_size: Size
    kv_events_endpoint: str = ""
    place: WorkerPlace = WorkerPlace()
    prefix_caching: bool = True


class Register(Message, frozen=True):
    """``token`` is that of the last Registered, "" before the first."""

    info: WorkerInfo
    token: Annotated[str, msgspec.Meta(max_length=MAX_TOKEN)] = ""


class Registered(Message, frozen=True):
    """Membership believes the connection on which this travels about the worker. ``token`` lets the worker register
    from another connection, should this one break."""

    token: Annotated[str, msgspec.Meta(max_length=MAX_TOKEN)] = ""


class RegisterRefused(Message, frozen=True):
    """``for_good``: asking again is of no use to this incarnation."""

    reason: str
    for_good: bool = True


class PeerLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How KV travels from ``peer`` (an engine id) to the sender, as found out when connecting.

    ``transport`` in the connector's words; ``bytes_per_second`` of one thread's large read; ``problem`` says why that
    isn't as it should be, and is empty if it is. A peer that can't be reached has no transport, and a problem.
    """

    peer: str
    transport: str
    bytes_per_second: NonNegative
    problem: str = ""


class Heartbeat(Message, frozen=True):
    """``clock_seconds`` is the sender's Unix time, for whoever reads logs of several machines: nothing is decided by it
    (0: not told)."""

    load: WorkerLoad
    links: Annotated[list[PeerLink], msgspec.Meta(max_length=MAX_LINKS)] = []
    clock_seconds: NonNegative = 0.0


class Draining(Message, frozen=True):
    """No new requests, please: the sender finishes those it has, and says Leave when it is idle."""


class Leave(Message, frozen=True):
    """``error``: what ended the sender; "" if it leaves in order."""

    error: str = ""


# ---- router to worker ----
# ``token_ids`` is the prompt, on the wire as the bytes of its int32. ``output_ids`` are tokens that the client already
# has, when a request is continued by another attempt: they are authoritative, and their KV is computed and handed over
# like the prompt's.


class PeerRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The other side of a hand-over: who it is and where it listens."""

    party: Party
    endpoint: str


class PrefillRequest(Message, frozen=True):
    """Compute the prompt's KV, draw the first token, offer the KV to ``decode``."""

    key: RequestKey
    token_ids: TokenIds
    sampling: SamplingParams
    decode: PeerRef
    deadline_seconds: Seconds
    output_ids: list[TokenId] = []


class DecodeRequest(Message, frozen=True):
    """Reserve room for the prompt, pull its KV from ``prefill``, go on from the first token."""

    key: RequestKey
    token_ids: TokenIds
    sampling: SamplingParams
    prefill: PeerRef
    deadline_seconds: Seconds
    output_ids: list[TokenId] = []


class LocalRequest(Message, frozen=True):
    """Do both phases here. ``prefix`` may have the KV of more of the prompt than the receiver: read it from there, if
    that can be."""

    key: RequestKey
    token_ids: TokenIds
    sampling: SamplingParams
    deadline_seconds: Seconds
    output_ids: list[TokenId] = []
    prefix: PeerRef | None = None


class Abort(Message, frozen=True):
    key: RequestKey


class Introduce(Message, frozen=True):
    """A prefill worker that decode may be told to pull from: connect to it now, not with the first request."""

    peer: PeerRef


class Profile(Message, frozen=True):
    """Record the next ``num_steps`` steps, or those of ``timeout_seconds``, with a profiler."""

    profile_id: str
    num_steps: Size
    timeout_seconds: Seconds


# ---- worker to router ----


class HandoverReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a hand-over cost, as decode saw it.

    ``seconds`` runs from the first read posted to the last range verified, ``read_seconds`` of which reads were under
    way (added up, where there were several at once); ``exposed_seconds`` from the arrival of the last offer (which
    carries the first token) to decode ready.
    """

    prefill: str
    transport: str
    blocks: Count
    bytes: Count
    cached_tokens: Count
    reads: Count
    seconds: Seconds
    exposed_seconds: Seconds
    read_seconds: Seconds = 0.0


class TokenDelta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """New tokens of one request. ``position`` is the index among the output tokens of ``token_ids[0]``.

    ``num_cached_tokens`` counts the prompt's tokens whose KV was found in this worker's prefix cache.
    """

    key: RequestKey
    position: Count
    token_ids: list[TokenId]
    choice: Count = 0
    finish_reason: FinishReason | None = None
    num_cached_tokens: Count = 0
    handover: HandoverReport | None = None


class StepTokens(Message, frozen=True):
    """All new tokens of one engine step: one message per step, not one per request."""

    deltas: list[TokenDelta]


class FailureCode(StrEnum):
    """Why a worker gave a request up."""

    INVALID = "invalid"  # the request can never run here (too long, bad tokens): the client's fault
    OVERLOADED = "overloaded"  # no room in bounded queues
    DEADLINE = "deadline"  # the request's deadline passed
    HANDOVER = "handover"  # the peer died, refused, withdrew or the bytes couldn't be trusted
    INTERNAL = "internal"  # a step failed


class RequestFailed(Message, frozen=True):
    key: RequestKey
    code: FailureCode
    message: str


class Profiled(Message, frozen=True):
    """How a recording ended: ``error`` says why there's none, "" if there is one, in the file ``trace`` on the worker.

    ``busy_seconds`` of the recorded ``seconds`` the device ran something; for ``long_gap_seconds`` it did nothing for
    more than 20 us on end.
    """

    profile_id: str
    error: str = ""
    trace: str = ""
    num_steps: Count = 0
    seconds: Seconds = 0.0
    busy_seconds: Seconds = 0.0
    long_gap_seconds: Seconds = 0.0


# ---- between decode and prefill ----


class PeerHello(Message, frozen=True):
    """Decode introduces itself to a prefill worker, before its first grant."""

    layout: LayoutRecord


class PeerWelcome(Message, frozen=True):
    """The layouts match: here is what a reader needs.

    ``ranks`` are in the order of their heads (:meth:`LayoutRecord.first_kv_head`); block ids mean the same on all of
    them. Generations (uint64, one per block) are in rank 0's host memory, for all ranks.
    """

    layout: LayoutRecord
    connector: str
    generations_address: Unsigned
    ranks: Annotated[list[RankMemory], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]


class PeerRefused(Message, frozen=True):
    reason: str


class Grant(Message, frozen=True):
    """Decode has room for the whole prompt and already holds the KV of its first ``num_cached_tokens`` tokens.

    Sent again as the lease's renewal; prefill answers each one with its current offer, or :class:`Withdrawn`.
    ``reads_host_tier``: offers may name slots of prefill's host tier.
    """

    key: RequestKey
    num_prompt_tokens: Count
    num_cached_tokens: Count
    lease_seconds: Seconds
    reads_host_tier: bool = False


class PrefixGrant(Message, frozen=True):
    """Decode has room for a prompt's blocks with these ``hashes``, from prompt block ``first_block`` on: what the
    receiver has of them, one after the other, on its device or in its host tier, it holds and offers; it computes
    nothing. The answer is one last :class:`Offer` without a first token, or :class:`Withdrawn`.

    Sent again as the lease's renewal.
    """

    key: RequestKey
    first_block: Count
    hashes: Annotated[list[BlockHash], msgspec.Meta(min_length=1, max_length=MAX_HASHES)]
    lease_seconds: Seconds


class OfferedBlock(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Slots of the host tier have ids that are counted on from the device's blocks.

    ``digest`` is of the block's bytes, empty unless they are to be verified (``--verify-kv``)."""

    block_id: Count
    generation: Unsigned
    digest: Digest = b""


class Offer(Message, frozen=True):
    """Blocks of the prompt whose KV is complete, from prompt block ``first_block`` on. Cumulative above what was
    acknowledged.

    ``num_tokens`` counts the prompt's tokens that are covered up to the end of this offer; only the ``last`` one may
    end inside a block. ``first_tokens`` holds the first output token of each choice, in the last offer only.
    ``revision`` grows when blocks that were offered have another place: the offer with the highest one holds.
    """

    key: RequestKey
    first_block: Count
    blocks: list[OfferedBlock]
    num_tokens: Count
    last: bool = False
    first_tokens: list[TokenId] = []
    revision: Count = 0


class OfferAck(Message, frozen=True):
    """Decode knows the offers up to prompt block ``num_blocks`` (it need not have read them yet), of that revision."""

    key: RequestKey
    num_blocks: Count
    last: bool
    revision: Count = 0


class Release(Message, frozen=True):
    """Decode needs the blocks no more: read and verified (``complete``), or given up.

    ``mismatch``: what arrived wasn't what was offered; the sender's memory may be to blame.
    """

    key: RequestKey
    complete: bool
    mismatch: bool = False


class Withdrawn(Message, frozen=True):
    """Prefill offers nothing (more) for this request.

    ``attempt_over``: nobody waits for this attempt any more (its first token was its last one, or it was aborted),
    so decode needn't compute it either.
    """

    key: RequestKey
    reason: str
    attempt_over: bool = False


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
    | Profile
    | StepTokens
    | RequestFailed
    | Profiled
    | PeerHello
    | PeerWelcome
    | PeerRefused
    | Grant
    | PrefixGrant
    | Offer
    | OfferAck
    | Release
    | Withdrawn
)


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``to`` is None only where the sender can't know the receiver's incarnation (Register, PeerHello)."""

    sender: Party
    to: Party | None
    body: Body
