"""A replayed worker: chunked prefill and continuous batching, each step as long as its model says.

Decode steps of an unchanged batch are leapt over in one go: the sum of their times is known.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from splitserve.protocol.placement.step_model import StepModel, StepWork, pairs
from splitserve.protocol.request import Party, Role
from splitserve.simulation.replay.cache import ReplayCache
from splitserve.simulation.replay.job import Job, Memory
from splitserve.simulation.replay.workload import BLOCK_TOKENS
from splitserve.simulation.virtual_clock import VirtualClock

ANSWER_SECONDS = 0.001
"""Time within which a grant comes if decode has room: more than two messages take."""
NUM_NEXT = 2
"""Prompts that are next or next but one."""
READ_SECONDS = 0.003
"""Time of a read of KV from another worker beside its bytes."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Properties of a replayed worker."""

    name: str
    role: Role
    model: StepModel
    chunk_tokens: int = 8192  # of a step
    shared_chunk_tokens: int = 512  # prompt tokens of a step that also decodes
    max_num_seqs: int = 256
    kv_tokens: int = 400_000  # on the device
    host_tokens: int = 0  # in the host tier
    token_bytes: int = 1 << 17
    host_rate: float = 40e9  # bytes per second from the host tier
    link_rate: float = 40e9  # bytes per second from a peer


@dataclass(slots=True)
class _Leap:
    """Decode steps in progress, of an unchanged batch: ``num_steps`` from ``begun_at`` on."""

    begun_at: float
    num_steps: int
    num_seqs: int
    context: int

    def seconds(self, model: StepModel, num_steps: int) -> float:
        """Return the time of the first ``num_steps`` steps: each has a token more per sequence."""
        first = model.decode_seconds(self.num_seqs, self.context)
        return num_steps * first + model.per_context * self.num_seqs * num_steps * (num_steps - 1) / 2


@dataclass(slots=True)
class WorkerFigures:
    """Sums over a worker's requests."""

    num_prompts: int = 0
    queue_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    busy_seconds: float = 0.0
    num_preempted: int = 0


