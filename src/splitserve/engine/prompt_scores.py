"""The log-probabilities of a prompt's tokens that a worker has still to compute. Pure."""

from dataclasses import dataclass

from splitserve.protocol.request import SamplingParams
from splitserve.protocol.step import ScheduledChunk, ScoredTokens
from splitserve.protocol.token_ids import TokenIds


@dataclass(slots=True)
class PromptScores:
    """Progress of one sequence. The router keeps what it was sent, so a preempted sequence goes on where it was."""

    num_top: int
    next_position: int  # of the first token whose log-probability wasn't sent; the first of a prompt has none
    num_prompt_tokens: int

    @classmethod
    def of(cls, sampling: SamplingParams, num_prompt_tokens: int) -> "PromptScores | None":
        """Return the progress of a new sequence; None if its request wants no log-probabilities of the prompt."""
        if sampling.prompt_logprobs is None:
            return None
        return cls(sampling.prompt_logprobs, max(1, sampling.prompt_logprobs_start), num_prompt_tokens)

    @property
    def max_reused_tokens(self) -> int | None:
        """The number of leading tokens whose KV may come from a cache, as their logits aren't needed; None: all."""
        return self.next_position - 1 if self.next_position < self.num_prompt_tokens else None

    def wanted(self, token_ids: TokenIds, start: int, end: int) -> ScoredTokens | None:
        """Return the tokens that a chunk of the positions ``start`` to ``end - 1`` scores; None if there are none."""
        first = max(start + 1, self.next_position)
        scored = token_ids[first : min(end + 1, self.num_prompt_tokens)]
        return ScoredTokens(self.num_top, first - 1 - start, list(scored)) if scored else None

    def note(self, chunk: ScheduledChunk) -> None:
        """Note that a chunk's log-probabilities were sent."""
        assert chunk.scored is not None
        first = chunk.start + chunk.scored.first_row + 1
        assert first == self.next_position, f"token {first} is scored after token {self.next_position - 1}"
        self.next_position = first + len(chunk.scored.token_ids)
