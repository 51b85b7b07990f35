"""The test at a start: packed random prompts through our attention, against transformers' ``generate`` alone.

It runs on the CPU in float32, on a small random copy of the config (:mod:`.small_copy`): a model whose attention looks
right but depends on more than its arguments, or whose tokens see each other elsewhere, fails.
"""

import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from splitserve.common.errors import CheckpointError
from splitserve.kernels.registry import select_kernels
from splitserve.models.config import ModelConfig
from splitserve.models.runner.runner import ModelRunner
from splitserve.models.transformers_backend.interface import PAGED
from splitserve.models.transformers_backend.model import TransformersModel
from splitserve.models.transformers_backend.small_copy import make_small_copy
from splitserve.protocol.step import SampleSpec, ScheduledChunk

logger = logging.getLogger(__name__)

LENGTHS = (5, 21, 1, 11)
NUM_NEW_TOKENS = 3
CHUNK = 9
BLOCK_SIZE = 4
TOLERANCE = 2e-3
"""Largest difference of logits, as a part of the largest logit: rounding makes 1e-5 of it, mistakes make most of it."""
_MIN_LAYERS, _MAX_LAYERS = 2, 12

Describe = Callable[[Any], ModelConfig]
"""A function that returns our config of a config of transformers."""


def check_small_copy(model_class: Any, config: Any, served: ModelConfig, describe: Describe) -> None:
    """Raise :class:`CheckpointError` unless a small copy of the model computes here what it computes alone.

    ``served``: our config of ``config``.
    """
    small, model = make_small_copy(model_class, config, _num_layers(served), PAGED)
    chosen = random.Random(0)
    prompts = [[chosen.randrange(1, small.get_text_config().vocab_size) for _ in range(length)] for length in LENGTHS]
    try:
        ours_config = describe(small)
        answers = [_generated(model, prompt) for prompt in prompts]
        ours = _packed(ours_config, model, prompts, [tokens for tokens, _ in answers])
    except CheckpointError:
        raise
    except Exception as error:
        logger.debug("the test of a small copy failed", exc_info=error)
        raise CheckpointError(_refusal(f"{type(error).__name__}: {str(error)[:300]}")) from error
    for prompt, (_, expected), found in zip(prompts, answers, ours, strict=True):
        difference = float((found - expected).abs().max()) / max(float(expected.abs().max()), 1e-30)
        if not difference <= TOLERANCE:
            raise CheckpointError(
                _refusal(f"logits after {len(prompt)} tokens differ from those of generate by {difference:.1%}")
            )


def _refusal(why: str) -> str:
    return (
        "config.json: the architecture can't be served through transformers: a small random copy of it doesn't "
        f"compute the same beside other sequences as alone ({why})"
    )


def _num_layers(served: ModelConfig) -> int:
    """Return how many of the first layers have all kinds of attention."""
    kinds = [served.layer(index) for index in range(served.num_layers)]
    needed = next(count for count in range(1, len(kinds) + 1) if set(kinds[:count]) == set(kinds))
    return min(max(needed, _MIN_LAYERS), _MAX_LAYERS, served.num_layers)


def _generated(model: Any, prompt: list[int]) -> tuple[list[int], Tensor]:
    """Return the tokens that the model draws after a prompt, by its own attention, and their logits."""
    import transformers

    model.set_attn_implementation("eager")
    try:
        result = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
            generation_config=transformers.GenerationConfig(
                do_sample=False,
                max_new_tokens=NUM_NEW_TOKENS,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            ),
        )
    finally:
        model.set_attn_implementation(PAGED)
    return result.sequences[0, len(prompt) :].tolist(), torch.cat(result.logits)


def _packed(config: ModelConfig, model: Any, prompts: Sequence[list[int]], drawn: Sequence[list[int]]) -> list[Tensor]:
    """Return the logits of ``drawn`` after each prompt, in chunks, all sequences in the same steps."""
    device = torch.device("cpu")
    ours = TransformersModel(config, model, select_kernels(device, torch.float32), dtype=torch.float32, device=device)
    texts = [prompt + tokens[:-1] for prompt, tokens in zip(prompts, drawn, strict=True)]
    blocks_each = -(-max(map(len, texts)) // BLOCK_SIZE)
    shape = (blocks_each * len(texts), *config.block_shape(BLOCK_SIZE))
    runner = ModelRunner(ours, torch.full(shape, torch.nan))  # NaN: what is read without having been written shows
    computed = [0] * len(texts)
    logits: list[list[Tensor]] = [[] for _ in texts]
    while any(count < len(text) for count, text in zip(computed, texts, strict=True)):
        chunks: list[ScheduledChunk] = []
        indices: list[int] = []
        for index, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
            start = computed[index]
            end = min(start + CHUNK, len(prompt)) if start < len(prompt) else min(start + 1, len(text))
            if start == end:
                continue
            spec = SampleSpec(0.0, 0, 1.0, 0, 0, end) if end >= len(prompt) else None
            blocks = range(index * blocks_each, (index + 1) * blocks_each)
            chunks.append(ScheduledChunk(text[start:end], start, blocks, spec))
            computed[index] = end
            if spec is not None:
                indices.append(index)
        found = runner.logits(chunks)
        for index, row in zip(indices, [] if found is None else found, strict=True):
            logits[index].append(row)
    return [torch.stack(rows) for rows in logits]
