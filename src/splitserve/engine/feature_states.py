"""The states of a sequence's sampling features on the runner, as the engine sees them: an id and a position."""

import itertools
from dataclasses import dataclass

from splitserve.protocol.request import SamplingParams
from splitserve.protocol.sampling_features import wanted_features
from splitserve.protocol.step import FeatureStart, FeatureUse
from splitserve.protocol.token_ids import TokenIds

_state_ids = itertools.count(1)
_NO_POSITION = -1


@dataclass(slots=True)
class FeatureStates:
    """States of one sequence. They are made from its ids when it first draws here, and again after a draw that didn't
    count or a release."""

    state_id: int
    next_position: int = _NO_POSITION  # of the draw that the runner's states are ready for

    @classmethod
    def of(cls, sampling: SamplingParams) -> "FeatureStates | None":
        """Return the states that a request's draws need; None if it wants no feature."""
        return cls(next(_state_ids)) if wanted_features(sampling) else None

    def use(self, sampling: SamplingParams, token_ids: TokenIds, num_prompt_tokens: int, position: int) -> FeatureUse:
        """Return the features' part of a draw at ``position``."""
        if self.next_position == position:
            return FeatureUse(self.state_id)
        assert position == len(token_ids), "states are to be made of a token that isn't known"
        prompt_ids, output_ids = list(token_ids[:num_prompt_tokens]), list(token_ids[num_prompt_tokens:])
        return FeatureUse(self.state_id, FeatureStart(sampling, prompt_ids, output_ids))

    def release(self) -> int:
        """Return the id, for a runner that gives the states up; a later draw makes them anew."""
        self.next_position = _NO_POSITION
        return self.state_id
