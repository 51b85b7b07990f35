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
LONGER_BY = 128
"""Above the fixed number, prompt tokens grow by this many: the rows of one tile of a GPU's products. (320 tokens and 64
sequences fill three tiles.)"""
LEAST_SHARE = 0.4
"""Share of a decode step that prompts get where the objective leaves less: else they would pile up while outputs alone
use it up, and miss their own objective as well."""


def sized_tokens(model: StepModel, decode_seconds: float, start: int, objective: float, bounds: tuple[int, int]) -> int:
    """Return the prompt tokens, from position ``start`` of a prompt on, for which an objective (seconds) leaves time
    beside sequences whose step alone takes ``decode_seconds``: at least one. ``bounds``: as :class:`ChunkBounds`.

    Beyond the first bound they grow by :func:`longer_by`: GPUs have CUDA graphs for these numbers.
    """
    fixed, most = bounds
    seconds, least = OBJECTIVE_SHARE * objective - decode_seconds, LEAST_SHARE * decode_seconds
    tokens = model.prompt_tokens_within(seconds if seconds > least else least, start)
    tokens = tokens if tokens < most else most
    if tokens > fixed > 0:
        tokens -= (tokens - fixed) % longer_by(fixed)
    return tokens if tokens > 1 else 1


def longer_by(fixed: int) -> int:
    """Return :data:`LONGER_BY`, or half of a small fixed number."""
    return LONGER_BY if fixed >= 2 * LONGER_BY else fixed // 2 or 1


class ChunkBounds(NamedTuple):
    """Bounds of a worker's steps that decode: ``fixed`` prompt tokens without an objective, ``most`` with one."""

    fixed: int
    most: int

    def tokens(self, model: StepModel, decode_seconds: float, start: int, objective: float) -> int:
        """Return the most prompt tokens, as :func:`sized_tokens`; ``objective`` is 0.0 if there is none. A model that
        knows nothing of prompts sizes nothing."""
        if not objective or not model.per_token:
            return self.fixed
        return sized_tokens(model, decode_seconds, start, objective, self)
