"""Figures of the workers for the overview, from their heartbeats and the requests that they served. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from splitserve.protocol.cluster_report import WorkerState
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.messages.membership import PeerLink
from splitserve.protocol.placement.step_model import StepModel, StepWork
from splitserve.protocol.reports.overview import TierHits, WorkerFigures
from splitserve.protocol.request import Role
from splitserve.protocol.transports import UNKNOWN_TRANSPORT, expected_transport, is_by
from splitserve.router.admin.overview.request_figures import EndedRequest
from splitserve.router.admin.overview.samples import Samples
from splitserve.router.links.worker_record import WorkerRecord

MIN_STEPS = 20
"""Steps in the window from which on a worker is compared with others."""
ROLES = (Role.PREFILL, Role.DECODE, Role.MIXED)


def worker_figures(
    records: Sequence[WorkerRecord], samples: Samples, ended: Sequence[EndedRequest], now: float
) -> list[WorkerFigures]:
    """Return the figures of all workers, by role and name."""
    served = Counter(
        name
        for each in ended
        for name in {each.summary.prefill, each.summary.decode}
        if each.summary.status != "failed"
    )
    blamed = Counter(
        attempt.culprit for each in ended for attempt in each.timeline.attempts if attempt.failure and attempt.culprit
    )
    slowness = _slowness(records, samples)
    found = [_figures(record, samples, now, served=served, blamed=blamed, slowness=slowness) for record in records]
    return sorted(found, key=lambda worker: (ROLES.index(Role(worker.role)), _natural(worker.engine_id)))


def _natural(name: str) -> tuple[str, int]:
    """Return a key that sorts decode-2 before decode-10."""
    head, _, number = name.rpartition("-")
    return (head, int(number)) if number.isdecimal() else (name, 0)


def _figures(
    record: WorkerRecord,
    samples: Samples,
    now: float,
    *,
    served: Mapping[str, int],
    blamed: Mapping[str, int],
    slowness: Mapping[str, float],
) -> WorkerFigures:
    info, load, setup = record.info, record.load, record.info.setup
    seconds, before = _since(record, samples)
    num_steps = load.steps - before.steps
    held = load.blocks_referenced + load.blocks_quarantined
    reserved = min(load.blocks_reserved, held)
    loads = [*samples.loads_of(info.party), load]
    is_open = not record.breaker.allows(now)
    return WorkerFigures(
        engine_id=info.party.engine_id,
        role=str(info.role),
        state=str(record.state),
        machine=setup.machine,
        device=setup.device,
        silent_seconds=max(0.0, now - record.last_heard),
        breaker="open" if is_open else "closed",
        breaker_seconds=record.breaker.open_until - now if is_open else 0.0,
        num_failures=blamed.get(info.party.engine_id, 0),
        num_running=load.num_running,
        max_num_seqs=info.max_num_seqs,
        num_waiting=load.num_waiting,
        waiting_tokens=load.waiting_tokens,
        blocks=info.num_blocks,
        blocks_used=held - reserved,
        blocks_reserved=reserved,
        blocks_cached=load.blocks_cached,
        max_used_share=max((each.blocks_referenced + each.blocks_quarantined) / info.num_blocks for each in loads),
        busy_share=min(1.0, (load.step_seconds - before.step_seconds) / seconds),
        prompt_tokens_per_second=(load.prompt_tokens - before.prompt_tokens) / seconds,
        output_tokens_per_second=(load.output_tokens - before.output_tokens) / seconds,
        step_seconds=(load.step_seconds - before.step_seconds) / num_steps if num_steps else 0.0,
        step_sequences=(load.step_sequences.total - before.step_sequences.total) / num_steps if num_steps else 0.0,
        slowness=slowness.get(info.party.engine_id, 0.0),
        num_requests=served.get(info.party.engine_id, 0),
        kv_bytes=setup.host_kv_bytes + (setup.kv_bytes if setup.device == "cpu" else 0),
        remote_bytes=setup.remote_bytes,
        tiers_down=[tier.name for tier in load.tiers if not tier.available],
    )


def _since(record: WorkerRecord, samples: Samples) -> tuple[float, WorkerLoad]:
    """Return the seconds between the last heartbeat and the oldest sample of the worker, and that sample's load.

    An idle worker repeats its load; the time then runs on all the same.
    """
    before = samples.before(record.info.party)
    if before is None or before.at >= record.last_heard:
        return 1.0, record.load
    return record.last_heard - before.at, before.load


# ---- comparison ----


def _slowness(records: Iterable[WorkerRecord], samples: Samples) -> dict[str, float]:
    """Return, for each worker with enough steps, its time for its work over the median of its role's others."""
    by_role: dict[Role, list[WorkerRecord]] = defaultdict(list)
    for record in records:
        if record.state in (WorkerState.READY, WorkerState.DRAINING):
            by_role[record.info.role].append(record)
    slowness = {}
    for alike in by_role.values():
        model = _common_model([record.own_model for record in alike])
        costs = {record.info.party.engine_id: _cost(record, samples, model) for record in alike}
        known = {name: cost for name, cost in costs.items() if cost}
        for name, cost in known.items():
            others = [other for each, other in known.items() if each != name]
            if others:
                slowness[name] = cost / median(others)
    return slowness


