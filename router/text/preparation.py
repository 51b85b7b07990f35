"""Preparation of prompts from a validated body: chat template, tokenisation, limits, sampling parameters."""

import asyncio
import secrets
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from splitserve.protocol.request import SamplingParams
from splitserve.protocol.sampling_features import Constraint
from splitserve.protocol.token_ids import TokenIds, highest
from splitserve.router.http.api_error import ApiError, of_prompt
from splitserve.router.http.prompt import Prompt
from splitserve.router.http.schema import ChatCompletionRequest, CompletionRequest, GenerationRequest
from splitserve.router.output.catalog import ResponseFormat
from splitserve.router.placement.placer import Limits
from splitserve.router.scores.choice_scores import ChoiceScores
from splitserve.router.scores.forms import ChatLogprobs, CompletionLogprobs, LogprobsForm, TokenIdLogprobs
from splitserve.router.scores.wanted import WantedScores
from splitserve.router.text.chat import ChatForm
from splitserve.router.text.chat_template import ChatTemplateError
from splitserve.router.text.choice import Choice
from splitserve.router.text.constraints import Constraints
from splitserve.router.text.feature_values import feature_values
from splitserve.router.text.processes.renderer import Renderer, RendererBusyError
from splitserve.router.text.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from splitserve.router.text.tokenizer import ModelTokenizer

if TYPE_CHECKING:
    from splitserve.router.output.splitter import Splitter

# Tokenising so few characters costs no more than a hop to the pool and back.
MAX_INLINE_CHARS = 512
# A text with more characters per token of the context is tokenised in pieces first, to count its tokens: freeing the
# tokens of a whole long text at once would hold the interpreter.
ASCII_CHARS_PER_TOKEN = 6
OTHER_CHARS_PER_TOKEN = 2
PIECE_CHARS = 1 << 16
COUNTED_BEYOND_TOKENS = 1 << 15  # the tokens of a text that is too long are counted so far beyond the context
CUT_WORD_TOKENS = 512  # upper bound of the extra tokens of a word that is cut in two
DEFAULT_COMPLETION_TOKENS = 16
_TOKENIZER_THREADS = 2
_DRAWING = ("temperature", "top_k", "top_p")
_ALL_TOKENS = -1  # as a body's top_k; SamplingParams has 0
MAX_PROMPT_SCORES = 1 << 20  # in one answer: each takes the router up to a hundred bytes of JSON

Result = TypeVar("Result")


