"""Requests with random mixes of all registered sampling features, for the simulator. Not a test module."""

import random
from functools import cache
from typing import Any

import msgspec

from feature_examples import example_params
from splitserve.protocol.request import SamplingParams
from splitserve.protocol.sampling_features import SAMPLING_FEATURES
from splitserve.simulation.model import VOCAB
from splitserve.simulation.sampled_model import SampledModel
from storm_texts import calls_constraint, schema_constraint
from storm_vocabulary import chat_vocabulary

NUM_TOKENS = (1, 2, 6, 12, 20, 30, 36)


@cache
def sampled_model() -> SampledModel:
    """The model, with a tokenizer that is kept until the process ends."""
    return SampledModel(chat_vocabulary())


def random_params(chance: random.Random) -> SamplingParams:
    """A tenth wants no feature, a tenth all of them, the others a random mix."""
    share = chance.choice([0.0, 0.2, 0.2, 0.2, 0.3, 0.3, 0.5, 0.5, 0.5, 1.0])
    features = [name for name in SAMPLING_FEATURES if chance.random() < share]
    max_tokens = chance.choice(NUM_TOKENS)
    stops = chance.sample(range(VOCAB), chance.choice([0, 1, 3]))
    others: dict[str, Any] = {
        "max_tokens": max_tokens,
        "seed": chance.getrandbits(chance.choice([8, 64])),
        "temperature": chance.choice([0.0, 0.0, 0.7, 1.0, 1.5]),
        "top_k": chance.choice([0, 0, 5, 20]),
        "top_p": chance.choice([1.0, 1.0, 0.9, 0.5]),
    }
    params = example_params(features, chance, VOCAB, **others)
    if params.constraint is not None:
        make = chance.choice([None, calls_constraint, calls_constraint, schema_constraint])
        if make is not None:
            max_tokens = chance.choice([max_tokens, NUM_TOKENS[-1], NUM_TOKENS[-1]])
            params = msgspec.structs.replace(params, constraint=make(chance), max_tokens=max_tokens)
    # A text ends with the end tokens of its grammar, as the router has it.
    ends = () if params.constraint is None else params.constraint.end_token_ids
    values: dict[str, Any] = {name: getattr(params, name) for name in params.__struct_fields__}
    values["stop_token_ids"] = tuple(dict.fromkeys((*stops, *ends)))
    if params.min_tokens:
        values["min_tokens"] = chance.randint(1, max_tokens)
    return SamplingParams(**values)
