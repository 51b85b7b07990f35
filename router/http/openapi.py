"""The OpenAPI document: input and output of the endpoints, for this server's model. Written by hand, checked by tests.

Request bodies come from the models of :mod:`splitserve.router.http.schema`, and list the parameters that are accepted
with neutral values only. Limits that depend on the workers (context length, vocabulary) aren't in it.
"""

from collections.abc import Sequence
from typing import Any

from splitserve import __version__
from splitserve.protocol.request import FinishReason
from splitserve.router.http.access.api_key import KEYED_PATHS
from splitserve.router.http.endpoints.generate import GenerateRequest
from splitserve.router.http.endpoints.messages_body import CountRequest, MessagesRequest
from splitserve.router.http.endpoints.responses_body import ResponsesRequest
from splitserve.router.http.endpoints.tokens import DetokenizeRequest, TokenizeRequest
from splitserve.router.http.meanings import MEANINGS
from splitserve.router.http.schema import ChatCompletionRequest, CompletionRequest, ModelBody
from splitserve.router.output.chat_json import TOOL_CALLS

Json = dict[str, Any]

_REFERENCE = "#/components/schemas/{model}"
_STRING: Json = {"type": "string"}
_INTEGER: Json = {"type": "integer"}
_COUNT: Json = {"type": "integer", "minimum": 0}

ERRORS = {
    400: "The request can't be served as it is; `param` names the field at fault",
    401: "The API key is missing or wrong",
    403: "Host or Origin names another machine, and the server, on loopback, has no key",
    404: "No such model, or no such path",
    405: "The path has no such method",
    408: "The headers or the body took too long",
    413: "The body is too large",
    415: "The body isn't application/json, or is compressed",
    429: "Too many requests are in flight",
    431: "The request line and the headers are too large",
    500: "A bug, whose traceback is in the router's log",
    502: "A worker gave the request up",
    503: "No worker can take the request now",
    504: "The request took too long",
}
"""Reasons by status. No operation lists 405, the answer to methods that are not in the document, and 500."""


def openapi_document(names: Sequence[str], *, wants_key: bool) -> Json:
    """Return the whole document, as a value for JSON."""
    keyed = (401,) if wants_key else ()
    everywhere = (431,) if wants_key else (403, 431)
    generation_errors = (400, *keyed, 404, 408, 413, 415, 429, 502, 503, 504)
    paths: Json = {
        "/v1/completions": {"post": _generation("Continue prompts", "Completion", generation_errors)},
        "/v1/chat/completions": {"post": _generation("Answer a chat", "ChatCompletion", generation_errors)},
        "/v1/generate": {"post": _generation("Continue a prompt of token ids", "Generate", generation_errors)},
        "/v1/responses": {"post": _generation("Answer a conversation of items", "Responses", generation_errors)},
        "/v1/messages": {
            "post": _with_anthropics_errors(
                _generation("Answer a conversation of blocks", "Messages", generation_errors)
            )
        },
        "/v1/messages/count_tokens": {
            "post": _with_anthropics_errors(_body("Count a conversation's tokens", "Count", generation_errors))
        },
        "/tokenize": {"post": _body("Text or messages to token ids", "Tokenize", generation_errors)},
        "/detokenize": {"post": _body("Token ids to text", "Detokenize", generation_errors)},
        "/v1/models": {"get": _operation("The model served", _json(_ref("ModelList")), keyed)},
        "/v1/models/{model_id}": {
            "get": _operation("The model served", _json(_ref("Model")), (*keyed, 404))
            | {"parameters": [{"name": "model_id", "in": "path", "required": True, "schema": {"enum": list(names)}}]}
        },
        "/health": {"get": _operation("Whether the router runs", _json(_status("ok")))},
        "/ready": {"get": _ready()},
        "/version": {"get": _operation("Splitserve's version", _json(_object({"version": _STRING})))},
        "/metrics": {"get": _operation("Metrics for Prometheus", {"text/plain": {"schema": _STRING}})},
    }
    for item in paths.values():
        for operation in item.values():
            operation["responses"] = dict(sorted((operation["responses"] | _errors(everywhere)).items()))
    document: Json = {
        "openapi": "3.1.0",
        "info": {"title": "Splitserve", "version": __version__},
        "paths": paths,
        "components": {"schemas": _schemas(names)},
    }
    if wants_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, item in paths.items():
            for operation in item.values():
                operation["security"] = [{"key": []}] if path.startswith(KEYED_PATHS) else []
    return document


