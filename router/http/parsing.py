"""Parsing of requests' bodies, with errors that name the first field at fault."""

import difflib
import json
from typing import Any, TypeVar

import pydantic

from splitserve.protocol.token_ids import TokenIds
from splitserve.router.http.api_error import MAX_PARAM_CHARS, ApiError
from splitserve.router.http.bodies.shape import check_shape, check_values
from splitserve.router.http.bodies.token_prompt import take_token_ids
from splitserve.router.http.bodies.wording import describe_fault, field_path, shown
from splitserve.router.http.chat_fields import check_messages
from splitserve.router.http.schema import (
    ChatCompletionRequest,
    GenerationRequest,
    ModelBody,
)

MAX_ISSUES = 100  # each issue costs time and memory: a body with more is refused without details
_MANY_VALUES = 1024
_ANY_FIELDS = pydantic.TypeAdapter(dict[str, Any])
RequestModel = TypeVar("RequestModel", bound=ModelBody)


def parse(model: type[RequestModel], body: bytes) -> RequestModel:
    """Return the body as ``model``. Raises :class:`ApiError` 400 that names the first field at fault.

    It holds the interpreter for a time in proportion to the body's structure, which :func:`parse_checked` bounds first.
    """
    token_ids, rest = _take_prompt(model, body)
    return _with_prompt(_parse_whole(model, rest), token_ids)


def parse_checked(model: type[RequestModel], body: bytes) -> RequestModel:
    """Parse a large body like :func:`parse`, but count its structure before building any object from it."""
    shape = check_shape(body)
    has_long_list = shape.num_commas >= _MANY_VALUES  # else searching the body for it would be in vain
    token_ids, rest = _take_prompt(model, body) if has_long_list else (None, body)
    check_values(shape if token_ids is None else check_shape(rest))
    return _with_prompt(_parse_whole(model, rest), token_ids)


def _take_prompt(model: type[RequestModel], body: bytes) -> tuple[TokenIds | None, bytes]:
    """Return the prompt, if it is one list of token ids, and the body with a placeholder for it."""
    taken = take_token_ids(body, model.packed) if model.packed else None
    return (None, body) if taken is None else taken


def _with_prompt(request: RequestModel, token_ids: TokenIds | None) -> RequestModel:
    if token_ids is not None:
        setattr(request, request.packed, token_ids)
    return request


def _parse_whole(model: type[RequestModel], body: bytes) -> RequestModel:
    try:
        request = model.model_validate_json(body)
    except pydantic.ValidationError as error:
        request = _retry_without_neutral(model, body, error)
    if isinstance(request, GenerationRequest):
        _check_combinations(request)
    return request


def _retry_without_neutral(model: type[RequestModel], body: bytes, error: pydantic.ValidationError) -> RequestModel:
    """Refuse unsupported parameters by name, or parse again without neutral ones; the model reports them as unknown."""
    if error.error_count() > MAX_ISSUES:
        message = f"{error.error_count()} things are wrong with the body; /openapi.json says what may be in it"
        raise ApiError(400, message, code="invalid_value") from None
    issues = error.errors(include_url=False)
    extras = {str(issue["loc"][0]): issue["input"] for issue in issues if _is_extra(issue)}
    for name, value in extras.items():
        if name not in model.neutral:
            raise ApiError(
                400, f"unknown parameter: {name}{_suggest(name, model)}", param=name, code="unknown_parameter"
            )
        if not _is_neutral(value, model.neutral[name]):
            allowed = " or ".join(json.dumps(neutral) for neutral in (*model.neutral[name], None))
            message = f"{name} is not supported yet: leave it out, or send {allowed}, got {shown(value)}"
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    if not extras:
        raise _as_api_error(model, issues)
    fields = _ANY_FIELDS.validate_json(body)
    kept = {name: value for name, value in fields.items() if name not in extras}
    try:
        return model.model_validate(kept)
    except pydantic.ValidationError as second:
        raise _as_api_error(model, second.errors(include_url=False)) from None


def _suggest(name: str, model: type[ModelBody]) -> str:
    """Return the closest known parameter, if one is close."""
    close = difflib.get_close_matches(name[:MAX_PARAM_CHARS], [*model.model_fields, *model.neutral], n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _is_extra(issue: Any) -> bool:
    return issue["type"] == "extra_forbidden" and len(issue["loc"]) == 1


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Return whether the value equals one of ``neutral``; true and 1 are different values."""
    return value is None or any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)


def _as_api_error(model: type[pydantic.BaseModel], issues: list[Any]) -> ApiError:
    issue = _most_telling(issues)
    loc = issue["loc"]
    if issue["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {issue['ctx']['error']}", code="invalid_json")
    if not loc:
        return ApiError(400, f"the body must be a JSON object, got {shown(issue['input'])}", code="invalid_json")
    field = field_path(model, issue)
    # Elements of a plain list have no name of their own: ``param`` names the list.
    param = field if "." in field else str(loc[0])
    return ApiError(400, describe_fault(model, issue, field), param=param, code="invalid_value")


def _most_telling(issues: list[Any]) -> Any:
    """Return the first field's most informative issue: not one about an unrelated member of a union."""
    same_field = [issue for issue in issues if issue["loc"][:1] == issues[0]["loc"][:1]]
    return next((issue for issue in same_field if not issue["type"].endswith("_type")), same_field[0])


def _check_combinations(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options is only allowed with stream: true", param="stream_options")
    _check_scores(request)
    if isinstance(request, ChatCompletionRequest):
        both = (request.max_tokens, request.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            message = "max_tokens and max_completion_tokens differ: give one of them"
            raise ApiError(400, message, param="max_completion_tokens")
        check_messages(request.messages)
        request.settle_tools()


def _check_scores(request: GenerationRequest) -> None:
    wanted = request.wanted_scores
    if wanted.hides_output and not wanted.echo and wanted.prompt_logprobs is None:
        field = "max_tokens" if request.max_tokens == 0 else "max_completion_tokens"
        message = f"{field} is 0, which leaves nothing to answer: it must be at least 1 without echo or prompt_logprobs"
        raise ApiError(400, message, param=field, code="invalid_value")
    if request.num_choices > 1 and (wanted.hides_output or wanted.of_prompt is not None):
        message = (
            f"n is {request.num_choices}; it must be 1 with log-probabilities of the prompt, and with max_tokens 0"
        )
        raise ApiError(400, message, param="n", code="invalid_value")
    if isinstance(request, ChatCompletionRequest) and request.top_logprobs and not request.logprobs:
        message = f"top_logprobs is {request.top_logprobs}, which needs logprobs: true"
        raise ApiError(400, message, param="top_logprobs", code="invalid_value")
