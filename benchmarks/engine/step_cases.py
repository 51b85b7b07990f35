"""The cases of ``splitserve bench engine``: layers of the model; batches, contexts and prompts, as options."""

import argparse
from dataclasses import replace

from splitserve.benchmarks.common.arguments import not_negative, positive
from splitserve.models.config import ModelConfig


def add_cases(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--batch", type=positive, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--context", type=positive, nargs="*", default=[512, 1024, 2048, 8192])
    parser.add_argument(
        "--case", type=_case, nargs="*", default=[], metavar="BATCHxCONTEXT", help="decode cases beside their product"
    )
    parser.add_argument(
        "--mixed", type=_case, nargs="*", default=[], metavar="BATCHxTOKENS",
        help="steps of a batch, at each context, beside so many tokens of a prompt, after half of the context",
    )  # fmt: skip
    parser.add_argument("--prefill", type=positive, nargs="*", default=[512, 1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument(
        "--prefix",
        type=not_negative,
        default=0,
        metavar="TOKENS",
        help="tokens before each prefill whose KV exists already",
    )


def decode_cases(arguments: argparse.Namespace) -> list[tuple[int, int]]:
    """Return batch and context of each decode case: every batch with every context, and the others."""
    every = [*((batch, context) for batch in arguments.batch for context in arguments.context), *arguments.case]
    return list(dict.fromkeys(every))


def with_layers(config: ModelConfig, count: int | None) -> ModelConfig:
    """Return the model with its first ``count`` layers alone; None: all."""
    if count is None or count >= config.num_layers:
        return config
    return replace(config, num_layers=count, sliding_layers=tuple(i for i in config.sliding_layers if i < count))


def _case(text: str) -> tuple[int, int]:
    batch, _, context = text.partition("x")
    return positive(batch), positive(context)