def _generation(summary: str, kind: str, errors: tuple[int, ...]) -> Json:
    """Return one of the two generating endpoints: it answers a whole object, or server-sent events with ``stream``."""
    content = _json(_ref(kind)) | {"text/event-stream": {"itemSchema": _ref("Event")}}
    body = {"required": True, "content": _json(_ref(f"{kind}Request"))}
    return _operation(summary, content, errors) | {"requestBody": body}


def _body(summary: str, kind: str, errors: tuple[int, ...]) -> Json:
    """Return an endpoint that answers a body with a whole object."""
    body = {"required": True, "content": _json(_ref(f"{kind}Request"))}
    return _operation(summary, _json(_ref(kind)), errors) | {"requestBody": body}


def _operation(summary: str, content: Json, errors: tuple[int, ...] = ()) -> Json:
    success: Json = {"200": {"description": summary, "content": content}}
    return {"summary": summary, "responses": success | _errors(errors)}


def _errors(statuses: tuple[int, ...]) -> Json:
    return {str(status): {"description": ERRORS[status], "content": _json(_ref("Error"))} for status in statuses}


def _with_anthropics_errors(operation: Json) -> Json:
    """Return the operation with errors in Anthropic's shape, except that of a missing key, which precedes all else."""
    for status, response in operation["responses"].items():
        if int(status) >= 400 and status != "401":
            response["content"] = _json(_ref("MessagesError"))
    return operation


def _ready() -> Json:
    ready = _object({"status": {"const": "ready"}}, reason=_STRING)
    not_ready = _object({"status": {"const": "not ready"}, "reason": _STRING})
    operation = _operation("Whether a request could be served now", _json(ready))
    operation["responses"]["503"] = {"description": "No request could be served now", "content": _json(not_ready)}
    return operation


def _schemas(names: Sequence[str]) -> Json:
    return _requests(names) | _of_chats(names) | _of_other_endpoints(names)


def _of_chats(names: Sequence[str]) -> Json:
    reasons = [reason.value for reason in FinishReason]
    choice = {"index": _COUNT, "logprobs": {"type": ["object", "null"]}, "finish_reason": {"enum": reasons}}
    chat_choice = choice | {"finish_reason": {"enum": [*reasons, TOOL_CALLS]}}
    function = _object({"name": _STRING, "arguments": _STRING})
    call = _object({"id": _STRING, "type": {"const": "function"}, "function": function})
    message = _object(
        {"role": {"const": "assistant"}, "content": {"type": ["string", "null"]}, "refusal": {"type": "null"}},
        reasoning_content=_STRING,
        tool_calls={"type": "array", "items": call, "minItems": 1},
    )
    details = _object({"cached_tokens": _COUNT})
    usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _COUNT)
    error: Json = {"message": _STRING, "type": _STRING}
    error |= {name: {"type": ["string", "null"]} for name in ("param", "code")}
    return {
        "Error": _object({"error": _object(error)}),
        "Event": {
            "type": "object",
            "required": ["data"],
            "properties": {"data": _STRING | {"description": "A chunk or an error as JSON; [DONE] ends the stream"}},
        },
        "Model": _object(
            {
                "id": {"enum": list(names)},
                "object": {"const": "model"},
                "created": _INTEGER,
                "owned_by": _STRING,
                "type": {"const": "model"},
                "display_name": {"enum": list(names)},
                "created_at": {"type": "string", "format": "date-time"},
                "root": {"const": names[0]},
                "max_model_len": {"anyOf": [_COUNT, {"type": "null"}]},
                "sampling_defaults": {"type": "object", "additionalProperties": {"type": "number"}},
            }
        ),
        "ModelList": _object(
            {
                "object": {"const": "list"},
                "data": {"type": "array", "items": _ref("Model")},
                "has_more": {"const": False},
                "first_id": {"const": names[0]},
                "last_id": {"const": names[-1]},
            }
        ),
        "Usage": _object(usage | {"prompt_tokens_details": details}),
        "Completion": _answer("text_completion", names, choice | {"text": _STRING}),
        "ChatCompletion": _answer("chat.completion", names, chat_choice | {"message": message}),
    }


