"""Examples of every declared sampling parameter, drawn from its declaration. Not a test module."""

import atexit
import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from msgspec import inspect
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from splitserve.protocol.request import SamplingParams
from splitserve.protocol.sampling_features import SAMPLING_FEATURES, Constraint, FeatureParams

STOPS = tuple(range(0, 40, 4))
TYPES = {field.name: field.type for field in inspect.type_info(FeatureParams).fields}  # type: ignore[attr-defined]


def example_value(kind: inspect.Type, chance: random.Random, vocab_size: int) -> Any:
    """Return a value within the declared bounds; whole numbers are token ids unless their bounds are narrower."""
    match kind:
        case inspect.Metadata(type=inner):
            return example_value(inner, chance, vocab_size)
        case inspect.FloatType(ge=low, gt=above, le=high):
            least = above if low is None else low
            return chance.uniform(least or 0.0, min(high or 10.0, 10.0)) or 0.5
        case inspect.IntType(le=high, lt=below):
            return chance.randrange(1, min(vocab_size, *(bound for bound in (high, below) if bound is not None)))
        case inspect.BoolType():
            return True
        case inspect.VarTupleType(item_type=item):
            return tuple(example_value(item, chance, vocab_size) for _ in range(chance.randint(1, 4)))
        case inspect.UnionType(types=types) if Constraint in [getattr(each, "cls", None) for each in types]:
            words = ["".join(chance.choices("abcdefg", k=chance.randint(2, 6))) for _ in range(chance.randint(2, 5))]
            grammar = " | ".join(f'"{word}"' for word in words)
            return Constraint(f"start: ({grammar} | /[a-h]{{9}}/)+", (vocab_size - 1, vocab_size - 2))
        case inspect.DictType(key_type=key, value_type=value):
            pairs = range(chance.randint(1, 4))
            return {example_value(key, chance, vocab_size): example_value(value, chance, vocab_size) for _ in pairs}
    raise AssertionError(f"no example for {kind}")


def example_params(features: list[str], chance: random.Random, vocab_size: int, **others: Any) -> SamplingParams:
    """Return parameters with which each of the features is wanted."""
    names = [name for feature in features for name in SAMPLING_FEATURES[feature].params]
    values = {name: example_value(TYPES[name], chance, vocab_size) for name in names}
    return SamplingParams(
        **({"max_tokens": 100, "seed": chance.getrandbits(32), "stop_token_ids": STOPS} | values | others)
    )


@cache
def vocabulary(vocab_size: int) -> Path:
    """Return a directory, kept until the process ends, whose tokenizer.json has letters, pairs of them, and two special
    tokens."""
    directory = TemporaryDirectory()
    atexit.register(directory.cleanup)
    letters = "abcdefgh"
    texts = [*letters, *(one + other for one in letters for other in letters)][: vocab_size - 2]
    tokenizer = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(texts)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<pad>"])
    tokenizer.save(str(Path(directory.name) / "tokenizer.json"))
    return Path(directory.name)


def raw_logits(seed: int, position: int, vocab_size: int) -> Tensor:
    """Logits [vocab] of a model that knows a request's seed and the position alone."""
    generator = torch.Generator().manual_seed(seed * 1000 + position)
    return 2 * torch.randn(vocab_size, generator=generator)
