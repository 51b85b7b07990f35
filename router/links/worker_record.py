"""A worker as the router keeps it, and what its requests charge it with. Pure; time is an argument."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from splitserve.protocol.cluster_report import WorkerState
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.messages.membership import PeerLink, WorkerInfo
from splitserve.protocol.messages.routers import WorkerUse
from splitserve.protocol.placement.step_model import StepModel
from splitserve.router.placement.breaker import Breaker
from splitserve.router.placement.policies import NO_LOAD, NO_STEP_MODEL, WorkerView
from splitserve.router.placement.prefill_queue import PrefillQueue
from splitserve.router.placement.step_models import Known


@dataclass(frozen=True, slots=True)
class Charges:
    """Counts of a router's attempts in flight at one worker: see :class:`WorkerView`."""

    num_requests: int = 0
    prefill_tokens: int = 0
    context_tokens: int = 0

    def __add__(self, other: "Charges") -> "Charges":
        return Charges(
            self.num_requests + other.num_requests,
            self.prefill_tokens + other.prefill_tokens,
            self.context_tokens + other.context_tokens,
        )

    @property
    def is_negative(self) -> bool:
        return min(self.num_requests, self.prefill_tokens, self.context_tokens) < 0

    def __str__(self) -> str:
        return f"{self.num_requests} requests, {self.prefill_tokens} prompt and {self.context_tokens} context tokens"


NO_CHARGES = Charges()


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Sum of what other routers have in flight at one worker: see :class:`WorkerView`."""

    num_requests: int = 0
    prefill_tokens: int = 0
    context_tokens: int = 0
    decoding_tokens: int = 0
    num_prefilling: int = 0
    queue_seconds: float = 0.0
    busy_share: float = 0.0

    def plus(self, use: WorkerUse) -> "Elsewhere":
        """Return the sum with one router's report."""
        return Elsewhere(
            self.num_requests + use.num_requests,
            self.prefill_tokens + use.prefill_tokens,
            self.context_tokens + use.context_tokens,
            self.decoding_tokens + use.decoding_tokens,
            self.num_prefilling + use.num_prefilling,
            self.queue_seconds + use.queue_seconds,
            self.busy_share + use.busy_share,
        )


NOTHING_ELSEWHERE = Elsewhere()


