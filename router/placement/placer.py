"""Placement of requests on the registered workers, by policy and by the cached prefixes of their prompts. Pure."""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from splitserve.protocol.block_hash import root_hash
from splitserve.protocol.cluster_report import WorkerState
from splitserve.protocol.messages.requests import PeerRef
from splitserve.protocol.request import Party, Role
from splitserve.router.links.membership import Membership, decode_party, prefill_party
from splitserve.router.placement.cost import cost
from splitserve.router.placement.modes.recent_sizes import RecentSizes
from splitserve.router.placement.modes.serving_mode import Held, ServingMode
from splitserve.router.placement.policies import (
    Disaggregated,
    NoWorker,
    Placed,
    Placement,
    Policy,
    PrefixSource,
    RequestShape,
    Snapshot,
    WorkerView,
    context_limits,
    guarded,
    least_loaded,
)
from splitserve.router.placement.prefix_view import MIN_GAIN_BLOCKS, PrefixMatch, PrefixView, PromptHashes, helper_of
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.ladder import local_placement
from splitserve.router.requests.objectives import NO_OBJECTIVES, Objectives

SHUTTING_DOWN = "the router is shutting down"
CONNECTING = "decode workers are connecting to prefill workers"
_LIMITS_SECONDS = 0.1


class Limits(msgspec.Struct, frozen=True, gc=False):
    """Bounds of prompts that the workers can run."""

    max_model_len: int  # of a sequence on the largest workers
    common_model_len: int  # of a sequence on every one of them
    vocab_size: int


class Readiness(msgspec.Struct, frozen=True, gc=False):
    """Answer to whether requests can be served now.

    A router becomes ready when the policy finds its workers, and they are connected. Then it stays ready while a worker
    that decodes can serve alone: what the policy lacks is in ``reason`` nevertheless.
    """

    is_ready: bool
    reason: str = ""


class _KnownLimits(msgspec.Struct, frozen=True, gc=False):
    """Limits that hold while the workers have these states, and until a time: breakers may open and close."""

    limits: Limits
    states: list[tuple[Party, WorkerState]]
    until: float


