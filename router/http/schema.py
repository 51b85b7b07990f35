"""Bodies of the OpenAI endpoints: strict models, and errors that name the field.

An unsupported parameter is refused by name if its value would change the result, and accepted with the neutral value
that clients often send. Unknown fields are refused, too: nothing is silently ignored.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticKnownError

from splitserve.protocol.messages.requests import MAX_CACHE_SALT_CHARS
from splitserve.protocol.request import MAX_CHOICES
from splitserve.protocol.token_ids import TokenIds
from splitserve.protocol.wire_numbers import MAX_TOP_LOGPROBS
from splitserve.router.http.chat_fields import (
    MAX_TOOLS,
    ChatMessage,
    Tool,
    ToolChoice,
    check_tools,
    usable_tools,
)
from splitserve.router.http.sampling_fields import with_sampling_fields
from splitserve.router.scores.wanted import WantedScores
from splitserve.router.text.structured_output import ResponseFormat, StructuredOutputs

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORD_STRINGS = 128
MAX_BAD_WORD_CHARS = 64
MAX_PROMPTS = 1024
MAX_MESSAGES = 2048
MAX_TEMPLATE_VARIABLES = 64
MAX_HINT_CHARS = 4096
MAX_PRIORITY = 2**31
MAX_CLASS_CHARS = 64
MAX_SESSION_CHARS = 256

# Unsupported parameters of OpenAI's API, or of other servers with that API, with their neutral values besides null.
NEUTRAL_ONLY: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "moderation": (),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "web_search_options": (),
}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


if TYPE_CHECKING:
    _SamplingFields = _Strict
else:
    _SamplingFields = with_sampling_fields("_SamplingFields", _Strict, left_out=("constraint",))


def _only(kind: type) -> BeforeValidator:
    """Refuse values of other types: to Python 0 is False, to the documented schema it isn't."""

    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise PydanticKnownError("literal_error", {"expected": "a value of the documented type"})
        return value

    return BeforeValidator(check)


Off = Annotated[Literal[False], _only(bool)]
Zero = Annotated[Literal[0], _only(int)]
One = Annotated[Literal[1], _only(int)]


class StreamOptions(_Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # usage in each chunk, not in the last one alone
    include_obfuscation: Off | None = None


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = Annotated[
    Annotated[StopString, Tag("one")] | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), Tag("several")],
    Discriminator(lambda value: "several" if isinstance(value, list) else "one"),
]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
TokenId = Annotated[int, Field(ge=0)]
NumTop = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
TemplateVariables = Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES)]


HintText = Annotated[str, Field(max_length=MAX_HINT_CHARS)]


class Hints(_Strict):
    """Parameters that change no answer here: accounting, names of caches, wishes about effort and price."""

    metadata: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: HintText | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: HintText | None = None
    safety_identifier: HintText | None = None
    service_tier: HintText | None = None
    user: HintText | None = None
    verbosity: HintText | None = None


class ModelBody(_Strict):
    """Base of all bodies."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL_ONLY
    """Parameters that are refused by name unless they have one of these values."""
    packed: ClassVar[str] = ""
    """Field that may be a long list of token ids, which is read at C speed; "" for none."""

    model: str | None = None


class GenerationRequest(Hints, ModelBody, _SamplingFields):
    """Fields of both endpoints' bodies. None stands for the endpoint's default.

    Parameters of sampling features are inherited; one that clients write in another form is declared here anew.
    """

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORD_STRINGS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_CACHE_SALT_CHARS)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, lt=MAX_PRIORITY)] | None = None
    request_class: Annotated[str, Field(max_length=MAX_CLASS_CHARS)] | None = None
    session_id: Annotated[str, Field(max_length=MAX_SESSION_CHARS)] | None = None
    return_token_ids: bool | None = None
    return_route: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def wanted_scores(self) -> WantedScores:
        """The log-probabilities and the echo that the body asks for; none at endpoints that have no form for them."""
        return WantedScores()

    @property
    def num_choices(self) -> int:
        """Outputs of each prompt."""
        return self.n or 1

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def include_usage(self) -> bool:
        options = self.stream_options
        return options is not None and (options.include_usage or options.continuous_usage_stats)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


def _prompt_kind(value: Any) -> str:
    """Return which of its four forms a prompt has, by its first element, so that only that form is validated."""
    if not isinstance(value, list):
        return "string"
    first = value[0] if value else ""
    return "token_lists" if isinstance(first, list) else "strings" if isinstance(first, str) else "tokens"


# Lists fail fast: one issue is as informative as a million, which took minutes.
# An empty prompt is refused with an error code of its own, so only the schema that clients see has these bounds.
_TEXT = Field(json_schema_extra={"minLength": 1})
_LIST = Field(fail_fast=True, json_schema_extra={"minItems": 1})
Prompt = Annotated[
    Annotated[str, _TEXT, Tag("string")]
    | Annotated[list[Annotated[str, _TEXT]], _LIST, Field(max_length=MAX_PROMPTS), Tag("strings")]
    | Annotated[list[TokenId], _LIST, Tag("tokens")]
    | Annotated[list[Annotated[list[TokenId], _LIST]], _LIST, Field(max_length=MAX_PROMPTS), Tag("token_lists")],
    Discriminator(_prompt_kind),
]


class CompletionRequest(GenerationRequest):
    packed = "prompt"
    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    prompt_logprobs: NumTop | None = None
    logprobs: NumTop | None = None
    top_logprobs: Zero | None = None
    echo: bool | None = None

    @property
    def wanted_scores(self) -> WantedScores:
        """See :class:`GenerationRequest`."""
        return WantedScores(
            self.logprobs, self.prompt_logprobs, echo=bool(self.echo), hides_output=self.max_tokens == 0
        )

    def prompts(self) -> list[str] | list[list[int]] | list[TokenIds]:
        """One entry per choice; packed if it's a single prompt of token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        return prompt  # type: ignore[return-value]


class ChatCompletionRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    prompt_logprobs: NumTop | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    echo: Off | None = None

    @property
    def wanted_scores(self) -> WantedScores:
        """See :class:`GenerationRequest`."""
        num_top = (self.top_logprobs or 0) if self.logprobs else None
        wanted = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return WantedScores(num_top, self.prompt_logprobs, hides_output=wanted == 0)

    def settle_tools(self) -> None:
        """Leave out the tools that the request's choice doesn't allow. Raises :class:`ApiError` 400 for tools and a
        choice that don't go together."""
        check_tools(self.tools or (), self.tool_choice)
        if self.tools:
            tools, self.tool_choice = usable_tools(self.tools, self.tool_choice)
            self.tools = list(tools)
