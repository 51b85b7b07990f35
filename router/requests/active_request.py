"""One request of the router's core: its prompt, its state machine, its charge, its timeline."""

from dataclasses import dataclass

import msgspec

from splitserve.protocol.config import RequestClass
from splitserve.protocol.request import SamplingParams
from splitserve.protocol.token_ids import TOKEN_ID_BYTES, TokenIds
from splitserve.router.links.worker_record import Charge
from splitserve.router.placement.policies import RequestShape
from splitserve.router.placement.prefix_view import PromptHashes
from splitserve.router.requests.queue.tenants import OWN
from splitserve.router.requests.state import RequestState
from splitserve.router.requests.timeline.timeline import Timeline
from splitserve.router.requests.token_sequence import PromptScores
from splitserve.router.tracing.context import TraceContext

DEFAULT = RequestClass(name="default")


class RequestContext(msgspec.Struct, frozen=True):
    """Properties of a request beside its prompt and its sampling."""

    client_id: str = ""  # the client's own name for it, which the request's id begins with
    cache_salt: str = ""  # its KV is shared with requests of the same salt only
    priority: int | None = None  # lower is sooner; None: that of its class
    session: str = ""  # the conversation that it belongs to
    request_class: RequestClass = DEFAULT
    tenant: str = OWN
    is_probe: bool = False  # it is to be handed over where there is a pair
    read_at: float = 0.0  # its head was read; 0.0: not known
    trace: TraceContext | None = None  # its position in a trace; None: tracing is off

    def of_prompt(self, index: int) -> "RequestContext":
        """Return the context of prompt ``index``: those after the first have spans of their own below the first's."""
        if not index or self.trace is None:
            return self
        return msgspec.structs.replace(self, trace=self.trace.child())


NO_CONTEXT = RequestContext()


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request, changed by the core only; its driver may read it, even after the end. Times: the core's clock."""

    token_ids: TokenIds
    sampling: SamplingParams
    timeline: Timeline
    state: RequestState
    hashes: PromptHashes
    context: RequestContext = NO_CONTEXT
    charge: Charge | None = None  # of the current attempt
    num_waits: int = 0  # of the current wait for a worker that can continue the request
    stranded_at: float | None = None  # when that wait began
    siblings: tuple["ActiveRequest", ...] = ()  # of the prompt's other choices, which begin with this one
    predicted_ttft_seconds: float | None = None  # from its arrival, as predicted when it came; None: not known
    is_fallback: bool = False  # the first attempt is local only because there was no pair
    held_seconds: float = 0.0  # in which it was frozen; its deadline is so much later
    cache_epoch: int = 0  # resets of the prefix caches before it began
    num_known_tokens: int | None = None  # tokens with which an earlier prompt began; None: not counted

    @classmethod
    def new(
        cls,
        request_id: str,
        token_ids: TokenIds,
        sampling: SamplingParams,
        arrived_at: float,
        context: RequestContext = NO_CONTEXT,
        *,
        prepared_at: float | None = None,
    ) -> "ActiveRequest":
        """Return a new request; ``prepared_at``: when its prompt was tokens, by default at its arrival."""
        state = _new_state(request_id, len(token_ids), sampling)
        hashes = PromptHashes(token_ids, context.cache_salt)
        timeline = Timeline(arrived_at, arrived_at if prepared_at is None else prepared_at, context.read_at)
        return cls(token_ids, sampling, timeline, state, hashes, context)

    def add_sibling(self, request_id: str, choice: int) -> "ActiveRequest":
        """Add another choice of the prompt, and return its request."""
        sampling = msgspec.structs.replace(self.sampling, choice=choice)
        state = _new_state(request_id, len(self.token_ids), sampling)
        timeline = Timeline(self.arrived_at, self.timeline.prepared_at, self.timeline.read_at)
        context = self.context.of_prompt(choice)
        sibling = ActiveRequest(self.token_ids, sampling, timeline, state, self.hashes, context)
        self.siblings += (sibling,)
        return sibling

    @property
    def arrived_at(self) -> float:
        return self.timeline.arrived_at

    @property
    def request_id(self) -> str:
        return self.state.request_id

    @property
    def num_bytes(self) -> int:
        """Return the memory that the request's prompt keeps."""
        return TOKEN_ID_BYTES * len(self.token_ids)

    @property
    def priority(self) -> int:
        """The request's own priority, else its class's; lower is sooner."""
        own = self.context.priority
        return self.context.request_class.priority if own is None else own

    @property
    def is_prompt_only(self) -> bool:
        """Return whether only the prompt's log-probabilities are wanted, and one token: there is nothing to decode."""
        return self.sampling.prompt_logprobs is not None and self.sampling.max_tokens == 1

    @property
    def shape(self) -> RequestShape:
        return self.shape_at(self.arrived_at)

    def shape_at(self, now: float) -> RequestShape:
        """Return the sizes of the request, and the time that it has waited by ``now``."""
        return RequestShape(
            num_prompt_tokens=len(self.token_ids),
            max_tokens=self.sampling.max_tokens,
            num_output_tokens=len(self.state.delivered_ids),
            is_prompt_only=self.is_prompt_only,
            session=self.context.session,
            is_probe=self.context.is_probe,
            waited_seconds=now - self.arrived_at,
        )

    def attempt_sampling(self) -> SamplingParams:
        """Return the parameters for the next attempt's worker that computes the prompt."""
        scores = self.state.prompt_scores
        if scores is None:
            return self.sampling
        if scores.is_complete:
            return msgspec.structs.replace(self.sampling, prompt_logprobs=None)
        return msgspec.structs.replace(self.sampling, prompt_logprobs_start=scores.next_position)

    @property
    def is_stranded(self) -> bool:
        """Return whether the last attempt failed and no worker can continue the request for now."""
        return self.stranded_at is not None and not self.state.ended

    def check_invariants(self) -> None:
        state = self.state
        state.check_invariants()
        assert not state.ended, f"{self.request_id} has ended, and is still active"
        is_placed = state.placement is not None
        assert is_placed != self.is_stranded, f"{self.request_id} neither has an attempt nor waits for one, or has both"
        assert is_placed == (self.charge is not None), (
            f"{self.request_id} is charged without an attempt, or the reverse"
        )
        if self.charge is not None and state.num_attempt_tokens > 0:
            assert not self.charge.is_prefilling, f"{self.request_id} is charged for a prompt that has been computed"


def _new_state(request_id: str, num_prompt_tokens: int, sampling: SamplingParams) -> RequestState:
    scores = None
    if sampling.prompt_logprobs is not None:
        first = sampling.prompt_logprobs_start
        scores = PromptScores(max(0, num_prompt_tokens - first), first)
    wants_logprobs = sampling.logprobs is not None
    return RequestState(request_id, sampling.max_tokens, wants_logprobs=wants_logprobs, prompt_scores=scores)
