"""Overviews of clusters that don't run: healthy ones, and ones with a bottleneck planted. Not a test module."""

import random
from collections.abc import Callable

import msgspec

from splitserve.protocol.cluster_report import RequestRates, RequestSummary, RequestTrace, TraceSpan
from splitserve.protocol.reports.overview import (
    Objective,
    Overview,
    Path,
    PromptFigures,
    RouterFigures,
    Stage,
    TierHits,
    Times,
    TransportFigures,
    WorkerFigures,
)
from splitserve.router.requests.timeline.stages import HANDOVER_STAGES, TTFT_STAGES

replace = msgspec.structs.replace
Plant = Callable[[Overview], Overview]
MIB = 1 << 20


def times(mean: float, num: int = 200) -> Times:
    return Times(num=num, mean=mean, p50=0.9 * mean, p99=3.0 * mean)


def stages(meanings: dict[str, str], num: int = 200, **seconds: float) -> list[Stage]:
    return [
        Stage(name=name, meaning=meanings[name], times=times(seconds[name], num))
        for name in meanings
        if name in seconds
    ]


def with_stages(view: Overview, **seconds: float) -> Overview:
    """Return the view with other durations of these stages, and the time to first token that follows."""
    means = {stage.name: stage.times.mean for stage in view.stages} | seconds
    return replace(view, stages=stages(TTFT_STAGES, **means), ttft=times(sum(means.values())))


def worker(name: str, role: str, chosen: random.Random, **fields: object) -> WorkerFigures:
    blocks = 4096
    used = int(blocks * chosen.uniform(0.1, 0.5)) if role != "prefill" else int(blocks * chosen.uniform(0.0, 0.1))
    figures = WorkerFigures(
        engine_id=name,
        role=role,
        state="ready",
        machine=f"node-{chosen.randrange(4)}",
        device="cuda:0",
        silent_seconds=chosen.uniform(0.0, 1.0),
        num_running=0 if role == "prefill" else chosen.randrange(4, 40),
        max_num_seqs=64,
        blocks=blocks,
        blocks_used=used,
        blocks_reserved=chosen.randrange(0, 100),
        blocks_cached=int((blocks - used) * 0.8),
        max_used_share=min(1.0, 1.2 * used / blocks),
        busy_share=chosen.uniform(0.2, 0.7) if role == "prefill" else chosen.uniform(0.4, 0.95),
        prompt_tokens_per_second=0.0 if role == "decode" else chosen.uniform(2e3, 2e4),
        output_tokens_per_second=0.0 if role == "prefill" else chosen.uniform(300, 3000),
        step_seconds=chosen.uniform(0.02, 0.06) if role == "prefill" else chosen.uniform(0.005, 0.012),
        step_sequences=chosen.uniform(1, 3) if role == "prefill" else chosen.uniform(4, 30),
        slowness=chosen.uniform(0.85, 1.2),
        num_requests=chosen.randrange(20, 200),
        kv_bytes=512 * MIB,
    )
    return replace(figures, **fields)


FAST = TransportFigures(
    transport="cuda_ipc",
    num=200,
    bytes_per_second=2e9,
    read_bytes_per_second=180e9,
    link_bytes_per_second=260e9,
    exposed=times(0.0021),
)


def rates(requests: float, prompt_tokens: float, ttft: float | None) -> RequestRates:
    """Return rates per second, with as many output tokens for each request as the model likes."""
    return RequestRates(
        seconds=10.0,
        num_in_flight=int(1.5 * requests),
        num_waiting=0,
        requests_per_second=requests,
        failures_per_second=0.0,
        prompt_tokens_per_second=prompt_tokens,
        output_tokens_per_second=100 * requests,
        ttft_seconds_median=ttft,
        ttft_seconds_p99=None if ttft is None else 3 * ttft,
    )


