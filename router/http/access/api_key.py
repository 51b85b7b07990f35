"""Keys of a server: the operators' own, and those of tenants."""

import hashlib
import hmac
from collections.abc import Callable, MutableMapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from splitserve.router.http.api_error import ApiError
from splitserve.router.requests.queue.tenants import OWN, Tenants

KEYED_PATHS = ("/v1/", "/admin/", "/tokenize", "/detokenize")
_ADMIN_PATH = "/admin/"
_TENANT = "splitserve.tenant"


class RequireKey:
    """ASGI middleware that answers 401 to requests without a key, and 403 under /admin to those with a tenant's key,
    before it reads the body. Without an API key and without tenants it lets all pass."""

    def __init__(self, app: ASGIApp, api_key: str, tenants: Callable[[], Tenants]) -> None:
        self._app = app
        self._digest = hashlib.sha256(api_key.encode()).digest() if api_key else b""
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._check(scope) if scope["type"] == "http" and scope["path"].startswith(KEYED_PATHS) else None
        if error is None:
            await self._app(scope, receive, send)
            return
        headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
        await Response(error.encode(), error.status, headers, "application/json")(scope, receive, send)

    def _check(self, scope: MutableMapping[str, Any]) -> ApiError | None:
        """Note the tenant of a request, or return the error that answers it."""
        tenants = self._tenants()
        if not self._digest and tenants.is_empty:
            return None
        key = _key_of(scope["headers"])
        if self._digest and hmac.compare_digest(hashlib.sha256(key).digest(), self._digest):
            return None
        tenant = tenants.of_key(key)
        if tenant is None:
            return ApiError(
                401, "incorrect or missing API key: send 'Authorization: Bearer KEY'", code="invalid_api_key"
            )
        if scope["path"].startswith(_ADMIN_PATH):
            return ApiError(403, "this key is a tenant's; /admin takes the cluster's API key", code="not_an_operator")
        scope[_TENANT] = tenant.name
        return None


def tenant_of(request: Request) -> str:
    """Return the name of the tenant whose key a request has."""
    name: str = request.scope.get(_TENANT, OWN)
    return name


def _key_of(headers: list[tuple[bytes, bytes]]) -> bytes:
    given = [value for name, value in headers if name in (b"authorization", b"x-api-key")]
    names = [name for name, _ in headers if name in (b"authorization", b"x-api-key")]
    if names == [b"x-api-key"]:  # as Anthropic's clients send it
        return given[0].strip()
    scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
    return key.strip() if scheme.lower() == b"bearer" else b""
