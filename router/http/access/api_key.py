"""Keys of a server: those of operators and of clients, and those of tenants."""

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
    """ASGI middleware that answers 401 to requests without a key, and 403 under /admin to those with another key than
    the admin key, before it reads the body. Without an admin key, the API key opens /admin. Without any key all pass;
    but only a server that answers its own machine alone lets them operate the cluster (POST under /admin)."""

    def __init__(
        self, app: ASGIApp, api_key: str, admin_key: str, tenants: Callable[[], Tenants], *, local_only: bool
    ) -> None:
        self._app = app
        self._api = _digest_of(api_key)
        self._admin = _digest_of(admin_key)
        self._tenants = tenants
        self._local_only = local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._check(scope) if scope["type"] == "http" and scope["path"].startswith(KEYED_PATHS) else None
        if error is None:
            await self._app(scope, receive, send)
            return
        headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
        await Response(error.encode(), error.status, headers, "application/json")(scope, receive, send)

    def _check(self, scope: MutableMapping[str, Any]) -> ApiError | None:
        """Note the tenant of a request, or return the error that answers it."""
        tenants, is_admin = self._tenants(), scope["path"].startswith(_ADMIN_PATH)
        if not (is_admin and self._admin) and not self._api and tenants.is_empty:
            return _NO_KEY if is_admin and scope["method"] == "POST" and not self._local_only else None
        key = _key_of(scope["headers"])
        if _fits(key, self._admin):
            return None
        if _fits(key, self._api):
            return _NOT_THE_ADMIN_KEY if is_admin and self._admin else None
        tenant = tenants.of_key(key)
        if tenant is None:
            return ApiError(
                401, "incorrect or missing API key: send 'Authorization: Bearer KEY'", code="invalid_api_key"
            )
        if is_admin:
            return _TENANTS_KEY
        scope[_TENANT] = tenant.name
        return None


_NO_KEY = ApiError(
    403,
    "operations are off without a key where other machines can reach the server: set an admin key "
    "(SPLITSERVE_ADMIN_KEY or --admin-key-file) or an API key",
    code="operations_disabled",
)
_NOT_THE_ADMIN_KEY = ApiError(403, "this is the API key; /admin takes the admin key", code="not_an_operator")
_TENANTS_KEY = ApiError(
    403, "this key is a tenant's; /admin takes the cluster's admin key, or its API key", code="not_an_operator"
)


def _digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest() if key else b""


def _fits(key: bytes, digest: bytes) -> bool:
    return bool(digest) and hmac.compare_digest(hashlib.sha256(key).digest(), digest)


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
