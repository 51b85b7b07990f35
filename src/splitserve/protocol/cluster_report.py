"""The router's reports to operators, as typed data: its cluster (the answer of GET /admin/workers), and requests that
have ended (GET /admin/requests/ID).

Ages are in seconds at ``clock_seconds``, the router's Unix time.
"""

from enum import StrEnum

import msgspec

from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.messages.membership import PeerLink, WorkerInfo
from splitserve.protocol.placement.step_model import StepModel


class WorkerState(StrEnum):
    """State of a registered worker, as membership sees it (docs/concepts/handover.md)."""

    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """A registered worker.

    ``silent_seconds``: since its last heartbeat, or since it registered. ``clock_offset_seconds``: how far its clock
    is ahead of the router's, minus the heartbeat's travel time; None before the first heartbeat.
    """

    info: WorkerInfo
    state: WorkerState
    silent_seconds: float
    num_heartbeats: int
    load: WorkerLoad
    links: list[PeerLink]
    clock_offset_seconds: float | None = None
    step_model: StepModel = StepModel()  # as the worker sent it


class RefusedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker whose registration was refused, and that hasn't registered with other settings since."""

    engine_id: str
    machine: str
    endpoint: str
    reason: str
    seconds_ago: float


class Stranger(msgspec.Struct, frozen=True, kw_only=True):
    """Connections to membership that didn't show the cluster's secret. ``address``: where they came from."""

    address: str
    num_attempts: int
    seconds_ago: float


class RequestRates(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of the last ``seconds``, and of now. Without a request in that time, TTFT is None."""

    seconds: float
    num_in_flight: int
    num_waiting: int  # for a worker
    requests_per_second: float
    failures_per_second: float
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    ttft_seconds_median: float | None
    ttft_seconds_p99: float | None


class ClusterReport(msgspec.Struct, frozen=True, kw_only=True):
    """``model`` is the checkpoint's directory on the router's machine, ``membership`` the endpoint where workers
    register. ``has_secret``: whether side channels require a secret."""

    version: str
    machine: str
    pid: int
    clock_seconds: float
    model: str
    served_model_name: str
    membership: str
    has_secret: bool
    heartbeat_seconds: float
    dead_after_seconds: float
    workers: list[WorkerReport]
    refused: list[RefusedWorker] = []
    strangers: list[Stranger] = []
    rates: RequestRates | None = None


class RequestSummary(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request that has ended."""

    request_id: str  # which begins with X-Request-Id
    status: str  # finished, failed or cancelled
    intended: str  # disaggregated or local, as first placed
    actual: str  # disaggregated, local, failed or cancelled
    reason: str  # the reason of ``actual``; "ok" if it was intended
    message: str  # of a failure, in words
    finish_reason: str  # stop or length; "" without an end of the output
    prefill: str  # engine id of the last attempt's worker that computed the prompt
    decode: str  # engine id of the one that decoded, perhaps the same
    num_attempts: int  # 1, unless attempts failed
    num_prompt_tokens: int  # tokens of the prompt
    num_cached_tokens: int  # those of them that were cached
    num_known_tokens: int | None  # those with which an earlier prompt began; None: not counted (one worker)
    num_output_tokens: int  # tokens that were delivered
    seconds: float  # from its arrival to its end
    ttft_seconds: float | None  # from its arrival to its first token
    itl_seconds: float | None  # mean time per output token after the first
    longest_gap_seconds: float  # longest time between deliveries of tokens
    num_gaps: int  # times between deliveries of tokens above the objective
    handover_seconds: float | None  # from the last token that prefill sent to decode's report, at the router
    transport: str  # of the hand-over; "" without one
    handover_bytes: int  # that decode read
    handover_read_seconds: float  # sum of its reads' durations
    ttft_stages: dict[str, float]  # seconds by stage, in order; their sum is ``ttft_seconds``
    handover_stages: dict[str, float]  # from prefill's last token to decode's first one
    request_class: str = ""  # the request's class
    tenant: str = ""  # the tenant whose key it had
    predicted_ttft_seconds: float | None = None  # as predicted at its arrival
    handover_reads: int = 0  # number of the hand-over's reads


class TraceSpan(msgspec.Struct, frozen=True, gc=False):
    """An interval of a request in one process. ``begin``: seconds after the request's arrival."""

    name: str
    process: str  # "router", or a worker's engine id
    begin: float
    seconds: float
    amount: int = 0  # tokens, where the span has some
    detail: str = ""  # of an attempt: the reason of its failure


class RequestTrace(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has ended, with its spans. ``began_at`` is the router's Unix time at its arrival."""

    summary: RequestSummary
    began_at: float
    spans: list[TraceSpan]


class RequestTraces(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of GET /admin/requests/ID: the requests whose ids begin with ID, the latest last."""

    traces: list[RequestTrace]