def healthy(seed: int = 0, num_prefill: int = 2, num_decode: int = 2) -> Overview:
    """Return a cluster under moderate load that nothing limits."""
    chosen = random.Random(seed)
    prefill = chosen.uniform(0.02, 0.2)
    tokens = chosen.randrange(50_000, 500_000)
    known = int(tokens * chosen.uniform(0.0, 0.6))
    workers = [worker(f"prefill-{number}", "prefill", chosen) for number in range(num_prefill)]
    workers += [worker(f"decode-{number}", "decode", chosen) for number in range(num_decode)]
    itl = chosen.uniform(0.005, 0.012)
    view = Overview(
        version="0.1.0",
        machine="node-0",
        served_model_name="demo",
        clock_seconds=1.8e9,
        seconds=30.0,
        rates=rates(20.0, tokens / 30, prefill),
        itl=times(itl),
        longest_gap=times(2 * itl),
        handover_stages=stages(
            HANDOVER_STAGES, offer=0.0005, post=0.0001, wire=0.001, verify=0.0005, decode_queue=itl / 2, first_step=itl
        ),
        prompts=PromptFigures(
            num=200,
            tokens=tokens,
            cached_tokens=int(known * chosen.uniform(0.9, 1.0)),
            known_tokens=known,
            median_tokens=800,
            longest_tokens=4000,
            long_share=chosen.uniform(0.0, 0.2),
            short_wait=times(0.3 * prefill, 100),
            short_prefill_seconds=0.6 * prefill,
        ),
        hits=[TierHits(tier="device", tokens=known // 2), TierHits(tier="host", tokens=known // 3)],
        transports=[FAST],
        paths=[
            Path(intended="disaggregated", actual="disaggregated", reason="ok", num=190),
            Path(intended="disaggregated", actual="local", reason="cached_on_decode", num=8),
            Path(intended="disaggregated", actual="cancelled", reason="cancelled", num=2),
        ],
        objectives=[Objective(name="ttft", seconds=2.0, num=200, num_met=chosen.randrange(191, 201))],
        router=RouterFigures(
            busy_share=chosen.uniform(0.05, 0.5),
            lag_seconds=chosen.uniform(0.0, 0.02),
            num_in_flight=30,
            max_in_flight=1024,
            num_active=28,
            num_unread=chosen.randrange(2),
        ),
        workers=workers,
        slowest=[slow_request(number, 3 * prefill) for number in range(8)],
    )
    wait = chosen.uniform(0.0, 0.5) * prefill
    return with_stages(
        view, prepare=0.001, queue=0.0, dispatch=0.001, grant_wait=0.002, prefill_queue=wait, prefill=prefill,
        delivery=0.001,
    )  # fmt: skip


def slow_request(number: int, seconds: float) -> RequestTrace:
    """Return a request whose first token came after ``seconds``."""
    names = [("router", "prepare", 0.05), ("prefill-0", "dispatch", 0.05), ("prefill-0", "prefill_queue", 0.4)]
    names += [("prefill-0", "chunk", 0.25), ("prefill-0", "first_token", 0.25), ("decode-0", "await_offer", 0.0)]
    spans, begin = [TraceSpan("request", "router", 0.0, 4 * seconds, 64)], 0.0
    for process, name, share in names:
        spans.append(TraceSpan(name, process, begin, share * seconds, 512 if name == "chunk" else 0))
        begin += share * seconds
    spans.append(TraceSpan("wire", "decode-0", seconds, 0.05 * seconds))
    spans.append(TraceSpan("first_step", "decode-0", 1.05 * seconds, 0.1 * seconds))
    spans.append(TraceSpan("stream", "router", seconds, 3 * seconds, 64))
    summary = RequestSummary(
        request_id=f"request-{number}",
        status="finished",
        intended="disaggregated",
        actual="disaggregated",
        reason="ok",
        message="",
        finish_reason="length",
        prefill="prefill-0",
        decode="decode-0",
        num_attempts=1,
        num_prompt_tokens=1000,
        num_cached_tokens=0,
        num_known_tokens=0,
        num_output_tokens=64,
        seconds=4 * seconds,
        ttft_seconds=seconds * (1 - 0.05 * number),
        itl_seconds=3 * seconds / 64,
        longest_gap_seconds=0.1 * seconds,
        num_gaps=0,
        handover_seconds=0.05 * seconds,
        transport="nixl/cuda_ipc",
        handover_bytes=128 * MIB,
        handover_read_seconds=0.01,
        ttft_stages={},
        handover_stages={},
    )
    return RequestTrace(summary=summary, began_at=1.8e9, spans=spans)


def with_workers(view: Overview, role: str, **fields: object) -> Overview:
    """Return the view with other fields of all workers of a role."""
    return replace(view, workers=[replace(each, **fields) if each.role == role else each for each in view.workers])


def with_worker(view: Overview, name: str, **fields: object) -> Overview:
    return replace(view, workers=[replace(each, **fields) if each.engine_id == name else each for each in view.workers])


# ---- planted bottlenecks ----


def prefill_short(view: Overview) -> Overview:
    busy = with_workers(view, "prefill", busy_share=0.98, waiting_tokens=40_000, num_waiting=30)
    reserving = with_workers(busy, "decode", blocks_reserved=1500, blocks_used=600, blocks_cached=1500)
    return _late(with_stages(reserving, prefill_queue=1.5, grant_wait=0.1))


def decode_kv_reserved(view: Overview) -> Overview:
    full = with_workers(view, "decode", blocks_used=2200, blocks_reserved=1800, blocks_cached=0, max_used_share=1.0)
    idle = with_workers(full, "prefill", busy_share=0.3, num_waiting=12, waiting_tokens=9000)
    return _late(with_stages(idle, grant_wait=0.9))


def batch_too_big(view: Overview) -> Overview:
    big = with_workers(view, "decode", step_seconds=0.055, step_sequences=60.0, num_running=62, busy_share=1.0)
    missed = Objective(name="tpot", seconds=0.03, num=200, num_met=20)
    return replace(big, itl=times(0.06), objectives=[*view.objectives, missed])


def slow_transport(view: Overview) -> Overview:
    (fast,) = view.transports
    slow = replace(
        fast,
        transport="tcp",
        read_bytes_per_second=9e8,
        link_bytes_per_second=1.2e9,
        exposed=times(0.4),
        problem="decode-0 reads from prefill-0 by tcp, where cuda_ipc is expected",
    )
    return replace(view, transports=[slow])


def router_cpu(view: Overview) -> Overview:
    late = with_stages(view, prepare=0.08, delivery=0.12, dispatch=0.05)
    return _late(replace(late, router=replace(view.router, busy_share=0.6, starved_share=0.38, lag_seconds=0.3)))


def cold_prefix(view: Overview) -> Overview:
    tokens = view.prompts.tokens
    missed = replace(view.prompts, known_tokens=int(0.8 * tokens), cached_tokens=int(0.05 * tokens))
    busy = with_workers(view, "prefill", busy_share=0.95, waiting_tokens=8000)
    return _late(with_stages(replace(busy, prompts=missed), prefill_queue=0.4, prefill=0.3))


def sick_worker(view: Overview) -> Overview:
    return with_worker(view, "prefill-1", slowness=4.2, step_seconds=0.3, busy_share=1.0, waiting_tokens=9000)


def long_prompts(view: Overview) -> Overview:
    mixed = replace(
        view.prompts, long_share=0.8, longest_tokens=30_000, short_wait=times(0.35, 100), short_prefill_seconds=0.04
    )
    return _late(with_stages(replace(view, prompts=mixed), prefill_queue=0.3, prefill=0.12))


def slow_clients(view: Overview) -> Overview:
    return replace(
        view, router=replace(view.router, num_unread=25, num_in_flight=40, num_active=4, unread_seconds=12.0)
    )


def remote_memory(view: Overview) -> Overview:
    return with_worker(view, "decode-1", remote_bytes=300 * MIB, slowness=1.1)


def _late(view: Overview) -> Overview:
    """Return the view with a time to first token that misses its objective."""
    return replace(view, objectives=[Objective(name="ttft", seconds=0.2, num=200, num_met=60)])


PLANTED: dict[str, Plant] = {
    "prefill_short": prefill_short,
    "decode_kv": decode_kv_reserved,
    "batch_too_big": batch_too_big,
    "slow_transport": slow_transport,
    "router_cpu": router_cpu,
    "cold_prefix": cold_prefix,
    "sick_worker": sick_worker,
    "long_prompts": long_prompts,
    "slow_clients": slow_clients,
    "remote_memory": remote_memory,
}
"""Ten bottlenecks by the name of the finding that has to come first."""


# ---- sights ----


def idle() -> Overview:
    view = healthy()
    resting = [
        replace(
            each,
            num_running=0,
            blocks_used=0,
            blocks_reserved=0,
            max_used_share=0.0,
            busy_share=0.0,
            prompt_tokens_per_second=0.0,
            output_tokens_per_second=0.0,
        )
        for each in view.workers
    ]
    return Overview(
        version=view.version, machine=view.machine, served_model_name="demo", clock_seconds=1.8e9, seconds=30.0,
        rates=rates(0.0, 0.0, None), workers=resting, router=RouterFigures(max_in_flight=1024),
    )  # fmt: skip


def large(num_prefill: int = 24, num_decode: int = 40) -> Overview:
    """Return a cluster of 64 workers."""
    return healthy(3, num_prefill, num_decode)


def broken() -> Overview:
    """Return a cluster with a draining worker, one behind an open breaker, a lost one, and failed requests."""
    view = healthy(5, 3, 3)
    view = with_worker(view, "prefill-1", state="draining")
    view = with_worker(view, "decode-1", breaker="open", breaker_seconds=12.0, num_failures=7)
    view = with_worker(view, "decode-2", state="lost", silent_seconds=21.0, num_running=0)
    failed = [
        Path(intended="disaggregated", actual="failed", reason="worker_lost", num=12),
        Path(intended="disaggregated", actual="local", reason="after_handover", num=9),
    ]
    return replace(view, paths=[*view.paths, *failed])
