"""What a request wants besides the text of its output."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WantedScores:
    """What a request wants besides its output's text."""

    logprobs: int | None = None  # alternatives of each output token; None: no log-probabilities
    prompt_logprobs: int | None = None  # likewise of the prompt, as the extension of that name
    echo: bool = False
    hides_output: bool = False  # max_tokens is 0: the one token that a worker draws isn't shown

    @property
    def is_neutral(self) -> bool:
        return self == WantedScores()

    @property
    def of_prompt(self) -> int | None:
        """The number of alternatives that workers compute of the prompt's tokens; None: nothing of them is wanted."""
        echoed = self.logprobs if self.echo else None
        wanted = [number for number in (echoed, self.prompt_logprobs) if number is not None]
        return max(wanted, default=None)
