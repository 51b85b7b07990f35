"""Requests with sampling features, and the greedy tokens that transformers draws with its processors. Not a test
module."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.generation import logits_process as processors

from serving import NEAR_TIE, Reference
from small_clusters import MAX_TOKENS
from splitserve.router.text.feature_values import bad_word_ids
from splitserve.router.text.tokenizer import ModelTokenizer

NUM_PROMPTS = 7


@dataclass(frozen=True)
class FeatureRequest:
    prompt: list[int]
    options: dict[str, Any]  # fields of the body
    reference: Reference


class OutputPenalties(processors.LogitsProcessor):
    """Presence and frequency penalties as in OpenAI's API, which transformers doesn't have."""

    def __init__(self, num_prompt_tokens: int, presence: float, frequency: float) -> None:
        self.num_prompt_tokens, self.presence, self.frequency = num_prompt_tokens, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(input_ids[0, self.num_prompt_tokens :], minlength=scores.shape[1])
        return scores - self.frequency * counts - self.presence * (counts > 0)


def feature_requests(model_path: Path, prompts: Sequence[list[int]]) -> list[FeatureRequest]:
    """Each feature alone, and most of them together, with prompts that are not long."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    tokenizer = ModelTokenizer(model_path)
    made = []
    for index, prompt in enumerate(prompts[1 : 1 + NUM_PROMPTS]):
        plain = _generate(model, prompt, [])
        options = _options(index, plain.token_ids, tokenizer)
        chosen = _processors(options, len(prompt), tokenizer)
        made.append(FeatureRequest(prompt, options, _generate(model, prompt, chosen, options.get("stop_token_ids"))))
    return made


def _options(index: int, plain: list[int], tokenizer: ModelTokenizer) -> dict[str, Any]:
    """Options of one request, which the plain tokens of its prompt make effective."""
    text = tokenizer.detokenizer()
    words = [word for word in map(text.push, [[token] for token in plain]) if word.strip().isascii() and word.strip()]
    alone: list[dict[str, Any]] = [
        {"repetition_penalty": 1.6},
        {"presence_penalty": 1.5, "frequency_penalty": 0.75},
        {"logit_bias": {str(plain[0]): -100, str(plain[5]): 2.5, str(plain[9]): -1}},
        {"bad_words": sorted(set(words[:8]))},
        {"min_tokens": 12, "stop_token_ids": [plain[2], plain[4]]},
        {"allowed_token_ids": list(range(plain[0] % 7, 1500, 7))},
    ]
    return alone[index] if index < len(alone) else alone[0] | alone[1] | alone[2] | alone[3] | alone[4]


def _processors(options: dict[str, Any], num_prompt_tokens: int, tokenizer: ModelTokenizer) -> list[Any]:
    """Return transformers' logits processors for the options, in its order."""
    made: list[Any] = []
    if biases := options.get("logit_bias"):
        pairs = [[[int(token)], float(bias)] for token, bias in biases.items()]
        made.append(processors.SequenceBiasLogitsProcessor(pairs))
    if penalty := options.get("repetition_penalty"):
        made.append(processors.RepetitionPenaltyLogitsProcessor(penalty))
    if "presence_penalty" in options:
        penalties = options["presence_penalty"], options["frequency_penalty"]
        made.append(OutputPenalties(num_prompt_tokens, *penalties))
    if words := options.get("bad_words"):
        ids = [list(word) for word in bad_word_ids(words, tokenizer)]
        made.append(processors.NoBadWordsLogitsProcessor(ids))
    if count := options.get("min_tokens"):
        stops = options["stop_token_ids"]
        made.append(processors.MinNewTokensLengthLogitsProcessor(num_prompt_tokens, count, stops))
    if allowed := options.get("allowed_token_ids"):
        made.append(processors.PrefixConstrainedLogitsProcessor(lambda _batch, _ids: allowed, 1))
    return made


def _generate(model: Any, prompt: list[int], chosen: list[Any], stops: list[int] | None = None) -> Reference:
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        eos_token_id=stops,
        pad_token_id=0,
        logits_processor=processors.LogitsProcessorList(chosen),
        output_scores=True,
        return_dict_in_generate=True,
    )
    top = [scores[0].topk(2).values for scores in result.scores]
    ties = frozenset(index for index, pair in enumerate(top) if float(pair[0] - pair[1]) < NEAR_TIE)
    return Reference(result.sequences[0, len(prompt) :].tolist(), ties)
