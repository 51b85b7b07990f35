"""The API key of a server."""

import hashlib
import hmac

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from splitserve.router.http.api_error import ApiError

KEYED_PATHS = ("/v1/", "/admin/", "/tokenize", "/detokenize")


class RequireKey:
    """ASGI middleware that answers 401 under /v1 and /admin unless the request carries the API key. It checks the key
    before it reads the body."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._digest = hashlib.sha256(api_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_free = scope["type"] != "http" or not scope["path"].startswith(KEYED_PATHS)
        if is_free or self._is_allowed(scope["headers"]):
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "incorrect or missing API key: send 'Authorization: Bearer KEY'", code="invalid_api_key")
        await Response(error.encode(), 401, {"www-authenticate": "Bearer"}, "application/json")(scope, receive, send)

    def _is_allowed(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name in (b"authorization", b"x-api-key")]
        names = [name for name, _ in headers if name in (b"authorization", b"x-api-key")]
        if names == [b"x-api-key"]:  # as Anthropic's clients send it
            scheme, key = b"bearer", given[0]
        else:
            scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        # Digests have equal lengths, so that the comparison's time is independent of the key.
        return scheme.lower() == b"bearer" and hmac.compare_digest(hashlib.sha256(key.strip()).digest(), self._digest)
