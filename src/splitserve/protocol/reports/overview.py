"""Overview of the running cluster: the answer of GET /admin/overview, which the dashboard, ``splitserve top`` and
``splitserve doctor`` show, and which the diagnosis reads.

Figures are those of the last ``seconds``, as far as the router remembers them, unless the field says otherwise.
"""

from typing import Annotated, TypeAlias

import msgspec

from splitserve.protocol.cluster_report import RequestRates, RequestTrace


def _text(description: str) -> msgspec.Meta:
    return msgspec.Meta(description=description)


Share: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of a duration over requests, in seconds."""

    num: Annotated[int, _text("Number of requests with this duration.")] = 0
    mean: Annotated[float, _text("Mean.")] = 0.0
    p50: Annotated[float, _text("Median.")] = 0.0
    p99: Annotated[float, _text("99th percentile.")] = 0.0


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """A stage of the time to first token, or of the hand-over after it."""

    name: Annotated[str, _text("Name of the stage, as in `splitserve_stage_seconds`.")]
    meaning: Annotated[str, _text("The stage in words.")]
    times: Annotated[Times, _text("Its duration.")]


class PromptFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts of requests with a first token."""

    num: Annotated[int, _text("Number of prompts.")] = 0
    tokens: Annotated[int, _text("Tokens of these prompts.")] = 0
    cached_tokens: Annotated[int, _text("Tokens whose KV was found, in any tier.")] = 0
    known_tokens: Annotated[
        int | None,
        _text(
            "Tokens with which an earlier prompt began: the most that could be found. null: one worker, not counted."
        ),
    ] = None
    median_tokens: Annotated[int, _text("Median of the tokens to compute per prompt.")] = 0
    longest_tokens: Annotated[int, _text("Most tokens to compute of a prompt.")] = 0
    long_share: Annotated[
        Share, _text("Share of all tokens to compute that belongs to prompts of eight times the median or more.")
    ] = 0.0
    short_wait: Annotated[Times, _text("Wait for the first step, of prompts up to the median.")] = Times()
    short_prefill_seconds: Annotated[float, _text("Median time from the first step to the first token, of these.")] = (
        0.0
    )