@dataclass(slots=True)
class WorkerRecord:
    """One incarnation of one worker. The counts are this router's own; see :class:`WorkerView`."""

    info: WorkerInfo
    last_heard: float
    connection: bytes = b""  # the connection that registered it, by the membership socket's name for it
    token: str = ""  # proves that another connection is the same worker's
    state: WorkerState = WorkerState.CONNECTING
    load: WorkerLoad = NO_LOAD
    links: Sequence[PeerLink] = ()
    clock_offset_seconds: float | None = None  # worker's clock less ours, less the time its last heartbeat took
    num_heartbeats: int = 0
    num_requests: int = 0
    prefill_tokens: int = 0
    context_tokens: int = 0
    num_placed: int = 0
    breaker: Breaker = field(default_factory=Breaker)
    own_model: StepModel = NO_STEP_MODEL  # as the worker sent it
    estimate: StepModel = NO_STEP_MODEL  # the last one that it sent before it had run enough steps
    step_model: StepModel = NO_STEP_MODEL  # as it is trusted
    prompts: PrefillQueue = field(default_factory=PrefillQueue)
    num_prefilling: int = 0  # requests whose first token is still to come, from there or from their prefill worker
    decoding_tokens: int = 0  # prompt tokens of the others
    link_rates: Mapping[str, float] = field(default_factory=dict)
    elsewhere: Elsewhere | None = None  # None: no other router has requests there
    kv_capacity_tokens: int = field(init=False)
    token_bytes: int = field(init=False)  # of KV
    num_kept_blocks: int = field(init=False)  # that fit into its KV memory and its host tier
    reads_prefixes: bool = field(init=False)  # see SinkPart: one rank reads blocks of one full group
    _view: WorkerView | None = field(default=None, init=False)  # the last one; None: something in it has changed
    _view_elsewhere: Elsewhere | None = field(default=None, init=False)  # the other routers' part of it

    def __post_init__(self) -> None:
        layout = self.info.layout
        self.kv_capacity_tokens = self.info.num_blocks * layout.block_size
        self.reads_prefixes = layout.tensor_parallel_size == 1 and not layout.groups
        self.token_bytes = layout.block_bytes // layout.block_size
        self.num_kept_blocks = self.info.num_blocks + self.info.setup.host_kv_bytes // max(1, layout.block_bytes)

    @property
    def is_linked(self) -> bool:
        """Return whether messages reach the worker, unless its link is still coming up."""
        return self.state in (WorkerState.READY, WorkerState.DRAINING)

    @property
    def charges(self) -> Charges:
        return Charges(self.num_requests, self.prefill_tokens, self.context_tokens)

    def queue_seconds(self, now: float) -> float:
        """Return the predicted time until the worker has computed the prompts placed there, by any router."""
        own = self.prompts.seconds(now)
        return own if self.elsewhere is None else own + self.elsewhere.queue_seconds

    @property
    def num_requests_of_all(self) -> int:
        """Requests in flight there, of any router."""
        return self.num_requests if self.elsewhere is None else self.num_requests + self.elsewhere.num_requests

    @property
    def known_steps(self) -> Known:
        """The model of its steps and its estimate, as it sent them."""
        return Known(self.own_model, self.estimate)

    @property
    def begins_soon(self) -> bool:
        """Return whether a prompt that is sent now would be next or next but one, or in the next step, as far as this
        router knows."""
        others = 0 if self.elsewhere is None else self.elsewhere.prefill_tokens
        is_near = len(self.prompts) <= 1 and not others
        return is_near or self.prefill_tokens + others < self.info.max_num_batched_tokens

    def view(self, now: float, prefix_match_tokens: int = 0) -> WorkerView:
        """Return the worker as policies see it ``now``. The view is valid until the next call: to make hundreds of
        workers' views anew would take longer than to place the request."""
        view = self._view
        if view is None or self._view_elsewhere is not self.elsewhere:
            view = self._view = self._new_view()
            self._view_elsewhere = self.elsewhere
        view.prefix_match_tokens = prefix_match_tokens
        if self.prompts.was_used:
            outlook = self.prompts.outlook(now)
            view.queue_seconds, view.prefill_busy, view.prompt_share, view.prompt_seconds = outlook
            if self.elsewhere is not None:
                view.queue_seconds += self.elsewhere.queue_seconds
                view.prefill_busy = min(1.0, view.prefill_busy + self.elsewhere.busy_share)
                view.prompt_share = min(1.0, view.prompt_share + self.elsewhere.busy_share)
        return view

    def on_change(self) -> None:
        """Let the next view be made anew: counts, the load or predictions have changed."""
        self._view = None

    def check_view(self) -> None:
        """Raise AssertionError if the view that is kept differs from a new one."""
        view = self._view
        if view is None or self._view_elsewhere is not self.elsewhere:
            return
        new = self._new_view()
        new.prefix_match_tokens, new.queue_seconds = view.prefix_match_tokens, view.queue_seconds
        new.prefill_busy, new.prompt_share = view.prefill_busy, view.prompt_share
        new.prompt_seconds = view.prompt_seconds
        assert view == new, f"policies see {view} where {new} is true"

    def _new_view(self) -> WorkerView:
        info, others = self.info, self.elsewhere or NOTHING_ELSEWHERE
        return WorkerView(
            party=info.party,
            role=info.role,
            max_num_seqs=max(1, info.max_num_seqs),
            max_model_len=info.max_model_len,
            kv_capacity_tokens=self.kv_capacity_tokens,
            load=self.load,
            num_requests=self.num_requests + others.num_requests,
            prefill_tokens=self.prefill_tokens + others.prefill_tokens,
            context_tokens=self.context_tokens + others.context_tokens,
            num_placed=self.num_placed,
            step_model=self.step_model,
            chunk_tokens=info.max_num_batched_tokens,
            shared_chunk_tokens=info.max_num_prefill_tokens,
            sized_chunk_tokens=info.max_num_sized_tokens,
            queue_seconds=others.queue_seconds,
            prefill_busy=min(1.0, others.busy_share),
            prompt_share=min(1.0, others.busy_share),
            num_decoding=self.num_requests - self.num_prefilling + others.num_requests - others.num_prefilling,
            decoding_tokens=self.decoding_tokens + others.decoding_tokens,
            token_bytes=self.token_bytes,
            link_rates=self.link_rates,
            reads_prefixes=self.reads_prefixes,
        )


