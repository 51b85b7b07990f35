"""Ways to draw tokens that ``splitserve bench engine`` compares: requests' sampling parameters, used as in workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llguidance import LLMatcher

from splitserve.benchmarks.engine.sampling_costs import write_vocabulary
from splitserve.protocol.request import SamplingParams
from splitserve.protocol.sampling_features import Constraint
from splitserve.protocol.step import FeatureStart, FeatureUse, SampleSpec

GREEDY = "greedy"
_NUM_TOP_LOGPROBS = 5
_SCHEMA = {
    "type": "array",
    "minItems": 1000,  # the text doesn't end while steps are timed
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "size": {"type": "integer"}, "kind": {"enum": ["a", "b"]}},
        "required": ["name", "size", "kind"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class SamplingMode:
    """The parameters of every request of a step, and whether its next token needs the last one on the host."""

    name: str
    params: SamplingParams
    has_features: bool = False
    waits: bool = False  # no step is launched before the last token is known

    def spec(self, sequence: int, position: int, prompt_ids: Sequence[int] | None) -> SampleSpec:
        """Return how a sequence's token at ``position`` is drawn; ``prompt_ids``: at its first draw."""
        params, use = self.params, None
        if self.has_features:
            use = FeatureUse(sequence, None if prompt_ids is None else FeatureStart(params, prompt_ids, []))
        return SampleSpec(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=sequence,
            choice=0,
            position=position,
            features=use,
            num_top_logprobs=params.logprobs,
        )


@dataclass(frozen=True, slots=True)
class SamplingModes:
    """All modes for a vocabulary, whose tokenizer :meth:`prepare` writes where one is needed."""

    vocab_size: int
    by_name: Mapping[str, SamplingMode] = field(init=False)

    def __post_init__(self) -> None:
        ends = (self.vocab_size - 2, self.vocab_size - 1)
        json_schema = Constraint(LLMatcher.grammar_from_json_schema(_SCHEMA), ends)
        penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
        modes = (
            SamplingMode(GREEDY, _params()),
            SamplingMode("top-p", _params(temperature=0.8, top_p=0.95, top_k=50)),
            SamplingMode("logprobs", _params(logprobs=_NUM_TOP_LOGPROBS)),
            SamplingMode("penalties", _params(**penalties), has_features=True),
            SamplingMode("json", _params(constraint=json_schema), has_features=True, waits=True),
        )
        object.__setattr__(self, "by_name", {mode.name: mode for mode in modes})

    def prepare(self, names: Sequence[str], directory: Path) -> None:
        """Write the tokenizer that grammars need to ``directory``."""
        if any(self.by_name[name].params.constraint is not None for name in names):
            write_vocabulary(directory, self.vocab_size)


NAMES = (GREEDY, "top-p", "logprobs", "penalties", "json")


def _params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1 << 20, **{"temperature": 0.0, **fields})
