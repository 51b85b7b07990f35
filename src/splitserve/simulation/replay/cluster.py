"""A replayed cluster: the production router core over paced workers, links and hand-overs, under virtual time."""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from splitserve.protocol.config import ProtocolConfig, RouterConfig
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.kv_event_batch import KVEventBatch
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.messages.membership import PeerLink, WorkerInfo, WorkerSetup
from splitserve.protocol.messages.requests import DecodeRequest, LocalRequest, PrefillRequest, StepTokens, TokenDelta
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import FinishReason, Party, RequestKey, Role, SamplingParams
from splitserve.router.links.membership import Membership
from splitserve.router.placement.known_chains import KnownChains
from splitserve.router.placement.policies import Policy
from splitserve.router.placement.prefix_view import PrefixView, PromptHashes
from splitserve.router.requests.active_request import ActiveRequest, RequestContext
from splitserve.router.requests.core import RouterCore
from splitserve.router.requests.effects import Deliver, Ended, Refuse, Send
from splitserve.router.requests.events import Event, FromWorker, Submit
from splitserve.simulation.replay.job import Job
from splitserve.simulation.replay.results import ReplayResult, RequestFigures
from splitserve.simulation.replay.worker import READ_SECONDS, PacedWorker, WorkerSpec
from splitserve.simulation.replay.workload import BLOCK_TOKENS, ReplayRequest
from splitserve.simulation.virtual_clock import VirtualClock

MESSAGE_SECONDS = 0.0003
"""Time of a message between processes."""
LAST_CHUNK_TOKENS = 1024
"""Tokens whose KV still has to be read when the first token is out."""
HEARTBEAT_SECONDS = 1.0
EVENT_SECONDS = 0.01
_ROOT = b"replay"
_LAYER_BYTES = 4096  # of a token: 8 heads of 128 elements, keys and values in 16 bits


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A cluster to replay on, and how its router works."""

    workers: Sequence[WorkerSpec]
    policy: str | Policy = "cost"  # by its name, or the function
    ttft_ms: float = 0.0  # objectives; 0: none
    tpot_ms: float = 0.0
    kv_events: bool = True  # workers publish what they hold
    knows_prefixes: bool = True  # the router looks at prefixes at all
    sends_sessions: bool = True  # clients name the conversation where it is known
    late_grants: bool = True  # as in production; else decode reserves room at once
    published: dict[str, StepModel] = field(default_factory=dict)  # models that workers publish instead of their own


class BlockNames(PromptHashes):
    """Names of a replayed prompt's blocks in place of hashes of its tokens."""

    def __init__(self, request: ReplayRequest, num_tokens: int) -> None:
        self._request = request
        self._num_tokens = num_tokens

    def extended(self, output_ids: Sequence[int]) -> "BlockNames":
        """Return the names of the blocks of prompt and output."""
        return BlockNames(self._request, self._num_tokens + len(output_ids))

    def longest_computed(self) -> tuple[Sequence[bytes], int] | None:
        """Return the names of the prompt's full blocks, and their size."""
        return self.chain(_ROOT, BLOCK_TOKENS), BLOCK_TOKENS

    def chain(self, root_hash: bytes, block_size: int, known: KnownChains | None = None) -> Sequence[bytes]:  # noqa: ARG002
        """Return the names of the full blocks before the last token."""
        return self._request.blocks[: self._request.num_full_blocks(self._num_tokens - 1)]


class _NoPrefixes(PrefixView):
    """A view that never knows anything."""

    def note_sent(self, *_: Any) -> None:
        """Forget it."""

    def apply(self, batch: KVEventBatch) -> bool:  # noqa: ARG002
        """Forget it."""
        return True