def _common_model(models: Sequence[StepModel]) -> StepModel:
    """Return the models' median, with which the work of different workers is made comparable."""
    columns = zip(*(model.coefficients for model in models), strict=True)
    return StepModel.of([median(column) for column in columns], 0)


def _cost(record: WorkerRecord, samples: Samples, model: StepModel) -> float:
    """Return the worker's time for its recent steps, relative to the common model's; 0.0: too few steps."""
    _, before = _since(record, samples)
    load = record.load
    num_steps, seconds = load.steps - before.steps, load.step_seconds - before.step_seconds
    if num_steps < MIN_STEPS or seconds <= 0:
        return 0.0
    num_prompt, num_output = load.prompt_tokens - before.prompt_tokens, load.output_tokens - before.output_tokens
    work = StepWork(num_decodes=num_output, prefill_tokens=num_prompt)
    predicted = model.seconds(work) + (num_steps - 1) * model.base
    return seconds / predicted if predicted > 0 else seconds / num_steps


# ---- hits and links ----


def tier_hits(records: Iterable[WorkerRecord], samples: Samples) -> list[TierHits]:
    """Return the prompt tokens found by tier where prompts are computed: those of tiers below the device by the blocks
    that were onboarded."""
    found, below = 0, Counter[str]()
    for record in (record for record in records if record.info.role is not Role.DECODE):
        _, before = _since(record, samples)
        block_size = record.info.layout.block_size
        found += record.load.prefix_hit_tokens - before.prefix_hit_tokens
        earlier = {tier.name: tier.loaded_blocks for tier in before.tiers}
        for tier in record.load.tiers:
            below[tier.name] += block_size * (tier.loaded_blocks - earlier.get(tier.name, tier.loaded_blocks))
    on_device = TierHits(tier="device", tokens=max(0, found - below.total()))
    return [on_device, *(TierHits(tier=name, tokens=tokens) for name, tokens in below.items())]


def link_speeds(records: Iterable[WorkerRecord]) -> dict[str, list[float]]:
    """Return the measured speeds of all links, in bytes per second, by transport."""
    speeds: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for link in record.links:
            if link.transport:
                speeds[link.transport].append(link.bytes_per_second)
    return speeds


def link_problems(records: Sequence[WorkerRecord]) -> dict[str, str]:
    """Return why transports in use are not the expected ones, by transport."""
    by_name = {record.info.party.engine_id: record for record in records}
    return {link.transport: problem for link, problem in _problems(by_name)}


def _problems(by_name: Mapping[str, WorkerRecord]) -> Iterator[tuple[PeerLink, str]]:
    for record in by_name.values():
        for link in record.links:
            peer = by_name.get(link.peer)
            if peer is None or not link.transport:
                continue
            expected = expected_transport(record.info.setup, peer.info.setup)
            is_wrong = expected and link.transport != UNKNOWN_TRANSPORT and not is_by(link.transport, expected)
            if link.problem or is_wrong:
                between = f"{record.info.party.engine_id} reads from {link.peer} by {link.transport}"
                yield link, link.problem or f"{between}, where {expected} is expected"
