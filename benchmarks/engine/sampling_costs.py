"""``splitserve bench sampling``: processor time that sampling features add to a step, on this machine's CPU.

Steps of ``--batch`` sequences draw the likeliest tokens of random logits [batch, vocabulary], with the features that a
row of the table names; there is no model. The times are those of the whole draw without its last operation, the choice
of the likeliest tokens. "none" calls that operation alone, so that "off" shows what unused features cost. The rows take
turns, a step each; the figures are medians. On a GPU the device does the changes of the logits, which are part of the
times here.
"""

import argparse
import random
import string
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from splitserve.benchmarks.common.arguments import positive
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.kernels.sampling import SamplingBatch
from splitserve.models.sampling.sampler import Sampler, sampling_batch
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.protocol.request import SamplingParams
from splitserve.protocol.sampling_features import Constraint, wanted_features
from splitserve.protocol.step import FeatureStart, FeatureUse, SampleSpec, ScheduledChunk, StepPlan

SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "size": {"type": "integer"}, "kind": {"enum": ["a", "b"]}},
        "required": ["name", "size", "kind"],
        "additionalProperties": False,
    },
}
_NUM_PROMPT_TOKENS = 100
_NUM_LONG = 2000
_WARM_UP_STEPS = 20
_SPECIAL = ["<|endoftext|>", "<|im_end|>"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark that ``argv`` describes."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        write_vocabulary(Path(directory), options.vocab_size)
        end_token_ids = (options.vocab_size - 2, options.vocab_size - 1)
        loads: dict[str, _Load] = {"none": _Bare(Path(directory), options, {}, _NUM_PROMPT_TOKENS)}
        loads |= {
            name: _Load(Path(directory), options, fields, num_prompt_tokens)
            for name, (fields, num_prompt_tokens) in _cases(end_token_ids).items()
        }
        _run(loads.values(), options)
    for name, load in loads.items():
        rows.append({"features": name, "ms": 1e3 * median(load.seconds[_WARM_UP_STEPS:])})
    least = rows[0]["ms"]
    cells = [[row["features"], f"{row['ms']:.3f}", f"{row['ms'] - least:.3f}"] for row in rows]
    print(table(cells, ["features", "ms/step", "added"]))
    keep_result("sampling", arguments, {"results": rows}, options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="splitserve bench sampling", description=__doc__)
    parser.add_argument("--batch", type=positive, default=16, help="sequences of a step (default: %(default)s)")
    parser.add_argument("--vocab-size", type=positive, default=151_936, help="tokens (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=200, help="steps of each row (default: %(default)s)")
    add_result_options(parser)
    return parser


def _cases(end_token_ids: tuple[int, ...]) -> Mapping[str, tuple[dict[str, Any], int]]:
    """Return the sampling parameters and the length of the prompts of each row that has a sampler."""
    json_schema = Constraint(LLMatcher.grammar_from_json_schema(SCHEMA), end_token_ids)
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    return {
        "off": ({}, _NUM_PROMPT_TOKENS),
        "penalties": (penalties, _NUM_PROMPT_TOKENS),
        "penalties, long prompts": (penalties, _NUM_LONG),
        "logit_bias": ({"logit_bias": dict.fromkeys(range(100), 5.0)}, _NUM_PROMPT_TOKENS),
        "min_p": ({"min_p": 0.1}, _NUM_PROMPT_TOKENS),
        "JSON schema": ({"constraint": json_schema}, _NUM_PROMPT_TOKENS),
    }


class _Load:
    """Sequences with the same sampling parameters. ``seconds``: the processor time of each step so far."""

    def __init__(
        self, model_dir: Path, options: argparse.Namespace, fields: dict[str, Any], num_prompt_tokens: int
    ) -> None:
        self.seconds: list[float] = []
        self._params = SamplingParams(max_tokens=1 << 20, temperature=0.0, **fields)
        self._prompt = list(range(num_prompt_tokens))
        self._outputs: list[list[int]] = [[] for _ in range(options.batch)]
        self._sampler = Sampler(self._likeliest, options.vocab_size, torch.device("cpu"), model_dir)
        self._choice_seconds = 0.0  # processor time of the last choice of the likeliest tokens

    def step(self, logits: Tensor) -> None:
        """Draw a token for each sequence."""
        chunks = [self._chunk(number, output) for number, output in enumerate(self._outputs)]
        began = time.process_time()
        drawn = self._draw(logits, chunks)
        self.seconds.append(time.process_time() - began - self._choice_seconds)
        for output, token_id in zip(self._outputs, drawn.tolist(), strict=True):
            output.append(token_id)

    def _draw(self, logits: Tensor, chunks: list[ScheduledChunk]) -> Tensor:
        self._sampler.prepare(StepPlan(chunks))
        return self._sampler.draw(logits, chunks)

    def _likeliest(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        del batch
        began = time.process_time()
        drawn = logits.argmax(dim=-1)
        self._choice_seconds = time.process_time() - began
        return drawn

    def _chunk(self, number: int, output: list[int]) -> ScheduledChunk:
        position = len(self._prompt) + len(output)
        use = None
        if wanted_features(self._params):
            use = FeatureUse(number, None if output else FeatureStart(self._params, self._prompt, []))
        spec = SampleSpec(0.0, 0, 1.0, number, 0, position, use)
        return ScheduledChunk([output[-1] if output else self._prompt[-1]], position - 1, [0], spec)


class _Bare(_Load):
    """Sequences whose tokens are drawn without a sampler."""

    def _draw(self, logits: Tensor, chunks: list[ScheduledChunk]) -> Tensor:
        return self._likeliest(logits, sampling_batch([chunk.sample for chunk in chunks if chunk.sample is not None]))


def _run(loads: Collection[_Load], options: argparse.Namespace) -> None:
    """Let the loads take turns, on logits that differ from step to step."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((options.batch, options.vocab_size), generator=generator)
    for step in range(_WARM_UP_STEPS + options.steps):
        for load in loads:
            load.step(logits.roll(step, dims=1))


def write_vocabulary(model_dir: Path, vocab_size: int) -> None:
    """Write a tokenizer.json of bytes, words and runs of punctuation, two special tokens last."""
    chance = random.Random(0)
    tokens = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(tokens) < vocab_size - len(_SPECIAL):
        letters = string.ascii_lowercase if chance.random() < 0.85 else '{}[]":,.-_()/<>=+'
        word = "".join(chance.choices(letters, k=chance.randint(2, 9)))
        tokens[("Ġ" if chance.random() < 0.5 else "") + word] = None
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_SPECIAL)
    tokenizer.save(str(model_dir / "tokenizer.json"))
