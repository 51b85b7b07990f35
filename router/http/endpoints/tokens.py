"""``/tokenize`` and ``/detokenize``, as vLLM has them: text or messages to token ids, and back."""

from typing import Annotated, Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitserve.router.http.access.request_id import arrival_of
from splitserve.router.http.api_error import ApiError
from splitserve.router.http.chat_fields import MAX_TOOLS, ChatMessage, Tool, check_messages, check_tools
from splitserve.router.http.schema import MAX_MESSAGES, ChatCompletionRequest, ModelBody, TemplateVariables, TokenId
from splitserve.router.http.serving import Serving
from splitserve.router.text.preparation import check_vocabulary

MAX_TOKENS = 1 << 18  # of a text or a list: more would hold the interpreter for too long


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "chat_template": (),
    "continue_final_message": (False,),
}
"""Parameters of vLLM's endpoint that aren't supported, with their neutral values besides null."""


class TokenizeRequest(ModelBody):
    """A text, or the messages of a chat."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = _NEUTRAL
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(ModelBody):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_TOKENS)]


class Tokens:
    """The handlers."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def tokenize(self, request: Request) -> Response:
        arrived_at = arrival_of(request)
        body, num_bytes = await self._serving.read(request, TokenizeRequest)
        _check(body)
        limits = await self._serving.limits(request, arrived_at, num_bytes)
        with self._serving.slot(request):
            token_ids = await self._tokens_of(body)
        strings = self._serving.preparation.strings_of(token_ids) if body.return_token_strs else None
        return JSONResponse(
            {
                "count": len(token_ids),
                "max_model_len": limits.max_model_len,
                "tokens": token_ids,
                "token_strs": strings,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        arrived_at = arrival_of(request)
        body, num_bytes = await self._serving.read(request, DetokenizeRequest)
        limits = await self._serving.limits(request, arrived_at, num_bytes)
        check_vocabulary(body.tokens, limits.vocab_size, "tokens")
        with self._serving.slot(request):
            return JSONResponse({"prompt": await self._serving.preparation.text_of(body.tokens)})

    async def _tokens_of(self, body: TokenizeRequest) -> list[int]:
        preparation = self._serving.preparation
        if body.messages is None:
            text, has_special = body.prompt or "", body.add_special_tokens is not False
        else:
            chat = ChatCompletionRequest(
                messages=body.messages, tools=body.tools, chat_template_kwargs=body.chat_template_kwargs
            )
            text, has_special = await preparation.chat_text(chat), bool(body.add_special_tokens)
        return await preparation.tokens_of(text, add_special_tokens=has_special, most=MAX_TOKENS)


def _check(body: TokenizeRequest) -> None:
    """Raise :class:`ApiError` 400 for fields that don't go together; a chat's are those of a chat completion."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt", code="invalid_value")
    if body.messages is not None:
        check_messages(body.messages)
        check_tools(body.tools or (), None)
        return
    for name in ("tools", "chat_template_kwargs"):
        if getattr(body, name):
            raise ApiError(
                400, f"{name} needs messages, but the request has a prompt", param=name, code="invalid_value"
            )
