"""Ways to draw tokens that ``splitserve bench engine`` compares: requests' sampling parameters, used as in workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """The parameters of every request of a step."""

    name: str
    params: SamplingParams
    has_features: bool = False

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


def sampling_modes(names: Sequence[str], vocab_size: int, model_dir: Path) -> dict[str, SamplingMode]:
    """Return modes by name; for a grammar, write its tokenizer to ``model_dir``."""
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    modes = {
        GREEDY: SamplingMode(GREEDY, _params()),
        "top-p": SamplingMode("top-p", _params(temperature=0.8, top_p=0.95, top_k=50)),
        "logprobs": SamplingMode("logprobs", _params(logprobs=_NUM_TOP_LOGPROBS)),
        "penalties": SamplingMode("penalties", _params(**penalties), has_features=True),
    }
    return {name: modes[name] if name in modes else _json_mode(vocab_size, model_dir) for name in names}


def _json_mode(vocab_size: int, model_dir: Path) -> SamplingMode:
    """Return the mode of a JSON schema. What it imports may be missing on a machine that measures other modes."""
    from llguidance import LLMatcher

    from splitserve.benchmarks.engine.sampling_costs import write_vocabulary

    write_vocabulary(model_dir, vocab_size)
    constraint = Constraint(LLMatcher.grammar_from_json_schema(_SCHEMA), (vocab_size - 2, vocab_size - 1))
    return SamplingMode("json", _params(constraint=constraint), has_features=True)


NAMES = (GREEDY, "top-p", "logprobs", "penalties", "json")


def _params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1 << 20, **{"temperature": 0.0, **fields})
