"""Messages between workers and membership: registration, heartbeats, drains."""

from typing import Annotated

import msgspec

from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.messages.base import Message
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Party, Role
from splitserve.protocol.wire_numbers import Count, NonNegative, Size, Unsigned

MAX_CPUS = 4096

MAX_DEVICES = 256

MAX_OPERATIONS = 64

MAX_LINKS = 4096

MAX_TOKEN = 64


class WorkerSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's machine and limits, for diagnosis. ``machine`` is its host's name; ``cpus`` the hardware threads that
    it may use, on ``num_cores`` physical cores (a CPU quota counted in), ``num_threads`` the number that compute. It
    has, on each rank, ``kv_bytes`` of KV memory and a host tier of ``host_kv_bytes``; ``remote_bytes`` of both on its
    first rank lie on another NUMA node than they should.
    ``memlock_bytes`` is how much memory it may lock (None: any amount, or not known), ``max_open_files`` how many files
    it may open.
    ``ucx_tls``: transports that UCX may choose from, set by the environment; "" for UCX's own choice. ``rdma_devices``:
    those visible to the worker. ``kernels``: the backend of each operation."""

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
    """A worker as registered with membership. ``endpoint`` is the ZMQ address that routers and peers connect to,
    ``kv_events_endpoint`` the one for subscribers to its KV events; "" if it publishes none. With
    ``prefix_caching`` it reuses the KV of earlier prompts. A step has ``max_num_batched_tokens`` at most, and
    ``max_num_prefill_tokens`` of prompts if it also decodes, ``max_num_sized_tokens`` if that has an objective (0: not
    known)."""

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
    setup: WorkerSetup = WorkerSetup()
    prefix_caching: bool = True
    max_num_batched_tokens: Count = 0
    max_num_prefill_tokens: Count = 0
    max_num_sized_tokens: Count = 0


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
    """The link by which KV travels from ``peer`` (an engine id), in this ``incarnation``, to the sender, measured when
    connecting.

    ``transport`` in the connector's words; ``bytes_per_second`` of one thread's large read; ``problem`` explains an
    unsuitable transport, and is empty for a suitable one. A peer that can't be reached has no transport, and a problem.
    ``prefix_blocks``: blocks of prompts' prefixes that were read from the peer, so far.
    """

    peer: str
    transport: str
    bytes_per_second: NonNegative
    problem: str = ""
    prefix_blocks: Count = 0
    incarnation: Unsigned = 0


class Heartbeat(Message, frozen=True):
    """A sign of life. ``clock_seconds`` is the sender's Unix time, for the comparison of logs of several machines: no
    decision depends on it (0: not given). ``step_model`` predicts the sender's steps."""

    load: WorkerLoad
    links: Annotated[list[PeerLink], msgspec.Meta(max_length=MAX_LINKS)] = []
    clock_seconds: NonNegative = 0.0
    step_model: StepModel = StepModel()


class Draining(Message, frozen=True):
    """The begin of a drain: the sender takes no new requests, finishes those it has, and sends Leave when idle."""


class Leave(Message, frozen=True):
    """``error``: what ended the sender; "" if it leaves in order."""

    error: str = ""
