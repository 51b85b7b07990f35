"""Placement policies: pure functions over a snapshot of the workers. No I/O, no clock.

A policy takes a :class:`Snapshot` and a :class:`RequestShape` and returns a :data:`Placement`. The decode worker is
picked first; prefill follows. The same function can run in a simulator: all that it looks at is in its arguments.
"""

import hashlib
import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import msgspec

from splitserve.common.errors import ConfigError
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.placement.policies import PLACEMENT_POLICIES
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Party, Role
from splitserve.router.requests.objectives import NO_OBJECTIVES, Objectives

log = logging.getLogger(__name__)

READ_SECONDS = 0.003
"""Time of a read of a prefix from another worker, or of a hand-over, beside its bytes."""
USUAL_LINK_RATE = 1e9
"""Bytes per second of a link whose rate isn't known."""
_NO_RATES: Mapping[str, float] = MappingProxyType({})
NO_LOAD = WorkerLoad()
NO_STEP_MODEL = StepModel()
DEFAULT_CHUNK_TOKENS = 512
"""Tokens of a step of a worker that doesn't say more."""
USUAL_OUTPUT_TOKENS = 128.0
"""Length of outputs until some have ended."""


@dataclass(slots=True)  # a frozen one takes five times as long to make, and each request sees all workers anew
class WorkerView:
    """One ready worker as a policy sees it. Policies don't change it.

    ``num_requests``, ``prefill_tokens`` and ``context_tokens`` are what this router has in flight there, exact at any
    moment; ``load`` is the last heartbeat, up to a second old. ``prefill_tokens`` counts prompt tokens whose first
    output token is still to come, ``context_tokens`` the prompt tokens of the requests that decode there, or will.
    ``num_placed`` counts all requests ever placed. ``prefix_match_tokens`` is how much of *this* request's prompt needs
    no computing there, as far as the router knows, less where it has to be onboarded from a tier.

    For predictions: ``step_model`` has the worker's step times, ``chunk_tokens`` the tokens of a step at most,
    ``shared_chunk_tokens`` the prompt tokens of one that also decodes, ``sized_chunk_tokens`` the most of them
    where outputs have an objective for gaps, ``queue_seconds`` the time until it has computed the prompts placed
    there, ``prefill_busy`` the share of its recent time that prompts took, ``prompt_share`` the share that prompts
    are expected to take, ``prompt_seconds`` the mean time of the recent ones, each weighted by its time,
    ``num_decoding`` the requests there whose first token is out, ``decoding_tokens`` their prompt tokens,
    ``token_bytes`` the KV of a token, and ``link_rates`` the bytes per second at which it reads from peers, by
    their engine ids. ``reads_prefixes``: it can read prefixes from others.
    """

    party: Party
    role: Role
    max_num_seqs: int
    max_model_len: int
    kv_capacity_tokens: int
    load: WorkerLoad = NO_LOAD
    num_requests: int = 0
    prefill_tokens: int = 0
    context_tokens: int = 0
    num_placed: int = 0
    prefix_match_tokens: int = 0
    step_model: StepModel = NO_STEP_MODEL
    chunk_tokens: int = 0
    shared_chunk_tokens: int = 0
    sized_chunk_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_busy: float = 0.0
    prompt_share: float = 0.0
    prompt_seconds: float = 0.0
    num_decoding: int = 0
    decoding_tokens: int = 0
    token_bytes: int = 0
    link_rates: Mapping[str, float] = field(default_factory=dict)
    reads_prefixes: bool = True
    context_tokens_limit: int = field(init=False)  # the longest sequence that the worker can hold

    def __post_init__(self) -> None:
        self.context_tokens_limit = min(self.max_model_len, self.kv_capacity_tokens)


