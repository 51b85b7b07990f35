"""A prompt between its preparation and its answer."""

import msgspec

from splitserve.protocol.request import SamplingParams
from splitserve.protocol.token_ids import TokenIds
from splitserve.router.scores.choice_scores import ChoiceScores
from splitserve.router.text.choice import Choice


class Prompt(msgspec.Struct, frozen=True):
    """One choice of a prompt, ready to run, and the text side of its output. Choices of a prompt are adjacent."""

    token_ids: TokenIds
    sampling: SamplingParams
    choice: Choice
    num_choices: int = 1  # of the prompt
    scores: ChoiceScores | None = None  # None: neither log-probabilities nor the prompt's echo are wanted

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens that the client has got."""
        return 0 if self.scores is not None and self.scores.hides_output else self.choice.num_tokens