def _of_other_endpoints(names: Sequence[str]) -> Json:
    reasons = [reason.value for reason in FinishReason]
    ids: Json = {"type": "array", "items": _COUNT}
    return {
        "Generate": _object(
            {
                "id": _STRING,
                "object": {"const": "generation"},
                "created": _INTEGER,
                "model": {"enum": list(names)},
                "token_ids": ids,
                "finish_reason": {"enum": reasons},
                "weights_version": _STRING,
                "usage": _ref("Usage"),
            },
            splitserve={"type": "object"},
        ),
        "Tokenize": _object(
            {
                "count": _COUNT,
                "max_model_len": _COUNT,
                "tokens": ids,
                "token_strs": {"anyOf": [{"type": "array", "items": _STRING}, {"type": "null"}]},
            }
        ),
        "Detokenize": _object({"prompt": _STRING}),
        "Responses": {"type": "object", "description": "OpenAI's response object"},
        "Messages": {"type": "object", "description": "Anthropic's message object"},
        "MessagesError": _object({"type": {"const": "error"}, "error": _object({"type": _STRING, "message": _STRING})}),
        "Count": _object({"input_tokens": _COUNT}),
    }


def _answer(kind: str, names: Sequence[str], choice: Json) -> Json:
    """Return the schema of an answer. ``return_route`` adds ``splitserve``, ``return_token_ids`` adds ``token_ids``."""
    scores: Json = {"type": "array", "items": {"type": ["object", "null"]}}
    entry = _object(choice, token_ids={"type": "array", "items": _COUNT}, prompt_logprobs=scores)
    fields = {
        "id": _STRING,
        "object": {"const": kind},
        "created": _INTEGER,
        "model": {"enum": list(names)},
        "choices": {"type": "array", "items": entry, "minItems": 1},
        "usage": _ref("Usage"),
    }
    return _object(fields, splitserve={"type": "object"})


def _requests(names: Sequence[str]) -> Json:
    """Return the schemas of all bodies and of their parts."""
    model: Json = {"enum": [*names, None], "description": MEANINGS["model"]}
    schemas = dict(_SCHEMAS)
    for body in _BODIES:
        schema = schemas[body.__name__]
        schemas[body.__name__] = schema | {"properties": schema["properties"] | {"model": model}}
    return schemas


def _schemas_of_bodies() -> Json:
    """Return the schemas of all bodies and of their parts, before the model's names are known."""
    schemas: Json = {}
    for body in _BODIES:
        schema = body.model_json_schema(ref_template=_REFERENCE)
        schemas |= schema.pop("$defs", {})
        for field, value in schema["properties"].items():
            declared = [form["description"] for form in value.get("anyOf", ()) if "description" in form]
            value.setdefault("description", MEANINGS.get(field) or "".join(declared))
        for field, neutral in body.neutral.items():
            schema["properties"].setdefault(
                field, {"enum": [None, *neutral], "description": "Not supported yet: neutral values only"}
            )
        schemas[body.__name__] = schema
    return schemas


_BODIES: tuple[type[ModelBody], ...] = (
    CompletionRequest,
    ChatCompletionRequest,
    GenerateRequest,
    TokenizeRequest,
    DetokenizeRequest,
    ResponsesRequest,
    MessagesRequest,
    CountRequest,
)
_SCHEMAS = _schemas_of_bodies()  # once, when this module is imported: routers that are forked have them


def _object(fields: Json, **optional: Json) -> Json:
    """Return the schema of an object with all of ``fields``, any of ``optional``, and no others."""
    properties = fields | optional
    return {"type": "object", "properties": properties, "required": list(fields), "additionalProperties": False}


def _status(value: str) -> Json:
    return _object({"status": {"const": value}})


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _ref(name: str) -> Json:
    return {"$ref": _REFERENCE.format(model=name)}