class Preparation:
    """Preparation of prompts for one model. Methods raise :class:`ApiError` 400 that names the field at fault."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        renderer: Renderer,
        constraints: Constraints,
        defaults: SamplingDefaults = NO_DEFAULTS,
        response_format: ResponseFormat | None = None,
    ) -> None:
        self._defaults = defaults
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._constraints = constraints
        self._response_format = response_format
        self._pool = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        # For texts that are only converted: prompts don't wait behind them.
        self._conversion_pool = ThreadPoolExecutor(1, thread_name_prefix="conversion")
        self._encoder = tokenizer.encoder(self._pool)

    def start(self) -> None:
        """Start the process that tokenises long texts; prompts needn't wait for it."""
        self._encoder.start()

    def close(self) -> None:
        self._encoder.close()
        for pool in (self._pool, self._conversion_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    async def completion(self, request: CompletionRequest, limits: Limits, *, param: str = "prompt") -> list[Prompt]:
        """Return the prompts of a body, whose field ``param`` has them."""
        constraint = await self._constraints.of(request)
        prompts: list[Prompt] = []
        num_chars = 0
        given: Sequence[str | list[int] | TokenIds] = request.prompts()
        for index, prompt in enumerate(given):
            if num_chars > MAX_INLINE_CHARS:  # many short prompts take as long as a long one
                await asyncio.sleep(0)
            num_chars += len(prompt)
            try:
                prompts += await self._choices_of(request, prompt, limits, constraint, param)
            except ApiError as error:
                is_own = error.param in (param, "max_tokens")  # else it is the same for all prompts
                raise of_prompt(error, index, len(given)) if is_own else error from None
        _check_num_scores(request, prompts)
        return prompts

    async def _choices_of(
        self,
        request: CompletionRequest,
        prompt: str | list[int] | TokenIds,
        limits: Limits,
        constraint: Constraint | None,
        param: str,
    ) -> list[Prompt]:
        """Return the choices of one prompt."""
        token_ids = await self._prompt_ids(prompt, limits, param)
        room = _room(len(token_ids), limits.max_model_len, param)
        max_tokens = _max_tokens(request.max_tokens, "max_tokens", len(token_ids), limits.max_model_len)
        return self._choices(
            request,
            token_ids,
            min(DEFAULT_COMPLETION_TOKENS, room) if max_tokens is None else max_tokens,
            limits.vocab_size,
            constraint=constraint,
            text=prompt if isinstance(prompt, str) else None,
        )

    async def chat(self, request: ChatCompletionRequest, limits: Limits) -> list[Prompt]:
        form = ChatForm(self._response_format, self._renderer.variables)
        tools = form.tools(request)
        text = await self.chat_text(request)
        token_ids = await self._encode(text, limits.max_model_len, "messages", add_special_tokens=False)
        room = _room(len(token_ids), limits.max_model_len, "messages")
        if len(token_ids) < limits.common_model_len:
            # Up to the length that every worker can run, so that the load isn't all on the largest one.
            room = limits.common_model_len - len(token_ids)
        param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        wanted = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        max_tokens = _max_tokens(wanted, param, len(token_ids), limits.max_model_len)
        constraint = await self._constraints.of_chat(request, form, text, self._tokenizer.added_ids)
        prompts = self._choices(
            request,
            token_ids,
            room if max_tokens is None else max_tokens,
            limits.vocab_size,
            constraint=constraint,
            splitter=lambda: form.splitter(request, text, tools),
        )
        _check_num_scores(request, prompts)
        return prompts

    async def chat_text(self, request: ChatCompletionRequest) -> str:
        """Return the prompt's text of a conversation. Raises :class:`ApiError` 400 or 503."""
        form = ChatForm(self._response_format, self._renderer.variables)
        try:
            return await self._renderer.render(form.messages(request), form.tools(request), form.variables(request))
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages", code="chat_template_failed") from None
        except RendererBusyError as error:
            raise ApiError(503, str(error), code="overloaded") from None

    async def tokens_of(self, text: str, *, add_special_tokens: bool, most: int) -> list[int]:
        """Return the tokens of ``text``. Raises :class:`ApiError` 400 for more than ``most``."""

        def encode() -> list[int]:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            if len(encoding) > most:
                message = f"prompt has {len(encoding)} tokens; at most {most} are returned: send it in parts"
                raise ApiError(400, message, param="prompt", code="too_many_tokens")
            return list(encoding.ids)

        return await _run(self._conversion_pool, encode, len(text))

    async def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return await _run(self._conversion_pool, lambda: self._tokenizer.decode(token_ids), len(token_ids))

    def strings_of(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token's own string, as the vocabulary has it."""
        return [self._tokenizer.string_of(token_id) for token_id in token_ids]

    async def _prompt_ids(self, prompt: str | list[int] | TokenIds, limits: Limits, param: str) -> TokenIds:
        """Return one prompt's token ids."""
        if not isinstance(prompt, str):
            check_vocabulary(prompt, limits.vocab_size, param)
            return prompt if isinstance(prompt, array) else array("i", prompt)
        return await self._encode(prompt, limits.max_model_len, "prompt", add_special_tokens=True)

    async def _encode(self, text: str, max_model_len: int, param: str, *, add_special_tokens: bool) -> TokenIds:
        """Return the token ids of a text. A hopelessly long text is refused by its beginning alone: tokenising all of
        it would block the tokenizer for other requests for many seconds, and its tokens take memory."""

        def check(num_tokens: int) -> None:
            if num_tokens > max_model_len + COUNTED_BEYOND_TOKENS:
                raise _too_many(param, max_model_len)

        chars_per_token = ASCII_CHARS_PER_TOKEN if text.isascii() else OTHER_CHARS_PER_TOKEN
        if len(text) > chars_per_token * (max_model_len + CUT_WORD_TOKENS):
            await _run(self._pool, lambda: self._refuse_hopeless(text, max_model_len, param), len(text))
        token_ids = await self._encoder.encode(text, add_special_tokens=add_special_tokens, check=check)
        _room(len(token_ids), max_model_len, param)
        return token_ids

    def _refuse_hopeless(self, text: str, max_model_len: int, param: str) -> None:
        room = 2 * max_model_len
        for begin in range(0, len(text), PIECE_CHARS):
            num_tokens = len(self._tokenizer.encode(text[begin : begin + PIECE_CHARS], add_special_tokens=False))
            room -= max(0, num_tokens - CUT_WORD_TOKENS)
            if room < 0:
                raise _too_many(param, max_model_len)

    def _choices(
        self,
        request: GenerationRequest,
        token_ids: TokenIds,
        max_tokens: int,
        vocab_size: int,
        *,
        constraint: Constraint | None,
        splitter: Callable[[], "Splitter | None"] = lambda: None,
        text: str | None = None,
    ) -> list[Prompt]:
        """Return the choices of a prompt, which share its seed; ``text``: of a prompt that came as a string."""
        stop_token_ids = request.stop_token_ids or []
        check_vocabulary(stop_token_ids, vocab_size, "stop_token_ids")
        eos_token_ids = () if request.ignore_eos else self._tokenizer.eos_token_ids
        max_tokens = max(1, max_tokens)  # a worker's request ends with a token, be it shown or not
        features = feature_values(request, self._tokenizer, max_tokens=max_tokens, vocab_size=vocab_size)
        wanted = request.wanted_scores
        if text is None and wanted.echo:
            echoed = self._tokenizer.detokenizer(skip_special_tokens=request.skip_special_tokens is not False)
            text = echoed.push(token_ids) + echoed.flush()
        sampling = SamplingParams(
            max_tokens=max_tokens,
            **wanted.params(len(token_ids)),
            # OpenAI's seeds are signed; two's complement keeps different ones different.
            seed=secrets.randbits(63) if request.seed is None else request.seed % 2**64,
            stop_token_ids=tuple(dict.fromkeys((*eos_token_ids, *stop_token_ids))),
            constraint=constraint,
            **(self._defaults.values | _drawing(request) | features),
        )
        return [
            Prompt(
                token_ids,
                replace(sampling, choice=number) if number else sampling,
                choice,
                request.num_choices,
                self._scores(request, wanted, token_ids, text),
            )
            for number in range(request.num_choices)
            for choice in [self._choice(request, sampling.min_tokens, splitter())]
        ]

    def _choice(self, request: GenerationRequest, min_tokens: int, splitter: "Splitter | None") -> Choice:
        skips_special = request.skip_special_tokens is not False
        return Choice(
            # A splitter reads special tokens, and hides them.
            self._tokenizer.detokenizer(skip_special_tokens=skips_special and splitter is None),
            request.stop_strings,
            include_stop=bool(request.include_stop_str_in_output),
            min_tokens=min_tokens,
            splitter=splitter,
            special_texts=self._tokenizer.special_texts if skips_special else None,
        )

    def _scores(
        self, request: GenerationRequest, wanted: WantedScores, token_ids: TokenIds, text: str | None
    ) -> ChoiceScores | None:
        """Return what adds log-probabilities and the echo to a choice; None if neither is wanted."""
        if wanted.is_neutral:
            return None
        texts, skips_special = self._tokenizer.texts, request.skip_special_tokens is not False
        form: LogprobsForm = ChatLogprobs(texts)
        echo: CompletionLogprobs | None = None
        if wanted.as_ids:
            form = TokenIdLogprobs(texts)
        elif isinstance(request, CompletionRequest):
            form = echo = CompletionLogprobs(texts, self._tokenizer.detokenizer(skip_special_tokens=skips_special))
        return ChoiceScores(wanted, token_ids, text or "", form, texts, echo=echo)


async def _run(pool: Executor, work: Callable[[], Result], num_chars: int) -> Result:
    """Return the result of ``work`` on so many characters, which ``pool`` does if they are many."""
    if num_chars <= MAX_INLINE_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(pool, work)


def _drawing(request: GenerationRequest) -> dict[str, Any]:
    """Return the parameters of drawing tokens that a body sets, beside those of sampling features."""
    given = {name: value for name in _DRAWING if (value := getattr(request, name)) is not None}
    if given.get("top_k") == _ALL_TOKENS:
        given["top_k"] = 0
    return given


def check_not_empty(request: CompletionRequest) -> None:
    """Raise :class:`ApiError` 400 if any prompt has neither text nor tokens."""
    prompts: Sequence[str | list[int] | TokenIds] = request.prompts() if request.prompt else [""]
    for index, prompt in enumerate(prompts):
        if not prompt:
            error = ApiError(400, "prompt is empty: give at least one token", param="prompt", code="empty_prompt")
            raise of_prompt(error, index, len(prompts))


def check_vocabulary(token_ids: list[int] | TokenIds, vocab_size: int, param: str) -> None:
    """Raise :class:`ApiError` 400 unless the vocabulary has all of the tokens."""
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
            f"{_context_words(max_model_len)}"
        )
        raise ApiError(400, message, param=param, code="context_length_exceeded")
    return max_model_len - num_prompt_tokens


def _too_many(param: str, max_model_len: int) -> ApiError:
    """Return the error for a prompt whose tokens weren't counted to the end."""
    message = f"{param} has far more tokens than fit: {_context_words(max_model_len)}"
    return ApiError(400, message, param=param, code="context_length_exceeded")


def _max_tokens(wanted: int | None, param: str, num_prompt_tokens: int, max_model_len: int) -> int | None:
    """Return the requested maximum, checked against the context length; None if the request gives none."""
    if wanted is not None and num_prompt_tokens + wanted > max_model_len:
        message = (
            f"{num_prompt_tokens} prompt tokens and {param} {wanted} make {num_prompt_tokens + wanted}; "
            f"{_context_words(max_model_len)}"
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
        param = "logprobs" if request.wanted_scores.prompt_logprobs is None else "prompt_logprobs"
        raise ApiError(400, message, param=param, code="invalid_value")


def _context_words(max_model_len: int) -> str:
    """Return the limit in OpenAI's words, by which clients recognise it and choose another model."""
    return f"this model's maximum context length is {max_model_len} tokens"
