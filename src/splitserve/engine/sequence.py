"""A request inside a worker: its tokens, its blocks, how much of its KV is computed, its stage."""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field

import msgspec

from splitserve.engine.cache_groups import Table
from splitserve.engine.feature_states import FeatureStates
from splitserve.engine.prompt_scores import PromptScores
from splitserve.engine.stage import NEXT_STAGES, Stage
from splitserve.kvconnector.layout.shape import num_blocks_for
from splitserve.kvconnector.tiers.loads import BlockLoad
from splitserve.protocol.messages.marks import MarkList
from splitserve.protocol.messages.requests import HandoverReport, PeerRef
from splitserve.protocol.request import FinishReason, Party, RequestKey, SamplingParams
from splitserve.protocol.step import (
    MAX_STEPS_IN_FLIGHT,
    UNKNOWN_TOKEN,
    BlockCopy,
    ChunkTable,
    SampleSpec,
    ScheduledChunk,
)
from splitserve.protocol.token_ids import TokenIds

_ENDED, _RELEASED = Stage.ENDED, Stage.RELEASED  # looked up for each token, where access to an Enum's member costs


@dataclass(slots=True)
class LaunchedChunks:
    """A sequence's chunks in launched steps that haven't completed."""

    num_steps: int = 0  # steps that touch the blocks, which can't be given back before those have completed
    num_tokens: int = 0  # tokens after the computed ones that these steps compute
    drawing_chunk: int | None = None  # index of its chunk in the last of the steps, if that draws the token after them
    is_gated: bool = False  # the only step waits on the device for the sequence's load, or did when it was launched

    def check_invariants(self) -> None:
        assert 0 <= self.num_steps <= MAX_STEPS_IN_FLIGHT, f"{self.num_steps} steps in flight"
        assert self.num_tokens >= self.num_steps, f"{self.num_tokens} tokens in {self.num_steps} steps"
        if not self.num_steps:
            assert (self.num_tokens, self.drawing_chunk, self.is_gated) == (0, None, False), "chunks without a step"
        assert not self.is_gated or self.num_steps == 1, "a gated step isn't the only one"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request, from its first message to this worker until its blocks are given back.

    Three lengths in tokens, each at least the one before: committed (``num_computed``: their KV was written by steps
    that have completed), launched (``num_launched``), proposed (``num_proposed``).
    """

    key: RequestKey  # the request and its attempt
    reply_to: Party  # the router that gets its tokens
    token_ids: TokenIds  # the prompt and the output so far
    num_prompt_tokens: int  # the first of ``token_ids``, which the client sent
    sampling: SamplingParams  # how tokens are drawn, and when the output ends
    deadline: float  # seconds on the worker's own clock
    itl_seconds: float = 0.0  # objective for the gaps between its tokens here; 0.0: none
    number: int = 0  # of its arrival in the worker
    max_length: int = 2**31  # bound of prompt and output, by the worker's memory and model
    end_length: int = field(init=False)  # the same bound with ``sampling.max_tokens`` in it
    cache_salt: str = ""  # its blocks are shared with sequences of the same salt only
    # Requests of the prompt's other choices, which begin when its KV is here; by key the choice.
    siblings: dict[RequestKey, int] = field(default_factory=dict)
    num_choices: int = 1  # of the prompt, whose first tokens are drawn together
    copies: list[BlockCopy] = field(default_factory=list)  # before its first chunk; it holds their sources, too
    was_aborted: bool = False  # its own output is over; it goes on for its siblings
    handover: HandoverReport | None = None  # of the prompt, for the message with the first token
    # Marks for the next message; None after its first token here.
    marks: MarkList | None = field(default_factory=MarkList)
    decodes_here: bool = True  # False: after the first token a decode worker takes over
    draws_second: bool = False  # or after the second one, which is drawn here as soon as can be
    stage: Stage = Stage.NEW  # its state in the worker; changed by :meth:`enter` alone
    block_ids: list[int] = field(
        default_factory=list
    )  # blocks of the first group that it holds, from its first token on
    other_tables: list[Table] = field(default_factory=list)  # blocks of the groups after the first
    host_slots: list[int] = field(default_factory=list)  # host-tier slots held in place of blocks that left the device
    block_hashes: list[bytes] = field(default_factory=list)  # chain of its full blocks, as far as it was needed
    num_computed: int = 0  # tokens whose KV is in the blocks
    num_published: int = 0  # full blocks that the prefix index has
    num_cached_tokens: int = 0  # prefix hit at the first admission, for usage
    was_admitted: bool = False  # held room for all its tokens at some time, perhaps no longer
    keeps_to_itself: bool = False  # its KV may rest on forgotten content: no other request finds it
    skips_tiers: bool = False  # a load took too long: computes what the pool doesn't have
    prefix: PeerRef | None = None  # a peer to read more of its prompt from, when its turn comes; None once that is over
    load: BlockLoad | None = None  # its blocks that are being onboarded
    launched: LaunchedChunks = field(default_factory=LaunchedChunks)  # its part of the steps in flight
    features: FeatureStates | None = field(init=False)  # of its sampling features on the runner; None: it has none
    prompt_logprobs: PromptScores | None = field(init=False)  # those of its prompt; None: not wanted

    def __post_init__(self) -> None:
        self.end_length = min(self.max_length, self.num_prompt_tokens + self.sampling.max_tokens)
        self.features = FeatureStates.of(self.sampling)
        self.prompt_logprobs = PromptScores.of(self.sampling, self.num_prompt_tokens)

    def enter(self, stage: Stage) -> None:
        """Change the stage; :data:`NEXT_STAGES` has the transitions. Entering the present stage has no effect."""
        if stage is not self.stage:
            assert stage in NEXT_STAGES[self.stage], f"{self.key} goes from {self.stage.value} to {stage.value}"
            self.stage = stage

    @property
    def has_ended(self) -> bool:
        """Return whether it draws no more tokens."""
        return self.stage is _ENDED or self.stage is _RELEASED

    @property
    def is_touched(self) -> bool:
        """Return whether a launched step or a copy touches the blocks, so that they can't be given back yet."""
        return self.launched.num_steps > 0 or self.load is not None

    @property
    def num_remaining(self) -> int:
        """Known tokens whose KV isn't computed yet. 1 for a sequence that decodes."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_launched(self) -> int:
        """Tokens whose KV is in the blocks, or will be once the steps in flight have completed."""
        return self.num_computed + self.launched.num_tokens

    @property
    def num_proposed(self) -> int:
        """Tokens that the next step may build on: the known ones, and the one that a launched step draws, unseen."""
        return len(self.token_ids) + (self.launched.drawing_chunk is not None)

    @property
    def num_unplanned(self) -> int:
        """Known tokens that no launched step computes, either."""
        return len(self.token_ids) - self.num_launched

    @property
    def may_go_on(self) -> bool:
        """Return whether lengths allow a token after the one that a launched step draws."""
        return len(self.token_ids) + 1 < self.end_length

    @property
    def draws_no_more(self) -> bool:
        """Return whether it draws no more tokens here."""
        return self.has_ended or self.stage is Stage.OFFERED

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def chunk(self, num_tokens: int, block_size: int) -> ScheduledChunk:
        """Return the next ``num_tokens`` known tokens as a chunk; it draws a token if it reaches the last known one.

        Where a launched step is about to draw one more, that one is the next.
        """
        start = self.num_launched
        end = start + num_tokens
        previous = self.launched.drawing_chunk
        return ScheduledChunk(
            list(self.token_ids[start:end]) if previous is None else [UNKNOWN_TOKEN],
            start,
            self.block_ids[: num_blocks_for(end, block_size)],
            self._sample(end) if end == self.num_proposed else None,
            previous,
            (),
            self._other_tables(start, end) if self.other_tables else (),
            None if self.prompt_logprobs is None else self.prompt_logprobs.wanted(self.token_ids, start, end),
            self._other_samples(end),
            tuple(self.copies) if self.copies and not self.launched.num_steps else (),
        )

    def _other_tables(self, start: int, end: int) -> tuple[ChunkTable, ...]:
        return tuple([table.chunk(start, end) for table in self.other_tables])

    def num_after_load(self, block_size: int) -> int:
        """Return the number of known tokens that are neither computed nor being onboarded: at least one."""
        loading = 0 if self.load is None else len(self.load.block_ids) * block_size
        return self.num_remaining - loading

    def gated_chunk(self, block_size: int) -> ScheduledChunk:
        """Return all of those as a chunk that waits for the load."""
        assert self.load is not None and not self.launched.num_tokens
        end = len(self.token_ids)
        start = end - self.num_after_load(block_size)
        blocks = self.block_ids[: num_blocks_for(end, block_size)]
        scored = None if self.prompt_logprobs is None else self.prompt_logprobs.wanted(self.token_ids, start, end)
        return ScheduledChunk(
            list(self.token_ids[start:]),
            start,
            blocks,
            self._sample(end),
            gates=tuple(self.load.pending),
            scored=scored,
            others=self._other_samples(end),
        )

    def _sample(self, position: int) -> SampleSpec:
        return _sample_spec(self.sampling, self.features, self.token_ids, self.num_prompt_tokens, position)

    def _other_samples(self, end: int) -> tuple[SampleSpec, ...]:
        """Return the draws of the other choices' first tokens, if a chunk that ends here draws the first token. States
        of their features are made for that draw alone."""
        if self.num_choices == 1 or end != self.num_prompt_tokens or end != len(self.token_ids):
            return ()
        others = (self._of_choice(choice) for choice in range(1, self.num_choices))
        return tuple(_sample_spec(other, FeatureStates.of(other), self.token_ids, end, end) for other in others)

    def _of_choice(self, choice: int) -> SamplingParams:
        return msgspec.structs.replace(self.sampling, choice=choice, prompt_logprobs=None)

    @property
    def num_forks(self) -> int:
        """Sequences that begin here once the prompt's KV is complete."""
        return len(self.siblings) if self.decodes_here else 0

    @property
    def choice_keys(self) -> tuple[RequestKey, ...]:
        """The requests that this sequence stands for: its own unless that was aborted, and those of the siblings."""
        return (*(() if self.was_aborted else (self.key,)), *self.siblings)

    def fork(self) -> "list[Sequence]":
        """Return the sequences of the siblings: the same prompt, without output. The log-probabilities of the prompt
        have been sent for all of them."""
        forks = [
            Sequence(
                key=key,
                reply_to=self.reply_to,
                token_ids=self.token_ids[: self.num_prompt_tokens],
                num_prompt_tokens=self.num_prompt_tokens,
                sampling=self._of_choice(choice),
                deadline=self.deadline,
                itl_seconds=self.itl_seconds,
                number=self.number,
                max_length=self.max_length,
                handover=self.handover,
                cache_salt=self.cache_salt,
                num_cached_tokens=self.num_cached_tokens,
                keeps_to_itself=self.keeps_to_itself,
            )
            for key, choice in self.siblings.items()
        ]
        self.siblings = {}
        return forks

    def finish_reason(self, token_id: int) -> FinishReason | None:
        """Return the reason to end with the next token, ``token_id``, or None."""
        finish_reason = self.sampling.finish_reason(token_id, self.num_output_tokens + 1)
        return FinishReason.LENGTH if finish_reason is None and not self.may_go_on else finish_reason

    def add_computed(self, token_ids: ListLike[int]) -> None:
        """Append output tokens whose KV is in the blocks, as is that of all tokens before them."""
        self.token_ids.extend(token_ids)
        self.num_computed = len(self.token_ids)

    def on_launched(self, chunk: ScheduledChunk, index: int) -> None:
        """Note that a step is launched whose chunk number ``index`` is this sequence's ``chunk``."""
        launched = self.launched
        launched.num_steps += 1
        launched.num_tokens += len(chunk.token_ids)
        launched.drawing_chunk = None if chunk.sample is None else index
        if self.features is not None and chunk.sample is not None:
            self.features.next_position = chunk.sample.position + 1
        if chunk.gates:
            assert self.load is not None
            launched.is_gated = self.load.holds_step = True

    def note_scored(self, chunk: ScheduledChunk) -> None:
        """Note that the log-probabilities of the prompt's tokens that ``chunk`` scores were sent."""
        assert self.prompt_logprobs is not None
        self.prompt_logprobs.note(chunk)

    def on_completed(self, chunk: ScheduledChunk) -> None:
        """Note that the step with ``chunk`` has completed."""
        launched = self.launched
        launched.num_steps -= 1
        launched.num_tokens -= len(chunk.token_ids)
        if not launched.num_steps:
            launched.drawing_chunk = None
            launched.is_gated = False

    def check_invariants(self, block_size: int) -> None:
        """Raise AssertionError unless its fields agree with each other and with its stage."""
        self.launched.check_invariants()
        num_held = len(self.block_ids) + len(self.host_slots)
        for table in self.other_tables:
            assert table.end == num_held, f"{self.key} holds {num_held} blocks, but {table.end} of another group"
        name = f"{self.key}, which is {self.stage.value},"
        assert self.num_computed <= len(self.token_ids), f"{name} has KV for more tokens than it has"
        lengths = (self.num_computed, self.num_launched, self.num_proposed)
        assert list(lengths) == sorted(lengths), f"{name} has committed, launched, proposed lengths {lengths}"
        assert self.host_slots == [] or self.stage in _ON_OFFER, f"{name} holds slots of the host tier"
        if self.stage in _WITHOUT_STEPS:
            assert not self.launched.num_steps, f"{name} is in a step"
        if self.stage in _WITHOUT_BLOCKS:
            assert num_held == 0 and self.load is None, f"{name} holds {num_held} blocks"
            assert self.num_computed == 0, f"{name} has KV without blocks"
        elif self.stage in _WITH_BLOCKS:
            known = self.num_computed if self.stage is Stage.DECODING else len(self.token_ids)
            needed = num_blocks_for(known, block_size)
            assert num_held >= needed, f"{name} holds {num_held} blocks of {needed}"
        elif self.stage is Stage.QUEUED:
            assert num_held or (self.load is None and self.num_computed == 0), f"{name} has KV without blocks"
        elif self.stage is Stage.RELEASED:
            assert num_held == 0 or self.is_touched, f"{name} holds blocks that nothing touches"
        self._check_progress(name)

    def _check_progress(self, name: str) -> None:
        """Raise AssertionError unless the computed and launched tokens agree with the stage."""
        match self.stage:
            case Stage.PREFILLING:
                assert self.num_remaining > 0, f"{name} has nothing to compute"
            case Stage.DECODING:
                assert self.decodes_here, f"{name} was to be handed out"
                assert self.num_unplanned <= 1, f"{name} has {self.num_unplanned} tokens to compute"
            case Stage.OFFERED:
                assert not self.decodes_here and self.num_remaining == 0, f"{name} isn't computed"


def _sample_spec(
    sampling: SamplingParams,
    features: FeatureStates | None,
    token_ids: TokenIds,
    num_prompt_tokens: int,
    position: int,
) -> SampleSpec:
    """Return the draw of the token at ``position``."""
    return SampleSpec(
        sampling.draw_temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.seed,
        sampling.choice,
        position,
        None if features is None else features.use(sampling, token_ids, num_prompt_tokens, position),
        sampling.logprobs,
    )


_WITHOUT_BLOCKS = frozenset({Stage.NEW, Stage.UNGRANTED, Stage.UNADMITTED})
_WITH_BLOCKS = frozenset({Stage.PULLING, Stage.PREFILLING, Stage.DECODING})
_WITHOUT_STEPS = _WITHOUT_BLOCKS | {Stage.PULLING, Stage.QUEUED, Stage.OFFERED}
_ON_OFFER = frozenset({Stage.OFFERED, Stage.ENDED, Stage.RELEASED})
