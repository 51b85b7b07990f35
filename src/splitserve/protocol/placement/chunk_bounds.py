"""Prompt tokens of a step that also decodes. Pure; workers plan steps with it, the router predicts them.

Sequences that decode wait for the prompts of their step. With an objective for the gaps between their tokens, prompts
get the time that it leaves, by the worker's own model of its steps: many tokens beside few sequences, fewer where a
token attends to many. Without an objective their number is fixed.
"""

from typing import NamedTuple

from splitserve.protocol.placement.step_model import StepModel

OBJECTIVE_SHARE = 0.85
"""Share of the objective that a step may take by its model. The rest is for steps that take longer, and for the way to
the client."""
LEAST_SHARE = 0.4
"""Share of a decode step that prompts get where the objective leaves less: else they would pile up while outputs alone
use it up, and miss their own objective as well."""


class ChunkBounds(NamedTuple):
    """Bounds of a worker's steps that decode: ``fixed`` prompt tokens without an objective, ``most`` with one."""

    fixed: int
    most: int

    def tokens(self, model: StepModel, decode_seconds: float, start: int, objective: float) -> int:
        """Return the most prompt tokens beside sequences whose step alone takes ``decode_seconds``.

        ``start``: the position of the first of these tokens in its prompt; ``objective``: seconds between tokens, 0.0
        for none. A model that knows nothing of prompts bounds nothing.
        """
        if not objective or not model.per_token:
            return self.fixed
        seconds = max(OBJECTIVE_SHARE * objective - decode_seconds, LEAST_SHARE * decode_seconds)
        return min(max(model.prompt_tokens_within(seconds, start), 1), self.most)