class TierHits(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens whose KV came from one tier."""

    tier: Annotated[str, _text("`device`, or the name of a tier below it.")]
    tokens: Annotated[int, _text("Tokens.")]


class TransportFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Hand-overs by one transport."""

    transport: Annotated[str, _text("The transport in the connector's words.")]
    num: Annotated[int, _text("Number of hand-overs.")]
    bytes_per_second: Annotated[float, _text("KV bytes over the whole time.")]
    read_bytes_per_second: Annotated[float, _text("KV bytes over the time in which hand-overs read.")]
    link_bytes_per_second: Annotated[float, _text("Median speed of the links, measured when connecting.")]
    exposed: Annotated[Times, _text("Time from the last offer to the last verified block.")]
    problem: Annotated[str, _text("Reason why the transport is not the expected one; empty if it is.")] = ""


class Path(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that ended, by outcome."""

    intended: Annotated[str, _text("`disaggregated` or `local`, as first placed.")]
    actual: Annotated[str, _text("`disaggregated`, `local`, `failed` or `cancelled`.")]
    reason: Annotated[str, _text("Reason of the actual path; `ok` if it was intended.")]
    num: Annotated[int, _text("Number of requests.")]


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """An objective of the cluster spec."""

    name: Annotated[str, _text("`ttft` or `tpot`.")]
    seconds: Annotated[float, _text("The objective.")]
    num: Annotated[int, _text("Requests that were judged.")]
    num_met: Annotated[int, _text("Those that met it.")]


class RouterFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The router's own process, and its clients."""

    busy_share: Annotated[Share, _text("Processor time of the event loop's thread over elapsed time.")] = 0.0
    starved_share: Annotated[Share, _text("Time in which that thread was runnable and had no core, likewise.")] = 0.0
    lag_seconds: Annotated[float, _text("Longest delay of a timer of the event loop.")] = 0.0
    num_in_flight: Annotated[int, _text("Requests admitted and not completely answered, now.")] = 0
    max_in_flight: Annotated[int, _text("Bound of these; further requests get 429.")] = 0
    num_active: Annotated[int, _text("Those that workers still compute, now.")] = 0
    num_waiting: Annotated[int, _text("New requests that wait for a worker, now.")] = 0
    num_queued: Annotated[int, _text("Requests that wait in the router because the workers are full, now.")] = 0
    queued_tokens: Annotated[int, _text("Prompt tokens of these.")] = 0
    num_unread: Annotated[int, _text("Connections whose client does not read its answer, now.")] = 0
    unread_seconds: Annotated[float, _text("The longest such time, now.")] = 0.0
    is_ready: Annotated[bool, _text("Whether a request could be served now.")] = True
    not_ready_reason: Annotated[str, _text("What is lacking, also if workers that decode serve alone.")] = ""
    pause_mode: Annotated[str, _text("Mode of the operators' pause; empty: there is none.")] = ""
    paused_seconds: Annotated[float, _text("Time since that pause began.")] = 0.0


class WorkerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, from its heartbeats and from the requests that it served."""

    engine_id: Annotated[str, _text("Its name.")]
    role: Annotated[str, _text("`prefill`, `decode` or `mixed`.")]
    state: Annotated[str, _text("`connecting`, `ready`, `draining` or `lost`.")]
    machine: Annotated[str, _text("Its host.")] = ""
    device: Annotated[str, _text("Its device.")] = ""
    silent_seconds: Annotated[float, _text("Time since its last heartbeat.")] = 0.0
    breaker: Annotated[str, _text("`closed`; `open`: it failed repeatedly and gets no requests for a while.")] = (
        "closed"
    )
    breaker_seconds: Annotated[float, _text("Remaining time of an open breaker.")] = 0.0
    num_failures: Annotated[int, _text("Failed attempts that it is blamed for.")] = 0
    num_running: Annotated[int, _text("Sequences that decode.")] = 0
    max_num_seqs: Annotated[int, _text("Most sequences of a step.")] = 0
    num_waiting: Annotated[int, _text("Requests that wait for prefill, or are in it.")] = 0
    waiting_tokens: Annotated[int, _text("Prompt tokens still to be computed.")] = 0
    blocks: Annotated[int, _text("KV blocks.")] = 0
    blocks_used: Annotated[int, _text("KV blocks in use, with content.")] = 0
    blocks_reserved: Annotated[int, _text("KV blocks reserved by requests, and empty.")] = 0
    blocks_cached: Annotated[int, _text("KV blocks of the prefix cache that nothing uses.")] = 0
    max_used_share: Annotated[Share, _text("Largest share of blocks used or reserved.")] = 0.0
    busy_share: Annotated[Share, _text("Share of the time in which a step ran.")] = 0.0
    prompt_tokens_per_second: Annotated[float, _text("Prompt tokens computed.")] = 0.0
    output_tokens_per_second: Annotated[float, _text("Tokens drawn.")] = 0.0
    step_seconds: Annotated[float, _text("Mean time of a step.")] = 0.0
    step_sequences: Annotated[float, _text("Mean number of sequences of a step.")] = 0.0
    slowness: Annotated[
        float,
        _text("Its time per step (per prompt token on prefill) over the median of its role's others; 0: not known."),
    ] = 0.0
    num_requests: Annotated[int, _text("Requests that it served.")] = 0
    kv_bytes: Annotated[int, _text("Bytes of KV in host memory, of each rank.")] = 0
    remote_bytes: Annotated[int, _text("Those of its first rank on another NUMA node than its cores or its GPU.")] = 0
    tiers_down: Annotated[list[str], _text("Tiers whose server does not answer.")] = []


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A cause that limits the cluster."""

    name: Annotated[str, _text("Name for programs.")]
    sentence: Annotated[str, _text("The finding in a sentence.")]
    severity: Annotated[Share, _text("Estimated share of the requests' time, or of the service, that it costs.")]
    reasons: Annotated[list[str], _text("Figures that it rests on.")]
    remedy: Annotated[str, _text("What to do.")]


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The bottleneck of the cluster now, if there is one."""

    state: Annotated[str, _text("`idle`, `healthy` or `limited`.")] = "idle"
    sentence: Annotated[str, _text("The first finding's sentence, or that nothing limits the cluster.")] = ""
    findings: Annotated[list[Finding], _text("Causes, the most severe first.")] = []


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster at ``clock_seconds``."""

    version: Annotated[str, _text("Splitserve's version.")] = ""
    machine: Annotated[str, _text("The router's host.")] = ""
    served_model_name: Annotated[str, _text("The model.")] = ""
    clock_seconds: Annotated[float, _text("The router's Unix time.")] = 0.0
    seconds: Annotated[float, _text("Time that the figures cover.")] = 0.0
    num_routers: Annotated[
        int, _text("Router processes on the port; rates are of all, other figures of requests of the one that answers.")
    ] = 1
    rates: Annotated[RequestRates | None, _text("Rates of the last 10 s.")] = None
    diagnosis: Annotated[Diagnosis, _text("The bottleneck.")] = Diagnosis()
    ttft: Annotated[Times, _text("Time to first token.")] = Times()
    itl: Annotated[Times, _text("Mean time per output token after the first, of each request.")] = Times()
    longest_gap: Annotated[Times, _text("Longest time between tokens, of each request.")] = Times()
    stages: Annotated[list[Stage], _text("Stages of the time to first token, in order.")] = []
    handover_stages: Annotated[list[Stage], _text("Stages from prefill's last token to decode's first one.")] = []
    prompts: Annotated[PromptFigures, _text("Prompts.")] = PromptFigures()
    hits: Annotated[list[TierHits], _text("Prompt tokens found, by tier, as workers count them.")] = []
    transports: Annotated[list[TransportFigures], _text("Hand-overs by transport.")] = []
    paths: Annotated[list[Path], _text("Requests that ended, by outcome.")] = []
    objectives: Annotated[list[Objective], _text("Objectives of the cluster spec.")] = []
    router: Annotated[RouterFigures, _text("The router.")] = RouterFigures()
    workers: Annotated[list[WorkerFigures], _text("The workers, by role and name.")] = []
    slowest: Annotated[list[RequestTrace], _text("Requests that waited longest for a token, with their spans.")] = []
