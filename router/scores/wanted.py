"""The log-probabilities, token ids and echo that a request asks for."""

from typing import Any

import msgspec


class WantedScores(msgspec.Struct, frozen=True, gc=False):
    """A request's wishes besides the text of its output."""

    logprobs: int | None = None  # alternatives of each output token; None: no log-probabilities
    prompt_logprobs: int | None = None  # likewise of the prompt, as the extension of that name
    echo: bool = False
    as_ids: bool = False  # log-probabilities name tokens by their ids alone
    hides_output: bool = False  # max_tokens is 0: the one token that a worker draws isn't shown

    @property
    def is_neutral(self) -> bool:
        return self.logprobs is None and self.prompt_logprobs is None and not (self.echo or self.hides_output)

    @property
    def of_prompt(self) -> int | None:
        """The number of alternatives that workers compute of the prompt's tokens; None: nothing of them is wanted."""
        if not self.echo or self.logprobs is None:
            return self.prompt_logprobs
        return max(self.logprobs, self.prompt_logprobs or 0)

    def params(self, num_prompt_tokens: int) -> dict[str, Any]:
        """Return the parameters for workers, as fields of :class:`~splitserve.protocol.request.SamplingParams`."""
        if self.hides_output:
            # Without log-probabilities to compute, the prompt's last token stands for a request with nothing to decode.
            start = num_prompt_tokens if self.of_prompt is None else 1
            return {"prompt_logprobs": self.of_prompt or 0, "prompt_logprobs_start": start}
        return {"logprobs": self.logprobs, "prompt_logprobs": self.of_prompt}
