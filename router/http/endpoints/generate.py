"""``/v1/generate``: token ids in, token ids out, with the version of the weights that drew them.

For programs that have a tokenizer of their own, and for training: nothing is turned into text, so that stop strings
don't exist here.
"""

import secrets
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from splitserve.router.http.access.request_id import arrival_of, request_id_of
from splitserve.router.http.api_error import ApiError
from splitserve.router.http.formats import ChunksFormat, Usage, scores_of, sse_event
from splitserve.router.http.schema import CompletionRequest, GenerationRequest, NumTop, TokenId
from splitserve.router.http.serving import Serving
from splitserve.router.scores.wanted import WantedScores
from splitserve.router.text.choice import Piece

_TEXT_FIELDS = ("stop", "bad_words", "include_stop_str_in_output", "skip_special_tokens")


class GenerateRequest(GenerationRequest):
    """Token ids of one prompt, and the parameters of sampling that concern tokens."""

    packed = "token_ids"

    token_ids: Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    prompt_logprobs: NumTop | None = None
    logprobs: NumTop | None = None

    @property
    def wanted_scores(self) -> WantedScores:
        """See :class:`GenerationRequest`."""
        hides_output = self.max_tokens == 0
        return WantedScores(self.logprobs, self.prompt_logprobs, hides_output=hides_output, as_ids=True)


class _TokensCompletion(CompletionRequest):
    """The same as a completion, for the preparation."""

    @property
    def wanted_scores(self) -> WantedScores:
        """See :class:`GenerationRequest`."""
        return msgspec.structs.replace(super().wanted_scores, as_ids=True)


class TokensFormat(ChunksFormat):
    """Token ids as JSON: ``token_ids``, ``finish_reason``, ``usage``, ``weights_version``."""

    id_prefix = "gen"
    whole_kind = "generation"
    chunk_kind = "generation.chunk"
    weights_version = ""

    def chunk(self, index: int, piece: Piece, extra: dict[str, Any]) -> bytes:
        del index
        return sse_event({**self._head, **self._content(piece), **extra})

    def usage_chunk(self, usage: Usage) -> bytes:
        return sse_event({**self._head, "token_ids": [], "usage": usage.as_json()})

    def answer(self, choices: Sequence[Piece], usage: Usage, extra: dict[str, Any]) -> bytes:
        head = {**self._head, "object": self.whole_kind}
        return msgspec.json.encode({**head, **self._content(choices[0]), "usage": usage.as_json(), **extra})

    def _content(self, piece: Piece) -> dict[str, Any]:
        content = {
            "token_ids": list(piece.token_ids),
            "finish_reason": piece.finish_reason,
            "weights_version": self.weights_version,
        }
        return content | scores_of(piece)


class Generate:
    """The handler."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def generate(self, request: Request) -> Response:
        arrived_at = arrival_of(request)
        body, num_bytes = await self._serving.read(request, GenerateRequest)
        for name in _TEXT_FIELDS:
            if getattr(body, name) is not None:
                message = f"{name} concerns text, and this endpoint has token ids only; use /v1/completions"
                raise ApiError(400, message, param=name, code="unsupported_parameter")
        if body.num_choices > 1:
            message = f"n must be 1 at this endpoint, got {body.n}; send several requests, or use /v1/completions"
            raise ApiError(400, message, param="n", code="unsupported_parameter")
        answer_format = TokensFormat(
            self._serving.model.name(body.model),
            include_usage=body.include_usage,
            request_id=request_id_of(request) or secrets.token_hex(12),
        )
        answer_format.weights_version = self._serving.weights_version()
        completion = _TokensCompletion.model_construct(**{**dict(body), "prompt": body.token_ids})
        return await self._serving.generate(
            request,
            body,
            num_bytes,
            answer_format,
            lambda limits: self._serving.preparation.completion(completion, limits, param="token_ids"),
            arrived_at=arrived_at,
        )
