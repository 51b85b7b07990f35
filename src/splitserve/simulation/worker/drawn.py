"""Results of a simulated step: tokens, and log-probabilities that depend on all KV that the step reads."""

from collections.abc import Callable, Sequence
from itertools import chain

import msgspec
import numpy as np

from splitserve.protocol.messages.logprobs import Logprobs
from splitserve.protocol.step import Draw, StepOutput, StepPlan
from splitserve.simulation.model import NUM_HEADS, score_of

ReadKV = Callable[[Sequence[int], int, int], list[int]]
"""Return the KV in these blocks of one head, of the positions before the last argument."""


class Drawn(list[Draw | None]):
    """The draw of each chunk, None where it draws none, and all log-probabilities that the plan asks for."""

    def __init__(self, plan: StepPlan) -> None:
        super().__init__([None] * len(plan.chunks))
        self._plan = plan
        self._of_prompts: dict[int, Logprobs] = {}

    def score(self, kv: ReadKV) -> None:
        """Compute the log-probabilities, once the tokens are drawn."""
        for index, chunk in enumerate(self._plan.chunks):

            def scores(first: int, tokens: Sequence[int], block_ids: Sequence[int] = chunk.block_ids) -> Logprobs:
                ends = range(first, first + len(tokens))
                rows = [list(chain(*(kv(block_ids, head, end) for head in range(NUM_HEADS)))) for end in ends]
                values = [[score_of(row, token)] for row, token in zip(rows, tokens, strict=True)]
                return Logprobs.of(np.array(values, np.float32), np.empty((len(tokens), 0), np.int32))

            draw, sample = self[index], chunk.sample
            if draw is not None and sample is not None and sample.num_top_logprobs is not None:
                end = chunk.start + len(chunk.token_ids)
                others = tuple(
                    msgspec.structs.replace(other, logprobs=scores(end, other.token_ids)) for other in draw.others
                )
                logprobs = scores(end, draw.token_ids)
                self[index] = msgspec.structs.replace(draw, logprobs=logprobs, others=others)
            if chunk.scored is not None:
                self._of_prompts[index] = scores(chunk.start + chunk.scored.first_row + 1, chunk.scored.token_ids)

    def output(self) -> StepOutput:
        """Return the step's output."""
        return StepOutput(self, self._of_prompts)
