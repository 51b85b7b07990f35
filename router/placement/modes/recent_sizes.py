"""Sizes and rate of recent requests. Pure."""

import math

from splitserve.router.placement.policies import USUAL_OUTPUT_TOKENS

OUTPUT_WEIGHT = 0.05
"""Least weight of an output in the mean length of recent ones. The first ones count equally."""
GUESS_OUTPUTS = 4
"""Outputs that the guess counts as: a few short ones, as of health checks, don't decide the mean."""
PROMPT_WEIGHT = 0.02
"""Least weight of a prompt in the means of recent ones."""
RATE_SECONDS = 5.0
"""Time after which a request counts 1/e in the rate."""


class RecentSizes:
    """Means over recent requests, in tokens; the newer ones count more.

    ``prompt``: of prompts; ``computed``: of what of them no worker had; ``computed_square``: its square; ``output``: of
    outputs.
    """

    def __init__(self) -> None:
        self.prompt = self.computed = self.computed_square = 0.0
        self.output = USUAL_OUTPUT_TOKENS
        self.num_prompts = 0
        self._num_outputs = GUESS_OUTPUTS
        self._count, self._counted_at = 0.0, 0.0  # requests, each by its age

    @property
    def long(self) -> float:
        """Computed tokens of long prompts: of the prompt that a computed token is in, on average."""
        return self.computed_square / self.computed if self.computed else 0.0

    def note_prompt(self, num_tokens: int, num_matched: int, now: float) -> None:
        """Take a request that begins into account: its prompt, of which its worker has ``num_matched`` tokens."""
        computed = max(1, num_tokens - num_matched)
        self.num_prompts += 1
        weight = max(PROMPT_WEIGHT, 1.0 / self.num_prompts)
        self.prompt += weight * (num_tokens - self.prompt)
        self.computed += weight * (computed - self.computed)
        self.computed_square += weight * (computed * computed - self.computed_square)
        self._count, self._counted_at = self._count_at(now) + 1.0, now

    def note_output(self, num_tokens: int) -> None:
        """Take the length of a finished output into account."""
        self._num_outputs += 1
        self.output += max(OUTPUT_WEIGHT, 1.0 / self._num_outputs) * (num_tokens - self.output)

    def rate(self, now: float) -> float:
        """Return the requests per second that began of late: :data:`RATE_SECONDS` after a load's begin 0.63 of its
        rate."""
        return self._count_at(now) / RATE_SECONDS

    def _count_at(self, now: float) -> float:
        return self._count * math.exp(-max(0.0, now - self._counted_at) / RATE_SECONDS)
