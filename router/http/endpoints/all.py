"""The endpoints of this folder, by path."""

from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from splitserve.router.http.endpoints.generate import Generate
from splitserve.router.http.endpoints.messages import Messages
from splitserve.router.http.endpoints.operators import Operators
from splitserve.router.http.endpoints.responses import Responses
from splitserve.router.http.endpoints.tokens import Tokens
from splitserve.router.http.serving import Serving

Handler: TypeAlias = Callable[[Request], Coroutine[Any, Any, Response]]


def endpoints(serving: Serving) -> list[tuple[str, Handler]]:
    """Return the paths that take POST, with their handlers."""
    tokens, messages = Tokens(serving), Messages(serving)
    operators = Operators(serving.dispatcher, serving.bodies)
    return [
        ("/tokenize", tokens.tokenize),
        ("/detokenize", tokens.detokenize),
        ("/v1/generate", Generate(serving).generate),
        ("/v1/responses", Responses(serving).create),
        ("/v1/messages", messages.create),
        ("/v1/messages/count_tokens", messages.count),
        ("/admin/pause", operators.pause),
        ("/admin/resume", operators.resume),
        ("/admin/reset-prefix-cache", operators.reset_prefix_cache),
        ("/admin/workers/{worker}/drain", operators.drain),
    ]
