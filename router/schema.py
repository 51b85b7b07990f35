"""Bodies of the OpenAI endpoints: strict models, and errors that name the field.

What isn't supported yet is refused by name when it's given a value that would change the result, and accepted when
the value is the neutral one that clients like to send. Unknown fields are refused too: nothing is silently ignored.
"""

from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from splitserve.router.api_error import ApiError
from splitserve.router.body_shape import check_shape, check_values
from splitserve.router.token_prompt import take_token_ids
from splitserve.token_ids import TokenIds

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_PROMPTS = 1024
MAX_MESSAGES = 2048
MAX_PARTS = 1024
MAX_ISSUES = 100  # each of them costs time and memory: a body with more is refused without looking at any

# Parameters of OpenAI's API, or of other servers of it, that we know but don't support, with the values besides null
# that ask for nothing.
NEUTRAL_ONLY: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "metadata": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = Annotated[
    Annotated[StopString, Tag("one")] | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), Tag("several")],
    Discriminator(lambda value: "several" if isinstance(value, list) else "one"),
]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
TokenId = Annotated[int, Field(ge=0)]


class GenerationRequest(_Strict):
    """What both endpoints take. None stands for the endpoint's default."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    return_token_ids: bool | None = None
    return_route: bool | None = None

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def _prompt_kind(value: Any) -> str:
    """Which of the four forms a prompt has, by its first element, so that only that one is validated."""
    if not isinstance(value, list):
        return "string"
    first = value[0] if value else ""
    return "token_lists" if isinstance(first, list) else "strings" if isinstance(first, str) else "tokens"


# Lists fail fast: one issue tells as much as a million, which took minutes.
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
    prompt: Prompt

    def prompts(self) -> list[str] | list[list[int]] | list[TokenIds]:
        """One entry per choice; packed if it's a single prompt of token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        return prompt  # type: ignore[return-value]


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """One message. The fields after ``name`` are those that a client sends back from an answer; they must be empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)]
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    def for_template(self) -> dict[str, str]:
        """As chat templates want it: text parts joined by newlines, OpenAI's developer role under its older name."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return message if self.name is None else message | {"name": self.name}


class ChatCompletionRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


_MANY_VALUES = 1024
_ANY_FIELDS = pydantic.TypeAdapter(dict[str, Any])
RequestModel = TypeVar("RequestModel", bound=GenerationRequest)


def parse(model: type[RequestModel], body: bytes) -> RequestModel:
    """The body as ``model``. Raises :class:`ApiError` 400 that names the first field at fault.

    Holds the interpreter for a time in proportion to the body's structure: :func:`parse_checked` bounds that first.
    """
    token_ids, rest = _take_prompt(model, body)
    return _with_prompt(_parse_whole(model, rest), token_ids)


def parse_checked(model: type[RequestModel], body: bytes) -> RequestModel:
    """:func:`parse` for a large body, whose structure is counted before anything is built from it."""
    shape = check_shape(body)
    has_long_list = shape.num_commas >= _MANY_VALUES  # else the pass over the body that finds it would be in vain
    token_ids, rest = _take_prompt(model, body) if has_long_list else (None, body)
    check_values(shape if token_ids is None else check_shape(rest))
    return _with_prompt(_parse_whole(model, rest), token_ids)


def _take_prompt(model: type[RequestModel], body: bytes) -> tuple[TokenIds | None, bytes]:
    """The prompt, if it's one list of token ids, and the body with a stand-in for it."""
    taken = take_token_ids(body) if model is CompletionRequest else None
    return (None, body) if taken is None else taken


def _with_prompt(request: RequestModel, token_ids: TokenIds | None) -> RequestModel:
    if token_ids is not None:
        request.prompt = token_ids  # type: ignore[attr-defined]
    return request


def _parse_whole(model: type[RequestModel], body: bytes) -> RequestModel:
    try:
        request = model.model_validate_json(body)
    except pydantic.ValidationError as error:
        request = _retry_without_neutral(model, body, error)
    _check_combinations(request)
    return request


def _retry_without_neutral(model: type[RequestModel], body: bytes, error: pydantic.ValidationError) -> RequestModel:
    """Unsupported parameters come out as unknown fields: refuse them by name, or go on without neutral ones."""
    if error.error_count() > MAX_ISSUES:
        message = f"{error.error_count()} things are wrong with the body; /openapi.json says what may be in it"
        raise ApiError(400, message, code="invalid_value") from None
    issues = error.errors(include_url=False)
    extras = {str(issue["loc"][0]): issue["input"] for issue in issues if _is_extra(issue)}
    for name, value in extras.items():
        if name not in NEUTRAL_ONLY:
            raise ApiError(400, f"unknown parameter: {name}", param=name, code="unknown_parameter")
        if not _is_neutral(value, NEUTRAL_ONLY[name]):
            raise ApiError(400, f"{name} is not supported yet", param=name, code="unsupported_parameter")
    if not extras:
        raise _as_api_error(issues)
    fields = _ANY_FIELDS.validate_json(body)
    kept = {name: value for name, value in fields.items() if name not in extras}
    try:
        return model.model_validate(kept)
    except pydantic.ValidationError as second:
        raise _as_api_error(second.errors(include_url=False)) from None


def _is_extra(issue: Any) -> bool:
    return issue["type"] == "extra_forbidden" and len(issue["loc"]) == 1


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Equal to one of ``neutral``, where true and 1 are different values."""
    return value is None or any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)


def _as_api_error(issues: list[Any]) -> ApiError:
    issue = _most_telling(issues)
    loc = issue["loc"]
    if issue["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {issue['ctx']['error']}", code="invalid_json")
    if not loc:
        return ApiError(400, f"the body must be a JSON object: {issue['msg']}", code="invalid_json")
    field = _field_path(issue)
    # Elements of a plain list have no name of their own: the parameter is the list.
    param = field if "." in field else str(loc[0])
    return ApiError(400, f"{field}: {issue['msg']}", param=param, code="invalid_value")


def _field_path(issue: Any) -> str:
    """The field as clients write it (``messages[0].content``), without the names of union members and tags."""
    loc = issue["loc"]
    path = str(loc[0])
    for depth, part in enumerate(loc[1:], start=2):
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _NESTED_NAMES or (issue["type"] == "extra_forbidden" and depth == len(loc)):
            path += f".{part}"
    return path


def _most_telling(issues: list[Any]) -> Any:
    """Of the first field's issues, one that isn't merely about another member of a union."""
    same_field = [issue for issue in issues if issue["loc"][:1] == issues[0]["loc"][:1]]
    return next((issue for issue in same_field if not issue["type"].endswith("_type")), same_field[0])


_NESTED_NAMES = frozenset(name for nested in (StreamOptions, TextPart, ChatMessage) for name in nested.model_fields)


def _check_combinations(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options is only allowed with stream: true", param="stream_options")
    if isinstance(request, ChatCompletionRequest):
        both = (request.max_tokens, request.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            message = "max_tokens and max_completion_tokens differ: give one of them"
            raise ApiError(400, message, param="max_completion_tokens")