@dataclass(slots=True)
class Charge:
    """The contribution of one placed request to its workers' counts; a local request has one record for both phases."""

    prefill: WorkerRecord | None
    decode: WorkerRecord | None
    num_prompt_tokens: int
    matched_tokens: int = 0
    _prefilling: bool = False
    _decoding: bool = False

    def apply(self, now: float) -> None:
        self._prefilling = self._decoding = True
        if self.prefill is not None:
            self.prefill.prefill_tokens += self.num_prompt_tokens
            self.prefill.prompts.add(id(self), self._prefill_seconds(self.prefill), now)
        if self.decode is not None:
            self.decode.context_tokens += self.num_prompt_tokens
        for record in self._distinct_records():
            record.num_requests += 1
            record.num_prefilling += 1
            record.num_placed += 1
            record.on_change()

    def first_token_out(self, now: float) -> None:
        """Take the prompt, which has been computed, off the load of its worker; all of the request if that is not the
        one that decodes it. The request decodes from now on."""
        if not self._prefilling:
            return
        self._prefilling = False
        for record in self._distinct_records():
            record.num_prefilling -= 1
            record.on_change()
        if self.prefill is not None:
            self.prefill.prefill_tokens -= self.num_prompt_tokens
            self.prefill.num_requests -= self.prefill is not self.decode
            self.prefill.prompts.remove(id(self), now)
        if self.decode is not None:
            self.decode.decoding_tokens += self.num_prompt_tokens

    def release(self, now: float) -> None:
        """Take the request off its workers' counts. Releasing twice is harmless."""
        self.first_token_out(now)
        if not self._decoding:
            return
        self._decoding = False
        if self.decode is not None:
            self.decode.context_tokens -= self.num_prompt_tokens
            self.decode.decoding_tokens -= self.num_prompt_tokens
            self.decode.num_requests -= 1
            self.decode.on_change()

    @property
    def is_prefilling(self) -> bool:
        return self._prefilling

    def by_record(self) -> Iterator[tuple[WorkerRecord, Charges]]:
        """Yield each of the charge's workers with its current contribution to that worker's counts."""
        for record in self._distinct_records():
            prefills = self._prefilling and record is self.prefill
            decodes = self._decoding and record is self.decode
            num_tokens = self.num_prompt_tokens
            yield record, Charges(int(prefills or decodes), prefills * num_tokens, decodes * num_tokens)

    def _prefill_seconds(self, record: WorkerRecord) -> float:
        matched = min(self.matched_tokens, self.num_prompt_tokens)
        chunk_tokens = record.info.max_num_batched_tokens or self.num_prompt_tokens
        return record.step_model.prefill_seconds(matched, self.num_prompt_tokens - matched, chunk_tokens)

    def _distinct_records(self) -> list[WorkerRecord]:
        records = [self.prefill] if self.prefill is self.decode else [self.prefill, self.decode]
        return [record for record in records if record is not None]