@dataclass(slots=True, eq=False)
class PacedWorker:
    """The worker.

    Calls ``on_prefilled(worker, job)`` with the first token of a prompt, ``on_finished(worker, job)`` after the last
    token, ``on_events(worker)`` when its cache changed, ``on_gap(seconds, count)`` for gaps between tokens, and
    ``on_next(worker, job)`` when the turn of a prompt without a grant comes soon.
    """

    clock: VirtualClock
    spec: WorkerSpec
    on_prefilled: Callable[["PacedWorker", Job], None]
    on_finished: Callable[["PacedWorker", Job], None]
    on_events: Callable[["PacedWorker"], None]
    on_gap: Callable[[float, int], None]
    on_next: Callable[["PacedWorker", Job], None]
    waiting: deque[Job] = field(default_factory=deque)
    active: list[Job] = field(default_factory=list)
    running: dict[Job, None] = field(default_factory=dict)
    reserving: deque[tuple[Job, Callable[[], None]]] = field(default_factory=deque)
    granted: int = 0  # hand-overs that hold room in the batch
    memory: Memory = field(default_factory=Memory)
    figures: WorkerFigures = field(default_factory=WorkerFigures)
    _context: int = 0  # tokens of the running sequences
    _leap: _Leap | None = None
    _epoch: int = 0  # of the step in progress; a callback of another one is void
    _is_stepping: bool = False
    cache: ReplayCache = field(init=False)
    party: Party = field(init=False)

    def __post_init__(self) -> None:
        self.cache = ReplayCache(self.spec.kv_tokens // BLOCK_TOKENS, self.spec.host_tokens // BLOCK_TOKENS)
        self.party = Party(self.spec.name, 1)

    # ---- requests ----

    def add(self, job: Job, *, first: bool = False) -> None:
        """Queue a prompt."""
        job.queued_at = self.clock.now
        if first:
            self.waiting.appendleft(job)
        else:
            self.waiting.append(job)
        self._interrupt()
        if self._is_stepping:
            self._ask_for_grants([])

    def on_grant(self, job: Job) -> None:
        """Let a queued prompt begin: decode has room."""
        job.is_granted = True
        self._interrupt()

    def reserve(self, job: Job, on_room: Callable[[], None]) -> None:
        """Reserve room for a hand-over, first come, first served, and call ``on_room``."""
        self.reserving.append((job, on_room))
        self._admit_handovers()

    def start_decoding(self, job: Job) -> None:
        """Let a sequence whose KV has arrived decode."""
        self.granted -= 1
        self._begin_decoding(job)
        self._interrupt()

    def free(self, job: Job) -> None:
        """Give back a prompt's room, which decode has read."""
        self.memory.change(-job.num_known, self.clock.now)
        self._interrupt()

    @property
    def num_blocks_used(self) -> int:
        return -(-self.memory.used_tokens // BLOCK_TOKENS)

    def _has_room(self, num_tokens: int) -> bool:
        headroom = len(self.running) + self.granted
        return not self.memory.used_tokens or self.memory.used_tokens + num_tokens + headroom <= self.spec.kv_tokens

    def _admit_handovers(self) -> None:
        while self.reserving and len(self.running) + self.granted < self.spec.max_num_seqs:
            job, on_room = self.reserving[0]
            if not self._has_room(job.num_known):
                return
            self.reserving.popleft()
            self.granted += 1
            job.reserved_at = self.clock.now
            self._take_room(job)
            on_room()

    def _take_room(self, job: Job) -> None:
        self.memory.change(job.num_known, self.clock.now)
        self.cache.shrink(self.num_blocks_used)

    def _begin_decoding(self, job: Job) -> None:
        self.running[job] = None
        self._context += job.num_known

    # ---- steps ----

    def _interrupt(self) -> None:
        """Take news into account: at once if the worker is idle, else after the decode step in progress."""
        leap = self._leap
        if leap is None:
            if not self._is_stepping:
                self._next_step()
            return
        model, elapsed = self.spec.model, self.clock.now - leap.begun_at
        num_steps = min(leap.num_steps, max(1, int(elapsed / leap.seconds(model, 1))))
        while num_steps > 1 and leap.seconds(model, num_steps - 1) > elapsed:
            num_steps -= 1
        while num_steps < leap.num_steps and leap.seconds(model, num_steps) < elapsed:
            num_steps += 1
        if num_steps < leap.num_steps:
            leap.num_steps = num_steps
            self._set_end(leap.begun_at + leap.seconds(model, num_steps), self._end_leap)

    def _set_end(self, time: float, callback: Callable[[], None]) -> None:
        self._epoch += 1
        epoch = self._epoch
        self._is_stepping = True
        self.clock.at(time, lambda: callback() if epoch == self._epoch else None)

    def _next_step(self) -> None:
        self._is_stepping = False
        self._leap = None
        self._admit_handovers()
        chunks = self._plan_chunks()
        if chunks:
            self._begin_step(chunks)
        elif self.running:
            self._begin_leap()
        else:
            ready_at = min((job.ready_at for job in self.active), default=0.0)
            if ready_at > self.clock.now:
                self._set_end(ready_at, self._next_step)

    def _plan_chunks(self) -> list[tuple[Job, int]]:
        budget = self.spec.chunk_tokens - len(self.running)
        if self.running:
            budget = min(budget, self.spec.shared_chunk_tokens)
        chunks: list[tuple[Job, int]] = []
        for job in self.active:
            budget -= self._plan_chunk(job, budget, chunks)
        while budget > 0 and self.waiting and (following := self._next_prompt()) is not None:
            self._admit(following)
            budget -= self._plan_chunk(following, budget, chunks)
        self._ask_for_grants(chunks)
        return chunks

    def _plan_chunk(self, job: Job, budget: int, chunks: list[tuple[Job, int]]) -> int:
        count = min(budget, job.num_known - job.num_computed) if job.ready_at <= self.clock.now else 0
        if count > 0:
            chunks.append((job, count))
        return max(0, count)

    def _next_prompt(self) -> Job | None:
        """Return the first prompt that has a grant, if there is room for it."""
        job = next((job for job in self.waiting if job.is_granted), None)
        num_free = self.spec.max_num_seqs - len(self.running) - self.granted - len(self.active)
        return job if job is not None and num_free > 0 and self._has_room(job.num_known) else None

    def _ask_for_grants(self, chunks: list[tuple[Job, int]]) -> None:
        """Ask for the grants of the prompts that are next or next but one, or would be in the step after the one with
        ``chunks``. A full decode worker holds up its own prompts alone."""
        if all(job.is_granted or job.asked_at is not None for job in self.waiting):
            return
        num_tokens = sum(job.num_known - job.num_computed for job in self.active) - sum(count for _, count in chunks)
        num_ahead, num_held_up = 0, Counter[str]()
        for job in self.waiting:
            if num_ahead >= NUM_NEXT and num_tokens >= self.spec.chunk_tokens:
                break
            is_late = job.asked_at is not None and self.clock.now > job.asked_at + ANSWER_SECONDS
            if not job.is_granted and (is_late or num_held_up[job.decode] >= NUM_NEXT):
                num_held_up[job.decode] += 1
                continue
            num_ahead += 1
            num_tokens += job.num_known
            if not job.is_granted and job.asked_at is None:
                job.asked_at = self.clock.now
                self.on_next(self, job)

    def _admit(self, job: Job) -> None:
        self.waiting.remove(job)
        self.active.append(job)
        self._take_room(job)
        blocks = job.request.blocks[: job.request.num_full_blocks(job.num_known - 1)]
        match = self.cache.match(blocks)
        num_read = 0 if job.source is None else max(0, job.source.match(blocks).num_blocks - match.num_blocks)
        job.num_computed = job.num_cached = (match.num_blocks + num_read) * BLOCK_TOKENS
        load_seconds = match.num_host_blocks * BLOCK_TOKENS * self.spec.token_bytes / self.spec.host_rate
        job.begun_at, job.ready_at = self.clock.now, job.queued_at + load_seconds
        if num_read:
            read_seconds = READ_SECONDS + num_read * BLOCK_TOKENS * self.spec.token_bytes / self.spec.link_rate
            job.ready_at = max(job.ready_at, self.clock.now) + read_seconds
            load_seconds += read_seconds
        left = job.num_known - job.num_cached
        job.own_seconds = load_seconds + self.spec.model.prefill_seconds(job.num_cached, left, self.spec.chunk_tokens)
        self.figures.num_prompts += 1
        self.figures.prompt_tokens += job.num_known
        self.figures.cached_tokens += job.num_cached

    def _begin_step(self, chunks: list[tuple[Job, int]]) -> None:
        num_pairs = sum(pairs(job.num_computed, count) for job, count in chunks)
        num_tokens = sum(count for _, count in chunks)
        work = StepWork(len(self.running), self._context, num_tokens, num_pairs)
        seconds = self.spec.model.seconds(work)
        self.figures.busy_seconds += seconds
        self._set_end(self.clock.now + seconds, lambda: self._end_step(chunks))

    def _end_step(self, chunks: list[tuple[Job, int]]) -> None:
        self._draw(1)
        for job, count in chunks:
            job.num_computed += count
            self._publish(job)
            if job.num_computed == job.num_known:
                self._end_prompt(job)
        self._next_step()

    def _publish(self, job: Job) -> None:
        """Let later prompts find the blocks that are computed so far, as the engine does after each step."""
        self.cache.add(job.request.blocks[: job.request.num_full_blocks(job.num_computed)], self.num_blocks_used)
        self.on_events(self)

    def _end_prompt(self, job: Job) -> None:
        now = self.clock.now
        self.active.remove(job)
        if job.num_drawn:  # it was preempted
            self.on_gap(now - job.last_token_at, 1)
        else:
            self.figures.queue_seconds += max(0.0, now - job.queued_at - job.own_seconds)
            self.on_prefilled(self, job)
        job.num_drawn += 1
        job.last_token_at = now
        if not job.decodes_here:
            return
        if job.num_drawn >= job.request.num_output_tokens:
            self._finish(job)
        else:
            self._begin_decoding(job)

    def _begin_leap(self) -> None:
        num_seqs = len(self.running)
        room = (self.spec.kv_tokens - self.memory.used_tokens) // num_seqs
        if room < 1 and self._preempt():
            self._next_step()
            return
        left = min(job.request.num_output_tokens - job.num_drawn for job in self.running)
        self._leap = _Leap(self.clock.now, max(1, min(left, room)), num_seqs, self._context)
        self._set_end(self.clock.now + self._leap.seconds(self.spec.model, self._leap.num_steps), self._end_leap)

    def _end_leap(self) -> None:
        leap = self._leap
        assert leap is not None
        self.figures.busy_seconds += leap.seconds(self.spec.model, leap.num_steps)
        self._draw(leap.num_steps)
        self._next_step()

    def _draw(self, num_steps: int) -> None:
        """Give each running sequence its next tokens; those of a leap are as far apart as on average."""
        now = self.clock.now
        finished: list[Job] = []
        begins: dict[float, int] = {}  # sequences by the time since their last token
        for job in self.running:
            seconds = now - job.last_token_at
            begins[seconds] = begins.get(seconds, 0) + 1
            job.num_drawn += num_steps
            job.num_known += num_steps
            job.last_token_at = now
            if job.num_drawn >= job.request.num_output_tokens:
                finished.append(job)
        mean = 0.0 if self._leap is None else (now - self._leap.begun_at) / num_steps
        for seconds, count in begins.items():
            if num_steps == 1:
                self.on_gap(seconds, count)
            else:
                self.on_gap(max(mean, seconds - mean * (num_steps - 1)), count)
                self.on_gap(mean, count * (num_steps - 1))
        self._context += num_steps * len(self.running)
        self.memory.change(num_steps * len(self.running), now)
        for job in finished:
            del self.running[job]
            self._context -= job.num_known
            self._finish(job)

    def _finish(self, job: Job) -> None:
        self.memory.change(-job.num_known, self.clock.now)
        blocks = job.request.blocks[: job.request.num_full_blocks(job.num_known)]
        self.cache.add(blocks, self.num_blocks_used)
        self.on_events(self)
        self.on_finished(self, job)

    def _preempt(self) -> bool:
        """Take the newest sequence's room, unless it is the only one; it starts anew before all others."""
        if len(self.running) < 2:
            return False
        job = next(reversed(self.running))
        del self.running[job]
        self._context -= job.num_known
        self.memory.change(-job.num_known, self.clock.now)
        job.decodes_here, job.is_granted = True, True
        job.num_computed = 0
        self.figures.num_preempted += 1
        job.queued_at = self.clock.now
        self.waiting.appendleft(job)
        return True
