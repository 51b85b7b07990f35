"""Preparation of prompts from a validated body: chat template, tokenisation, limits, sampling parameters."""

import asyncio
import secrets
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from splitserve.protocol.request import SamplingParams
from splitserve.protocol.token_ids import TokenIds, highest
from splitserve.router.http.answers import Prompt
from splitserve.router.http.api_error import ApiError
from splitserve.router.http.schema import ChatCompletionRequest, CompletionRequest, GenerationRequest
from splitserve.router.placement.placer import Limits
from splitserve.router.scores.choice_scores import ChoiceScores
from splitserve.router.scores.forms import ChatLogprobs, CompletionLogprobs, LogprobsForm
from splitserve.router.text.chat_template import ChatTemplateError
from splitserve.router.text.choice import Choice
from splitserve.router.text.feature_values import feature_values
from splitserve.router.text.renderer import Renderer, RendererBusyError
from splitserve.router.text.tokenizer import ModelTokenizer

# Tokenising so few characters costs no more than a hop to the pool and back.
MAX_INLINE_CHARS = 512
# A text with more characters per token of the context is tokenised in pieces first, to count its tokens: freeing the
# tokens of a whole long text at once would hold the interpreter.
ASCII_CHARS_PER_TOKEN = 6
OTHER_CHARS_PER_TOKEN = 2
PIECE_CHARS = 1 << 16
CUT_WORD_TOKENS = 512  # upper bound of the extra tokens of a word that is cut in two
DEFAULT_COMPLETION_TOKENS = 16
_TOKENIZER_THREADS = 2
MAX_PROMPT_SCORES = 1 << 20  # in one answer: each takes the router up to a hundred bytes of JSON

Result = TypeVar("Result")


class Preparation:
    """Preparation of prompts for one model. Methods raise :class:`ApiError` 400 that names the field at fault."""

    def __init__(self, tokenizer: ModelTokenizer, renderer: Renderer) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._pool = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenizer")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def completion(self, request: CompletionRequest, limits: Limits) -> list[Prompt]:
        prompts = []
        num_chars = sum(len(prompt) for prompt in request.prompts())  # many short prompts take as long as a long one
        for prompt in request.prompts():
            token_ids = await self._prompt_ids(prompt, limits, num_chars)
            room = _room(len(token_ids), limits.max_model_len, "prompt")
            max_tokens = _max_tokens(request.max_tokens, "max_tokens", len(token_ids), limits.max_model_len)
            if max_tokens is None:
                max_tokens = min(DEFAULT_COMPLETION_TOKENS, room)
            text = prompt if isinstance(prompt, str) else None
            prompts.append(self._prompt(request, token_ids, max_tokens, limits.vocab_size, text))
        _check_num_scores(request, prompts)
        return prompts

    async def chat(self, request: ChatCompletionRequest, limits: Limits) -> list[Prompt]:
        try:
            text = await self._renderer.render([message.for_template() for message in request.messages])
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages", code="chat_template_failed") from None
        except RendererBusyError as error:
            raise ApiError(503, str(error), code="overloaded") from None

        def encode() -> TokenIds:
            return self._encode(text, limits.max_model_len, "messages", add_special_tokens=False)

        token_ids = await self._run(encode, len(text))
        room = _room(len(token_ids), limits.max_model_len, "messages")
        if len(token_ids) < limits.common_model_len:
            # Up to the length that every worker can run, so that the load isn't all on the largest one.
            room = limits.common_model_len - len(token_ids)
        param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        wanted = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        max_tokens = _max_tokens(wanted, param, len(token_ids), limits.max_model_len)
        prompts = [self._prompt(request, token_ids, room if max_tokens is None else max_tokens, limits.vocab_size)]
        _check_num_scores(request, prompts)
        return prompts

    async def _prompt_ids(self, prompt: str | list[int] | TokenIds, limits: Limits, num_chars: int) -> TokenIds:
        """Return one prompt's token ids; ``num_chars`` counts the characters of all prompts of the request."""
        if not isinstance(prompt, str):
            _check_vocabulary(prompt, limits.vocab_size, "prompt")
            return array("i", prompt)
        return await self._run(
            lambda: self._encode(prompt, limits.max_model_len, "prompt", add_special_tokens=True), num_chars
        )

    def _encode(self, text: str, max_model_len: int, param: str, *, add_special_tokens: bool) -> TokenIds:
        """Return the token ids of a text. A hopelessly long text is refused by its beginning alone: tokenising all of
        it would block the tokenizer for other requests for many seconds, and its tokens take memory."""
        chars_per_token = ASCII_CHARS_PER_TOKEN if text.isascii() else OTHER_CHARS_PER_TOKEN
        if len(text) > chars_per_token * (max_model_len + CUT_WORD_TOKENS):
            self._refuse_hopeless(text, max_model_len, param)
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        _room(len(encoding), max_model_len, param)  # a list of millions would hold the interpreter
        return array("i", encoding.ids)

    def _refuse_hopeless(self, text: str, max_model_len: int, param: str) -> None:
        room = 2 * max_model_len
        for begin in range(0, len(text), PIECE_CHARS):
            num_tokens = len(self._tokenizer.encode(text[begin : begin + PIECE_CHARS], add_special_tokens=False))
            room -= max(0, num_tokens - CUT_WORD_TOKENS)
            if room < 0:
                message = f"{param} has far more tokens than the context length of {max_model_len} allows"
                raise ApiError(400, message, param=param, code="context_length_exceeded")

    async def _run(self, work: Callable[[], Result], num_chars: int) -> Result:
        if num_chars <= MAX_INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _prompt(
        self,
        request: GenerationRequest,
        token_ids: TokenIds,
        max_tokens: int,
        vocab_size: int,
        text: str | None = None,
    ) -> Prompt:
        """Return one prompt, ready to run; ``text``: of a prompt that came as a string."""
        stop_token_ids = request.stop_token_ids or []
        _check_vocabulary(stop_token_ids, vocab_size, "stop_token_ids")
        eos_token_ids = () if request.ignore_eos else self._tokenizer.eos_token_ids
        wanted = request.wanted_scores
        of_prompt = wanted.of_prompt
        if of_prompt is None and wanted.hides_output:
            of_prompt, scored_from = 0, len(token_ids)
        else:
            scored_from = 1
        sampling = SamplingParams(
            max_tokens=max(1, max_tokens),  # a worker's request ends with a token, be it shown or not
            logprobs=None if wanted.hides_output else wanted.logprobs,
            prompt_logprobs=of_prompt,
            prompt_logprobs_start=scored_from,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_k=max(0, request.top_k or 0),
            top_p=1.0 if request.top_p is None else request.top_p,
            # OpenAI's seeds are signed; two's complement keeps different ones different.
            seed=secrets.randbits(63) if request.seed is None else request.seed % 2**64,
            stop_token_ids=tuple(dict.fromkeys((*eos_token_ids, *stop_token_ids))),
            **feature_values(request, self._tokenizer, max_tokens=max_tokens, vocab_size=vocab_size),
        )
        choice = Choice(
            self._tokenizer.detokenizer(skip_special_tokens=request.skip_special_tokens is not False),
            request.stop_strings,
            include_stop=bool(request.include_stop_str_in_output),
            min_tokens=sampling.min_tokens,
        )
        if wanted.is_neutral:
            return Prompt(token_ids, sampling, choice)
        scores = self._scores(request, token_ids, text)
        return Prompt(token_ids, sampling, choice, scores)

    def _scores(self, request: GenerationRequest, token_ids: TokenIds, text: str | None) -> ChoiceScores:
        """Return what adds log-probabilities and the echo to a choice."""
        texts, skips_special = self._tokenizer.texts, request.skip_special_tokens is not False
        form: LogprobsForm = ChatLogprobs(texts)
        if isinstance(request, CompletionRequest):
            form = CompletionLogprobs(texts, self._tokenizer.detokenizer(skip_special_tokens=skips_special))
        if text is None and request.wanted_scores.echo:
            echoed = self._tokenizer.detokenizer(skip_special_tokens=skips_special)
            text = echoed.push(token_ids) + echoed.flush()
        return ChoiceScores(request.wanted_scores, token_ids, text or "", form, texts)


