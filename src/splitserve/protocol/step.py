"""Plans and results of a model runner's steps: plain data, without torch, so that schedulers stay pure.

They are structs rather than dataclasses, and untracked by the garbage collector, since a step makes two for each of its
sequences.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from splitserve.protocol.messages.logprobs import Logprobs
from splitserve.protocol.request import SamplingParams

MAX_STEPS_IN_FLIGHT = 2
"""One that the device runs, and the next one, so that the device needn't wait for it."""

UNKNOWN_TOKEN = -1
"""The placeholder of a token that a step in flight will draw."""


class FeatureStart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All that the states of a sequence's sampling features are made from."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


class FeatureUse(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The states of a sequence's sampling features, which the runner keeps from draw to draw.

    ``start`` is set if the runner has no states yet, or those of another output: it makes them anew. Otherwise they
    know all tokens but the last one, which the draw before has chosen.
    """

    state_id: int
    start: FeatureStart | None = None


class SampleSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The parameters for drawing the token after a chunk's last position.

    The draw is keyed by (seed, choice, position), so it doesn't depend on the worker, the batch or the attempt.
    ``position`` is the index, in the whole sequence, of the token to be drawn. ``features`` is None if the request
    wants no sampling feature.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int
    choice: int
    position: int
    features: FeatureUse | None = None
    num_top_logprobs: int | None = None  # alternatives in the drawn token's log-probabilities; None: not wanted


class ScoredTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Prompt tokens whose log-probabilities a chunk computes. Row ``first_row + i`` of the chunk, its token's logits,
    gives that of ``token_ids[i]``, which stands one position further on."""

    num_top: int
    first_row: int
    token_ids: Sequence[int]


class ChunkTable(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The blocks of one group that a chunk reads or writes: those of the tokens from ``first_number`` blocks on."""

    first_number: int
    block_ids: Sequence[int]


class BlockCopy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A copy of one block's content to another block of the same group."""

    group: int
    source: int
    target: int


class ScheduledChunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Part of one sequence to compute in one step: a prefill chunk, or one decode token.

    ``token_ids`` stand at positions ``start .. start + len(token_ids) - 1``; the KV of positions below ``start`` is
    in ``block_ids`` already. ``block_ids`` is the block table that covers all positions up to the chunk's end. It is
    the first group's; :meth:`table` has that of each group.
    ``sample`` is None for a chunk that doesn't end the known tokens.
    ``previous_chunk``, if not None, is the chunk of the step planned just before this one that draws this chunk's only
    token: it isn't known yet, and ``token_ids`` holds :data:`UNKNOWN_TOKEN` instead.
    ``gates`` are the ids of copies into the blocks that the device has to wait for. The copied content may turn out to
    be wrong.
    ``others`` are draws of the prompt's other choices, from 1 on, from the same logits as ``sample``.
    ``copies`` are made before any KV of the step is written.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    sample: SampleSpec | None
    previous_chunk: int | None = None
    gates: tuple[int, ...] = ()
    other_tables: tuple[ChunkTable, ...] = ()  # of the groups after the first
    scored: ScoredTokens | None = None
    others: tuple[SampleSpec, ...] = ()
    copies: tuple[BlockCopy, ...] = ()

    def table(self, group: int) -> ChunkTable:
        """Return the table of a group. Position ``p`` is in block ``p // block_size - first_number`` of it; that of a
        window group begins with the first position that the chunk's first token attends to."""
        return self.other_tables[group - 1] if group else ChunkTable(0, self.block_ids)


class StepPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step: decode tokens first, prefill chunks after them.

    ``released``: states of sampling features that no later step uses (:attr:`FeatureUse.state_id`).
    """

    chunks: Sequence[ScheduledChunk]
    released: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum([len(chunk.token_ids) for chunk in self.chunks])

    @property
    def are_decodes(self) -> list[bool]:
        """Flags of the chunks that decode: of a single token, after others, that draws the next one. A property of each
        chunk would take twice as long."""
        return [len(each.token_ids) == 1 and each.start > 0 and each.sample is not None for each in self.chunks]

    @property
    def gates(self) -> tuple[int, ...]:
        """The gates of all chunks."""
        return tuple([copy_id for chunk in self.chunks for copy_id in chunk.gates])


class Draw(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The tokens that a chunk drew, for the positions behind its last one. Today that is a single token."""

    token_ids: tuple[int, ...]
    logprobs: Logprobs | None = None  # of each token; None: not wanted
    error: str = ""  # why the request can't draw a token, and fails; "": it can
    others: tuple["Draw", ...] = ()  # those of the prompt's other choices, from 1 on, where they were drawn with it

    @property
    def token_id(self) -> int:
        """The only token. Raises ValueError if there are several."""
        (token_id,) = self.token_ids
        return token_id


def draws_of(chunks: Sequence[ScheduledChunk]) -> list[tuple[int, SampleSpec]]:
    """Return the draws of a step in the order of their results, each with its chunk's index: one for each chunk that
    draws, then those of other choices."""
    own = [(index, chunk.sample) for index, chunk in enumerate(chunks) if chunk.sample is not None]
    return own + [(index, spec) for index, chunk in enumerate(chunks) for spec in chunk.others]


class StepOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Results of a step: a draw per chunk of the plan, in its order; None where the chunk asked for none.

    ``scores``: log-probabilities of each chunk's :class:`ScoredTokens`, by the chunk's index.
    """

    draws: Sequence[Draw | None]
    scores: Mapping[int, Logprobs] = {}

    @classmethod
    def of(cls, token_ids: Sequence[int | None]) -> "StepOutput":
        """Return the results of a step whose chunks drew these tokens, at most one each."""
        return cls([None if token_id is None else Draw((token_id,)) for token_id in token_ids])

    @property
    def token_ids(self) -> list[int | None]:
        """The token of each chunk. Raises ValueError if one drew several."""
        return [None if draw is None else draw.token_id for draw in self.draws]


class LaunchedStep(Protocol):
    """A step that the device runs, or is about to."""

    @property
    def queued_at(self) -> float:
        """The time by the monotonic clock at which the device had the step's forward pass; its draws are queued while
        that runs."""

    def wait(self) -> StepOutput:
        """Return what the step drew, once it has completed."""


class LaunchingRunner(Protocol):
    """A runner whose device runs steps by itself, one after the other."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue a step behind those that were launched before, and return at once: only a draw that needs the token
        before it on the host waits for the step that draws that one, while the device computes the logits."""


class LaunchedForward(Protocol):
    """A step whose forward pass is queued, and whose draws aren't."""

    def launch_draws(self) -> LaunchedStep:
        """Queue the draws, before anything else is launched."""


@runtime_checkable
class TwoPartRunner(LaunchingRunner, Protocol):
    """A launching runner that can queue a forward pass in a fraction of a millisecond, or a little more with many long
    contexts: the engine loop does so itself, since another thread would have to wake up, and to share the interpreter
    with it."""

    def launch_forward(self, plan: StepPlan) -> LaunchedForward | None:
        """Queue a step's forward pass behind what was launched before; return None, without an effect, if that might
        take longer."""

    def rehearse(self) -> None:
        """Prepare a step like the last one, for nothing: the next launch then finds code and data in the core's
        caches."""