class PrefixSource(NamedTuple):
    """The worker from which others can read the longest part of a request's prompt, as far as the router knows.

    ``link_rates``: the bytes per second at which it reads from others, by their engine ids.
    """

    party: Party
    num_tokens: int
    link_rates: Mapping[str, float] = _NO_RATES


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The ready workers, and what all placements depend on. ``output_tokens``: the mean length of recent outputs;
    ``is_aggregated``: prefill and decode workers had better do both phases of their requests."""

    workers: tuple[WorkerView, ...]
    objectives: Objectives = NO_OBJECTIVES
    output_tokens: float = USUAL_OUTPUT_TOKENS
    prefix_source: PrefixSource | None = None
    is_aggregated: bool = False


class RequestShape(msgspec.Struct, frozen=True, gc=False):
    """Sizes of a request, as placement needs them. ``num_output_tokens`` counts tokens that the client already has.

    ``is_prompt_only``: log-probabilities of the prompt, and one token: there is nothing to decode. ``session``: the
    client's name for the conversation; "" if it gave none. ``is_probe``: it is to be handed over where there is a pair.
    ``waited_seconds``: time since its arrival, which is a part of its TTFT.
    """

    num_prompt_tokens: int
    max_tokens: int
    num_output_tokens: int = 0
    is_prompt_only: bool = False
    session: str = ""
    is_probe: bool = False
    waited_seconds: float = 0.0

    @property
    def max_context_tokens(self) -> int:
        """Tokens of the sequence when it has grown to its limit."""
        return self.num_prompt_tokens + self.max_tokens


@dataclass(frozen=True, slots=True)
class Disaggregated:
    """Prefill and decode on two workers. ``matched_tokens`` of the prompt need no computing, as far as known; ``why``:
    the policy's reason, in a few words; ``ttft_seconds``: its prediction, if it made one; ``prefix``: the worker that
    prefill is to read a part of the prompt's KV from."""

    prefill: Party
    decode: Party
    matched_tokens: int = field(default=0, compare=False)
    why: str = field(default="", compare=False)
    ttft_seconds: float | None = field(default=None, compare=False)
    prefix: Party | None = field(default=None, compare=False)

    @property
    def parties(self) -> tuple[Party, ...]:
        return (self.prefill, self.decode)


@dataclass(frozen=True, slots=True)
class Local:
    """Both phases on one worker; see :class:`Disaggregated`."""

    worker: Party
    matched_tokens: int = field(default=0, compare=False)
    why: str = field(default="", compare=False)
    ttft_seconds: float | None = field(default=None, compare=False)

    @property
    def parties(self) -> tuple[Party, ...]:
        return (self.worker,)


@dataclass(frozen=True, slots=True)
class NoWorker:
    """No worker can take the request now; ``reason`` is for the client."""

    reason: str


Placed: TypeAlias = Disaggregated | Local
Placement: TypeAlias = Placed | NoWorker
Policy: TypeAlias = Callable[[Snapshot, RequestShape], Placement]


def guarded(policy: Policy) -> Policy:
    """Return the policy as one that never raises: what it should not have done is logged, and places nothing. So one
    request's fault is that request's alone, whenever the policy is called."""

    def place(snapshot: Snapshot, shape: RequestShape) -> Placement:
        try:
            placement = policy(snapshot, shape)
            if isinstance(placement, Disaggregated) and placement.prefill == placement.decode:
                raise ValueError(
                    f"{placement.prefill} can't hand over to itself: both phases on one worker are `alone`"
                )
        except Exception as error:
            log.exception("the routing policy failed")
            return NoWorker(f"the routing policy failed: {type(error).__name__}: {error}")
        return placement

    return place


def least_loaded(snapshot: Snapshot, shape: RequestShape) -> Placement:
    """The decode (or mixed) worker with the largest free share, then the prefill worker with the fewest prompt tokens.

    Where there are both whole pairs and mixed workers, the less loaded of the best two takes the request; ties go to
    the pair. Among equals the worker that was given the fewest requests so far, so that an idle system takes turns.
    """
    fitting = fitting_workers(snapshot, shape)
    decode = min(of_role(fitting, Role.DECODE), key=decode_load, default=None)
    prefill = min(of_role(fitting, Role.PREFILL), key=prefill_load, default=None)
    mixed = min(of_role(fitting, Role.MIXED), key=decode_load, default=None)
    pair_is_best = decode is not None and (mixed is None or used_share(decode) <= used_share(mixed))
    if decode is not None and prefill is not None and pair_is_best:
        return pair(prefill, decode, "least loaded", read=prefix_read(snapshot, prefill, shape))
    if mixed is not None:
        return alone(mixed, "least loaded")
    return NoWorker(why_not(snapshot, fitting, shape))