def check_not_empty(request: CompletionRequest) -> None:
    """Raise :class:`ApiError` 400 if any prompt has neither text nor tokens."""
    if not request.prompt or not all(request.prompts()):
        raise ApiError(400, "prompt is empty: give at least one token", param="prompt", code="empty_prompt")


def _check_vocabulary(token_ids: list[int] | TokenIds, vocab_size: int, param: str) -> None:
    if not token_ids:
        return
    worst = max(token_ids) if isinstance(token_ids, list) else highest(token_ids)
    if worst >= vocab_size:
        message = f"{param} holds token id {worst}; the vocabulary ends at {vocab_size - 1}"
        raise ApiError(400, message, param=param, code="invalid_token_id")


def _room(num_prompt_tokens: int, max_model_len: int, param: str) -> int:
    """Return the number of output tokens that fit after the prompt: at least one. Raises :class:`ApiError` 400."""
    if num_prompt_tokens == 0:
        raise ApiError(400, f"{param} gives no token at all", param=param, code="empty_prompt")
    if num_prompt_tokens >= max_model_len:
        message = (
            f"{param} has {num_prompt_tokens} tokens, which leaves no room for an output token: "
            f"the context length is {max_model_len}"
        )
        raise ApiError(400, message, param=param, code="context_length_exceeded")
    return max_model_len - num_prompt_tokens


def _max_tokens(wanted: int | None, param: str, num_prompt_tokens: int, max_model_len: int) -> int | None:
    """Return the requested maximum, checked against the context length; None if the request gives none."""
    if wanted is not None and num_prompt_tokens + wanted > max_model_len:
        message = (
            f"{num_prompt_tokens} prompt tokens and {param} {wanted} make {num_prompt_tokens + wanted}; "
            f"the context length is {max_model_len}"
        )
        raise ApiError(400, message, param=param, code="context_length_exceeded")
    return wanted


def _check_num_scores(request: GenerationRequest, prompts: Sequence[Prompt]) -> None:
    """Raise :class:`ApiError` 400 if an answer would hold more log-probabilities of prompts than the router keeps."""
    num_top = request.wanted_scores.of_prompt
    if num_top is None:
        return
    count = sum(len(prompt.token_ids) for prompt in prompts) * (1 + num_top)
    if count > MAX_PROMPT_SCORES:
        message = (
            f"the prompts' tokens have {count} log-probabilities with {num_top} alternatives each; at most "
            f"{MAX_PROMPT_SCORES} fit into one answer: ask for fewer alternatives, or send shorter or fewer prompts"
        )
        param = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        raise ApiError(400, message, param=param, code="invalid_value")
