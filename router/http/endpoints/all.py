"""The endpoints of this folder, by path."""

from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from splitserve.router.http.endpoints.generate import Generate
from splitserve.router.http.endpoints.tokens import Tokens
from splitserve.router.http.serving import Serving

Handler: TypeAlias = Callable[[Request], Coroutine[Any, Any, Response]]


def endpoints(serving: Serving) -> list[tuple[str, Handler]]:
    """Return the paths that take POST, with their handlers."""
    tokens = Tokens(serving)
    return [
        ("/tokenize", tokens.tokenize),
        ("/detokenize", tokens.detokenize),
        ("/v1/generate", Generate(serving).generate),
    ]