def aggregated(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with all workers as mixed ones."""
    return replace(snapshot, workers=tuple([replace(worker, role=Role.MIXED) for worker in snapshot.workers]))


class PrefixRead(NamedTuple):
    """A prefix that a worker reads instead of computing it: its source, its tokens from the prompt's first one on, and
    the predicted seconds of the read and of computing the rest."""

    source: Party
    num_tokens: int
    read_seconds: float
    own_seconds: float


def prefix_read(snapshot: Snapshot, prefill: WorkerView, shape: RequestShape) -> PrefixRead | None:
    """Return the read of a prefix from the snapshot's source if it is predicted to take less time than ``prefill``
    takes to compute the same; else None.

    A worker that has not yet read from another knows no rate of that link: what the other reads from it at counts, as a
    decode worker's does from hand-overs.
    """
    source, num_tokens = snapshot.prefix_source, shape.num_prompt_tokens + shape.num_output_tokens
    matched = min(prefill.prefix_match_tokens, num_tokens - 1)
    if source is None or not prefill.reads_prefixes:
        return None
    if source.num_tokens <= matched or source.party == prefill.party:
        return None
    rate = prefill.link_rates.get(source.party.engine_id) or source.link_rates.get(prefill.party.engine_id)
    read_seconds = READ_SECONDS + (source.num_tokens - matched) * prefill.token_bytes / (rate or USUAL_LINK_RATE)
    own_seconds = prefill_seconds(prefill, source.num_tokens, num_tokens)
    if read_seconds + own_seconds >= prefill_seconds(prefill, matched, num_tokens):
        return None
    return PrefixRead(source.party, source.num_tokens, read_seconds, own_seconds)


def prefill_seconds(worker: WorkerView, num_known: int, num_tokens: int) -> float:
    """Return the predicted seconds in which a worker computes the tokens of a prompt after the first ``num_known``."""
    chunk = worker.chunk_tokens or DEFAULT_CHUNK_TOKENS
    return worker.step_model.prefill_seconds(num_known, num_tokens - num_known, chunk)


def pair(
    prefill: WorkerView,
    decode: WorkerView,
    why: str,
    ttft_seconds: float | None = None,
    *,
    read: PrefixRead | None = None,
) -> Disaggregated:
    """Return the placement on two workers; ``read``: what prefill reads from a third one, or from decode."""
    matched, source = (prefill.prefix_match_tokens, None) if read is None else (read.num_tokens, read.source)
    return Disaggregated(prefill.party, decode.party, matched, why, ttft_seconds, source)


def alone(worker: WorkerView, why: str, ttft_seconds: float | None = None) -> Local:
    """Return the placement on one worker."""
    return Local(worker.party, worker.prefix_match_tokens, why, ttft_seconds)


def context_limits(snapshot: Snapshot) -> tuple[int, int] | None:
    """Tokens of the longest sequence that some workers can take, and of the longest that all of a kind can.

    None while there is neither a mixed nor a decode worker; without prefill workers, decode can do both phases. Workers
    may differ: each cuts its context to its KV memory.
    """
    limits = {role: [worker.context_tokens_limit for worker in of_role(snapshot.workers, role)] for role in Role}
    longest = max(limits[Role.MIXED], default=0)
    lasting = list(limits[Role.MIXED])
    if limits[Role.DECODE]:
        longest_prompt = max(limits[Role.PREFILL] or limits[Role.DECODE])
        longest = max(longest, min(longest_prompt, max(limits[Role.DECODE])))
        lasting += limits[Role.DECODE]
    return (longest, min(longest, *lasting)) if lasting else None


def fits(worker: WorkerView, shape: RequestShape) -> bool:
    """Return whether the worker's context is long enough for a request of this shape in the worker's role."""
    needed = _prefilled_tokens(shape) if worker.role is Role.PREFILL else shape.max_context_tokens
    return worker.context_tokens_limit >= needed


def fitting_workers(snapshot: Snapshot, shape: RequestShape) -> list[WorkerView]:
    """Return the workers that :func:`fits` is true for; what a request needs is computed once for all of them."""
    needed, prefilled, prefill = shape.max_context_tokens, _prefilled_tokens(shape), Role.PREFILL
    return [
        worker
        for worker in snapshot.workers
        if worker.context_tokens_limit >= (prefilled if worker.role is prefill else needed)
    ]


def _prefilled_tokens(shape: RequestShape) -> int:
    """Return the tokens that a prefill worker holds: the prompt, and what was delivered; one token more than its own,
    or it would take that for the last."""
    return min(shape.max_context_tokens, shape.num_prompt_tokens + shape.num_output_tokens + 2)


def of_role(workers: Iterable[WorkerView], role: Role) -> list[WorkerView]:
    """Return the workers of a role."""
    return [worker for worker in workers if worker.role is role]


def used_share(worker: WorkerView) -> float:
    """Return the used share of a decode worker's scarcer resource: batch slots or KV memory. Above 1: queued."""
    return max(worker.num_requests / worker.max_num_seqs, worker.context_tokens / max(1, worker.kv_capacity_tokens))


def decode_load(worker: WorkerView) -> tuple[float, int, int, str]:
    """Return the sort key of a decode or mixed worker, best first: its load, and what the request adds to it."""
    saved = worker.prefix_match_tokens / max(1, worker.kv_capacity_tokens)
    return (used_share(worker) - saved, worker.load.num_waiting, worker.num_placed, worker.party.engine_id)


def prefill_load(worker: WorkerView) -> tuple[int, int, int, str]:
    """Return the sort key of a worker for prompts, best first: the prompt tokens that it has still to compute."""
    missed = worker.prefill_tokens - worker.prefix_match_tokens
    return (missed, worker.load.waiting_tokens, worker.num_placed, worker.party.engine_id)


def session_rank(session: str, worker: WorkerView) -> bytes:
    """Return the sort key of a worker for a conversation, best first: rendezvous hashing, the same in every router and
    after its restart; a worker that comes or goes moves its own conversations only."""
    text = f"{session}\0{worker.party.engine_id}"
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def why_not(snapshot: Snapshot, fitting: list[WorkerView], shape: RequestShape) -> str:
    """Return the reason, for the client, that none of the workers can take the request; ``fitting``: those it fits."""
    if not snapshot.workers:
        return "no worker is ready"
    roles = {worker.role for worker in snapshot.workers}
    for role, other in ((Role.DECODE, Role.PREFILL), (Role.PREFILL, Role.DECODE)):
        if other in roles and role not in roles and Role.MIXED not in roles:
            return f"no {role} worker is ready"
    lacking = roles - {worker.role for worker in fitting}
    longest = [max(worker.context_tokens_limit for worker in of_role(snapshot.workers, role)) for role in lacking]
    names = ", ".join(sorted(str(role) for role in lacking))
    return (
        f"no ready {names} worker takes a sequence of {shape.max_context_tokens} tokens; the longest that they take "
        f"has {min(longest, default=0)}"
    )


def policy_by_name(name: str) -> Policy:
    """Return a declared policy. Raises :class:`ConfigError` that lists the names for an unknown one."""
    declared = PLACEMENT_POLICIES.get(name)
    if declared is None:
        raise ConfigError(f"policy is {name!r}; choose one of {', '.join(sorted(PLACEMENT_POLICIES))}")
    module = importlib.import_module(f"splitserve.router.placement.{declared.module}")
    policy: Policy = getattr(module, declared.function)
    return policy