class ReplayCluster:
    """The cluster. ``run`` replays a workload and returns its figures."""

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec
        self.clock = VirtualClock()
        self.membership = Membership(dead_after_seconds=1e9, forget_after_seconds=1e9)
        self.prefixes = PrefixView() if spec.knows_prefixes else _NoPrefixes()
        config = RouterConfig(
            model="replay",
            served_model_name="replay",
            policy=spec.policy if isinstance(spec.policy, str) else "least-loaded",
            ttft_objective_ms=spec.ttft_ms,
            tpot_objective_ms=spec.tpot_ms,
            max_requests_in_flight=1 << 20,
            protocol=ProtocolConfig(request_deadline_seconds=86_400.0),
        )
        self.core = RouterCore(config, self.membership, self.prefixes, random.Random(0))
        if not isinstance(spec.policy, str):
            self.core.placer.policy = spec.policy
        self.result = ReplayResult()
        self.workers: dict[Party, PacedWorker] = {}
        self._batches: dict[Party, int] = {}
        self._requests: Sequence[ReplayRequest] = ()
        self._followers: dict[int, list[int]] = {}
        self._prefills: dict[str, tuple[PacedWorker, Job]] = {}  # hand-overs, until decode has read them
        self._decodes: dict[str, tuple[PacedWorker, Job]] = {}
        for worker in spec.workers:
            self._register(worker)

    # ---- running ----

    def run(self, requests: Sequence[ReplayRequest]) -> ReplayResult:
        """Replay a workload to its end."""
        self._requests = requests
        self.result.requests = [RequestFigures() for _ in requests]
        for number, request in enumerate(requests):
            if request.follows is None:
                self.clock.at(request.arrives_at, partial(self._submit, number))
            else:
                self._followers.setdefault(request.follows, []).append(number)
        self._heartbeat()
        self.clock.run(lambda: self.result.num_ended == len(requests))
        for worker in self.workers.values():
            worker.memory.change(0, self.clock.now)
            self.result.workers[worker.spec.name] = worker.figures
            self.result.memories[worker.spec.name] = worker.memory
        self.result.seconds = self.clock.now
        self.result.block_tokens = BLOCK_TOKENS
        return self.result

    def _submit(self, number: int) -> None:
        request, now = self._requests[number], self.clock.now
        session = request.session if self._spec.sends_sessions else ""
        sampling = SamplingParams(max_tokens=request.num_output_tokens)
        tokens = array("i", bytes(4 * request.num_prompt_tokens))
        active = ActiveRequest.new(str(number), tokens, sampling, now, RequestContext(session=session))
        active.hashes = BlockNames(request, request.num_prompt_tokens)
        self.result.requests[number].arrived_at = now
        self._handle(Submit(active))

    def _handle(self, event: Event) -> None:
        for effect in self.core.handle(event, self.clock.now):
            if isinstance(effect, Send):
                self._send(effect)
            elif isinstance(effect, Deliver) and effect.update.token_ids:
                self._on_tokens(int(effect.request_id))
            elif isinstance(effect, Ended):
                self._on_ended(int(effect.request.request_id))
            elif isinstance(effect, Refuse):
                self.result.num_refused += 1
                self._on_ended(int(effect.request_id))

    def _on_tokens(self, number: int) -> None:
        figures = self.result.requests[number]
        figures.first_token_at = figures.first_token_at or self.clock.now

    def _on_ended(self, number: int) -> None:
        self.result.requests[number].ended_at = self.clock.now
        self.result.num_ended += 1
        for follower in self._followers.pop(number, ()):
            self.clock.after(self._requests[follower].arrives_at, partial(self._submit, follower))

    # ---- messages to workers ----

    def _send(self, effect: Send) -> None:
        body, worker = effect.body, self.workers[effect.to]
        if not isinstance(body, PrefillRequest | DecodeRequest | LocalRequest):
            return
        request_id, request = body.key.request_id, self._requests[int(body.key.request_id)]
        job = Job(request_id, request, not isinstance(body, PrefillRequest), request.num_prompt_tokens)
        figures = self.result.requests[int(request_id)]
        if isinstance(body, LocalRequest):
            figures.is_local = True
            figures.prefill = worker.spec.name
            self.clock.after(MESSAGE_SECONDS, lambda: worker.add(job))
        elif isinstance(body, DecodeRequest):
            self._decodes[request_id] = worker, job
            if not (self._spec.late_grants and body.late_grant):
                self.clock.after(MESSAGE_SECONDS, lambda: worker.reserve(job, lambda: self._grant(request_id)))
        else:
            figures.prefill = worker.spec.name
            self._prefills[request_id] = worker, job
            job.is_granted, job.decode = False, body.decode.party.engine_id
            job.source = None if body.prefix is None else self.workers[body.prefix.party].cache
            if not body.late_grant:
                job.asked_at = self.clock.now
            if self._spec.late_grants:
                self.clock.after(MESSAGE_SECONDS, lambda: worker.add(job))

    def _grant(self, request_id: str) -> None:
        """Tell prefill that decode has room."""
        worker, job = self._prefills[request_id]
        job.is_granted = True
        deliver = (lambda: worker.on_grant(job)) if self._spec.late_grants else (lambda: worker.add(job))
        self.clock.after(MESSAGE_SECONDS, deliver)

    def _on_next(self, _worker: PacedWorker, job: Job) -> None:
        """Ask decode for room: the prompt's turn comes soon."""
        decode, decoding = self._decodes[job.request_id]
        ask = lambda: decode.reserve(decoding, lambda: self._grant(job.request_id))  # noqa: E731
        self.clock.after(MESSAGE_SECONDS, ask)

    # ---- what workers do ----

    def _on_prefilled(self, worker: PacedWorker, job: Job) -> None:
        figures = self.result.requests[int(job.request_id)]
        figures.cached_tokens, figures.own_seconds = job.num_cached, job.own_seconds
        is_last = job.request.num_output_tokens == 1
        self._report(worker, job, 0, 1, is_last=is_last)
        if job.decodes_here:
            return
        decode, decoding = self._decodes.pop(job.request_id)
        left = min(job.num_known - job.num_cached, LAST_CHUNK_TOKENS)
        seconds = READ_SECONDS + left * decode.spec.token_bytes / decode.spec.link_rate
        decoding.last_token_at, decoding.num_drawn = self.clock.now, 1
        self.clock.after(seconds, lambda: self._on_read(decode, decoding, job.begun_at))

    def _on_read(self, decode: PacedWorker, decoding: Job, begun_at: float) -> None:
        prefill, job = self._prefills.pop(decoding.request_id)
        prefill.free(job)
        empty = max(0.0, begun_at - decoding.reserved_at) + (self.clock.now - begun_at) / 2
        decode.memory.empty_token_seconds += decoding.num_known * empty
        if decoding.request.num_output_tokens == 1:
            decode.granted -= 1
            decode.memory.change(-decoding.num_known, self.clock.now)
        else:
            decode.start_decoding(decoding)

    def _on_finished(self, worker: PacedWorker, job: Job) -> None:
        count = job.request.num_output_tokens
        if count > 1:
            self._report(worker, job, 1, count - 1, is_last=True)

    def _report(self, worker: PacedWorker, job: Job, position: int, count: int, *, is_last: bool) -> None:
        reason = FinishReason.LENGTH if is_last else None
        delta = TokenDelta(RequestKey(job.request_id), position, [0] * count, reason, num_cached_tokens=job.num_cached)
        event = FromWorker(worker.party, StepTokens([delta]))
        self.clock.after(MESSAGE_SECONDS, lambda: self._handle(event))

    def _on_events(self, worker: PacedWorker) -> None:
        events = worker.cache.take_events()
        if not events or not self._spec.kv_events:
            return
        self._batches[worker.party] += 1
        party = worker.party
        batch = KVEventBatch(
            party.engine_id, party.incarnation, self._batches[party], BLOCK_TOKENS, _ROOT, False, events
        )
        self.clock.after(EVENT_SECONDS, partial(self._apply, batch))

    def _apply(self, batch: KVEventBatch) -> None:
        assert self.prefixes.apply(batch), "batches arrive in order"

    # ---- membership ----

    def _register(self, spec: WorkerSpec) -> None:
        worker = PacedWorker(
            self.clock,
            spec,
            self._on_prefilled,
            self._on_finished,
            self._on_events,
            self.result.on_gap,
            self._on_next,
        )
        party = worker.party
        self.workers[party] = worker
        self._batches[party] = 0
        layout = LayoutRecord("replay", "1", "bfloat16", BLOCK_TOKENS, spec.token_bytes // _LAYER_BYTES, 8, 128)
        info = WorkerInfo(
            party=party,
            role=spec.role,
            endpoint="",
            pid=0,
            layout=layout,
            num_blocks=max(1, spec.kv_tokens // BLOCK_TOKENS),
            max_num_seqs=spec.max_num_seqs,
            max_model_len=spec.kv_tokens,
            vocab_size=1,
            setup=WorkerSetup(host_kv_bytes=spec.host_tokens // BLOCK_TOKENS * layout.block_bytes),
            max_num_batched_tokens=spec.chunk_tokens,
            max_num_prefill_tokens=spec.shared_chunk_tokens,
            max_num_sized_tokens=spec.shared_chunk_tokens,
        )
        refusal = self.membership.register(party, info, 0.0).refusal
        assert refusal is None, refusal
        self.membership.link_up(party)
        if self._spec.kv_events:
            self.prefixes.apply(KVEventBatch(party.engine_id, 1, 0, BLOCK_TOKENS, _ROOT, True, []))

    def _heartbeat(self) -> None:
        """Take a heartbeat of each worker, and await the next ones."""
        names = [worker.spec.name for worker in self.workers.values()]
        for worker in self.workers.values():
            load = WorkerLoad(num_waiting=len(worker.waiting), num_running=len(worker.running))
            links = [PeerLink(name, "replay", worker.spec.link_rate) for name in names]
            model = self._spec.published.get(worker.spec.name, worker.spec.model)
            self.membership.heartbeat(worker.party, load, self.clock.now, links, step_model=model)
        self.clock.after(HEARTBEAT_SECONDS, self._heartbeat)


def pool(role: Role, count: int, template: WorkerSpec, slow: float = 0.0) -> list[WorkerSpec]:
    """Return ``count`` workers like ``template``; the share ``slow`` of them needs twice the time."""
    num_slow = round(slow * count)
    double = StepModel.of([2 * each for each in template.model.coefficients], template.model.num_steps)
    models = [double] * num_slow + [template.model] * (count - num_slow)
    names = [f"{role.value}-{number}" for number in range(count)]
    return [replace(template, name=name, role=role, model=model) for name, model in zip(names, models, strict=True)]