class Placer:
    """Placement by a policy, from membership and the prefix view."""

    def __init__(
        self, policy: Policy, membership: Membership, prefixes: PrefixView, objectives: Objectives = NO_OBJECTIVES
    ) -> None:
        self.policy = guarded(policy)
        self.sizes = RecentSizes()
        self._mode = ServingMode(objectives if policy is cost else NO_OBJECTIVES)  # others know no modes
        self._objectives = objectives
        self._known_limits: _KnownLimits | None = None
        self.is_closing = False  # no request is placed any more
        self._was_ready = False
        self.cache_epoch = 0  # number of resets of the prefix caches
        self.unreset: dict[Party, None] = {}  # workers that may still have content from before the last one
        self._membership = membership
        self._prefixes = prefixes

    @property
    def is_aggregated(self) -> bool:
        """Return whether prefill and decode workers do both phases of their requests."""
        return self._mode.is_aggregated

    @property
    def held(self) -> Held | None:
        """Return the rates that the modes hold, as of the last review; None: not known."""
        return self._mode.held

    def place(self, shape: RequestShape, now: float, prompt: PromptHashes | None = None) -> Placement:
        """Return the policy's choice for a request of this shape, with this prompt."""
        if self.is_closing:
            return NoWorker(SHUTTING_DOWN)
        policy = least_loaded if shape.is_probe else self.policy
        return policy(self.snapshot(prompt or PromptHashes(()), now), shape)

    def first(self, request: ActiveRequest, now: float) -> Placement:
        """Return the policy's choice for a new request; where it finds none, a lone worker that decodes, if any."""
        shape = request.shape_at(now)
        if shape.is_prompt_only and not self.is_closing:
            alone = local_placement(self.snapshot(request.hashes, now).workers, shape)
            return alone or self.place(shape, now, request.hashes)
        placement = self.place(shape, now, request.hashes)
        if not isinstance(placement, NoWorker) or self.is_closing:
            return placement
        fallback = local_placement(self.snapshot(request.hashes, now).workers, shape)
        request.is_fallback = fallback is not None
        return placement if fallback is None else fallback

    def readiness(self, now: float) -> Readiness:
        """Return whether a request could be served now."""
        shape = RequestShape(num_prompt_tokens=1, max_tokens=1)
        placement = self.place(shape, now)
        if isinstance(placement, NoWorker):
            reason = placement.reason
        elif isinstance(placement, Disaggregated) and not self._membership.is_connected():
            reason = CONNECTING
        else:
            self._was_ready = True
            return Readiness(is_ready=True)
        may_degrade = self._was_ready and not self.is_closing
        alone = local_placement(self.snapshot(PromptHashes(()), now).workers, shape) if may_degrade else None
        return Readiness(alone is not None, reason)

    def snapshot(self, prompt: PromptHashes, now: float) -> Snapshot:
        """Return the workers that take requests, with what each holds of the prompt."""
        matches = self._matches(prompt)
        worths = {party: match.worth_tokens for party, match in matches.items()}
        workers = self._membership.snapshot(now, worths).workers
        source = self._prefix_source(workers, prompt, matches) if matches else None
        if self._mode.is_due(now):
            alike, routers = self._membership.are_alike(now), self._membership.of_all_routers()
            self._mode.review(workers, alike, self.sizes, now, routers=routers)
        return Snapshot(workers, self._objectives, self.sizes.output, source, self._mode.is_aggregated)

    def _prefix_source(
        self, workers: Iterable[WorkerView], prompt: PromptHashes, matches: Mapping[Party, PrefixMatch]
    ) -> PrefixSource | None:
        """Return the worker with the longest part of a prompt that others can read. A prompt that a prefill worker was
        sent may still wait there: what it has announced counts, or, without KV events, what it has computed."""
        announced = self._matches(prompt, certain=True) if self._prefixes.hears_events else {}
        found = []
        for worker in workers:
            party = worker.party
            match = matches.get(party)
            if match is None or party in self.unreset:
                continue
            num_tokens = match.num_tokens
            if worker.role is Role.PREFILL:
                if self._prefixes.announces(party):
                    num_tokens = announced[party].num_tokens if party in announced else 0
                else:
                    num_tokens = self._prefixes.num_computed(party, prompt, num_tokens)
            if num_tokens:
                found.append(PrefixSource(party, num_tokens, worker.link_rates))
        return max(found, key=lambda source: (source.num_tokens, source.party.engine_id), default=None)

    def note_begun(self, request: ActiveRequest, placement: Placed, now: float) -> None:
        """Take into account that a request begins on these workers."""
        self.sizes.note_prompt(request.shape_at(now).num_prompt_tokens, placement.matched_tokens, now)

    def note_computed(self, request: ActiveRequest) -> None:
        """Take into account that the worker of a request's prompt has computed it: its first token is out. Now decode
        has it, too: before, a request with the same prompt would have nothing there to wait for."""
        placement = request.state.placement
        if placement is not None and request.cache_epoch == self.cache_epoch:
            prefill, decode = prefill_party(placement), decode_party(placement)
            self._prefixes.note_computed(prefill, request.hashes)
            if decode != prefill:
                self.note_sent([decode], request.hashes)

    def note_sent(self, parties: Iterable[Party], prompt: PromptHashes) -> None:
        """Take into account that these workers will hold the KV of a prompt."""
        if len(self._membership) == 1:
            return
        for party in parties:
            record = self._membership.get(party)
            if record is not None and record.state is not WorkerState.LOST and record.info.prefix_caching:
                layout = record.info.layout
                self._prefixes.note_sent(party, root_hash(layout), prompt, layout.block_size, record.num_kept_blocks)

    def forget_prefixes(self) -> None:
        """Forget what was sent to the workers: their caches are reset. KV events tell what they evict."""
        self.cache_epoch += 1
        self._prefixes.forget_sent()

    def note_output(self, request: ActiveRequest) -> None:
        """Take a finished output into account: its length, and its KV, which the next turn's prompt may begin with."""
        output_ids = request.state.delivered_ids
        self.sizes.note_output(len(output_ids))
        placement = request.state.placement
        if placement is not None and request.cache_epoch == self.cache_epoch:
            self.note_sent([decode_party(placement)], request.hashes.extended(output_ids))

    def limits(self, now: float) -> Limits | NoWorker:
        """Return the bounds of prompts, or NoWorker until they are known and requests can run."""
        states = self._membership.states()
        known = self._known_limits
        if known is not None and known.states == states and now < known.until and not self.is_closing:
            return known.limits
        found = self._find_limits(now)
        self._known_limits = None if isinstance(found, NoWorker) else _KnownLimits(found, states, now + _LIMITS_SECONDS)
        return found

    def _find_limits(self, now: float) -> Limits | NoWorker:
        lengths = context_limits(self._membership.snapshot(now))
        vocab_size = self._membership.vocab_size()
        if self.is_closing or lengths is None or vocab_size is None:
            placement = self.place(RequestShape(num_prompt_tokens=1, max_tokens=1), now)
            return placement if isinstance(placement, NoWorker) else NoWorker("no worker is ready")
        return Limits(*lengths, vocab_size)

    def hash_in_parts(self, prompt: PromptHashes) -> Iterator[None]:
        """Hash a prompt before it is placed, in parts of a millisecond, between which it yields."""
        return self._prefixes.hash_in_parts(prompt) if len(self._membership) > 1 else iter(())

    def prefix_helper(self, prompt: PromptHashes, worker: Party, now: float) -> PeerRef | None:
        """Return a worker that holds enough more of the prompt, on its device or in its host tier, that reading it from
        there pays off for ``worker``; else None."""
        matches = self._matches(prompt, certain=True)
        if not matches:
            return None
        usable = {record.info.party.engine_id: record.info.party for record in self._membership.usable(now)}
        record = self._membership.get(worker)
        min_gain = MIN_GAIN_BLOCKS * record.info.layout.block_size if record is not None else 0
        held = {
            party: match
            for party, match in matches.items()
            if party == worker or (usable.get(party.engine_id) == party and party not in self.unreset)
        }
        helper = helper_of(worker, held, min_gain)
        return None if helper is None else self.peer(helper)

    def peer(self, party: Party) -> PeerRef:
        """Return a placed worker's address for its peers."""
        record = self._membership.get(party)
        assert record is not None, f"{party} was placed but isn't known"
        return PeerRef(party, record.info.endpoint)

    def _matches(self, prompt: PromptHashes, *, certain: bool = False) -> Mapping[Party, PrefixMatch]:
        """Return each worker's prefix match; none with a single worker: it doesn't matter then, and hashing is slow."""
        return self._prefixes.matches(prompt, certain=certain) if len(self._membership) > 1 else {}
