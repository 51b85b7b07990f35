"""Judgement of a sampled choice that differs from the undisturbed worker's: a near-tie, or a wrong token. Not a test
module.

The order in which a CPU adds depends on the batch, too. A token that differs is accepted if the draw, repeated in
float64 with all features of the request, falls on it when both scores move by less than :data:`NEAR_TIE`.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from splitserve.kernels.reference.sampling import sample
from splitserve.models.sampling.sampler import Sampler
from splitserve.protocol.request import SamplingParams
from splitserve.protocol.sampling_features import Constraint, wanted_features
from splitserve.protocol.step import FeatureStart, FeatureUse, SampleSpec, ScheduledChunk, StepPlan
from splitserve.router.http.schema import ChatCompletionRequest, CompletionRequest, GenerationRequest
from splitserve.router.output.catalog import AUTO, choose_format
from splitserve.router.text.chat import ChatForm
from splitserve.router.text.feature_values import feature_values
from splitserve.router.text.grammars import schema_text
from splitserve.router.text.structured_output import requested_grammar
from splitserve.router.text.tokenizer import ModelTokenizer
from storm_answers import ChoiceAnswer
from storm_requests import CHAT_TEMPLATE, StormCase

NEAR_TIE = 1e-5
_VARIABLES = frozenset({"messages", "tools", "enable_thinking"})


class StormReferee:
    """The checkpoint in float64, by transformers, and the sampler with its features."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tokenizer = ModelTokenizer(path)

    @cached_property
    def _model(self) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(self._path, dtype=torch.float64).eval()

    @torch.inference_mode()
    def problem(self, case: StormCase, number: int, choice: ChoiceAnswer, first: int) -> str:
        """Describe why the tokens of choice ``number`` from the position ``first`` on can't be drawn even with
        near-ties; "" if they can."""
        prompt, params = self._request(case, number)
        output = choice.token_ids
        logits = self._model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 :]
        for position in range(first, len(output)):
            token, row, before = output[position], logits[position], output[:position]
            expected = self._draw(row, prompt, before, params)
            if token == expected:
                continue
            nudged, off = row.clone(), NEAR_TIE / 2 * (params.temperature or 1.0)
            nudged[token] += off
            nudged[expected] -= off
            if self._draw(nudged, prompt, before, params) != token:
                return f"token {position} is {token} instead of {expected}, no near-tie"
        if choice.finish_reason == "length" and len(output) != params.max_tokens:
            return f"it ended {params.max_tokens - len(output)} tokens early"
        return ""

    def _draw(self, row: Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> int:
        """Draw the token after ``output`` from raw logits, with states of features that are made anew."""
        sampler = Sampler(sample, row.shape[0], torch.device("cpu"), self._path)
        use = FeatureUse(1, FeatureStart(params, prompt, output)) if wanted_features(params) else None
        position = len(prompt) + len(output)
        spec = SampleSpec(params.temperature, params.top_k, params.top_p, params.seed, params.choice, position, use)
        chunk = ScheduledChunk([(prompt + output)[-1]], position - 1, [0], spec)
        sampler.prepare(StepPlan([chunk]))
        return int(sampler.draw(row[None].clone(), [chunk])[0])

    def _request(self, case: StormCase, number: int) -> tuple[list[int], SamplingParams]:
        """Return the prompt and the parameters that the router makes of a body for choice ``number``."""
        request: GenerationRequest
        grammar = None
        if "prompt" in case.body:
            request, prompt = CompletionRequest.model_validate(case.body), case.body["prompt"]
            if requested := requested_grammar(request.response_format, request.structured_outputs):
                grammar = requested[0]
        else:
            request = ChatCompletionRequest.model_validate(case.body)
            text, grammar = self._chat(request)
            prompt = self._tokenizer.encode(text, add_special_tokens=False).ids
        return prompt, self._params(request, number, grammar)

    def _chat(self, request: ChatCompletionRequest) -> tuple[str, str | None]:
        """Return the text of a chat's prompt, and the grammar of its answer."""
        form = ChatForm(choose_format(AUTO, CHAT_TEMPLATE, None, self._path.name), _VARIABLES)
        renderer = transformers.AutoTokenizer.from_pretrained(self._path)
        text = renderer.apply_chat_template(
            form.messages(request),
            tools=form.tools(request),
            chat_template=CHAT_TEMPLATE,
            tokenize=False,
            **form.variables(request),
        )
        if requested := requested_grammar(request.response_format, request.structured_outputs):
            return text, form.after_reasoning(requested[0], text, self._tokenizer.added_ids)
        return text, form.forced_grammar(request, self._tokenizer.added_ids, text, schema_text)

    def _params(self, request: GenerationRequest, number: int, grammar: str | None) -> SamplingParams:
        ends = self._tokenizer.eos_token_ids
        assert request.max_tokens is not None and request.seed is not None
        features = feature_values(
            request, self._tokenizer, max_tokens=request.max_tokens, vocab_size=self._model.config.vocab_size
        )
        return SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature or 0.0,
            top_k=max(0, request.top_k or 0),
            top_p=1.0 if request.top_p is None else request.top_p,
            seed=request.seed,
            choice=number,
            stop_token_ids=tuple(dict.fromkeys((*ends, *(request.stop_token_ids or ())))),
            constraint=None if grammar is None else Constraint(grammar, tuple(ends)),
            **features,
        )
