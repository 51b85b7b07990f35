"""Keys of a server: those of operators and of clients, and those of tenants."""

import hashlib
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from splitserve.router.http.api_error import ApiError
from splitserve.router.requests.queue.tenants import OWN, Tenants

KEYED_PATHS = ("/v1/", "/admin/", "/tokenize", "/detokenize")
_ADMIN_PATH = "/admin/"
_TENANT = "splitserve.tenant"
_DISABLED = "operations_disabled"


class RequireKey:
    """ASGI middleware that answers 401 to requests without a key, and 403 under /admin to those with another key than
    the admin key, before it reads the body. Without an admin key, the API key opens /admin. Without any key all pass;
    but only a server that answers its own machine alone lets them operate the cluster (POST under /admin).

    Where another key would do, ``WWW-Authenticate`` names it as the realm (RFC 9110, 11.6.1)."""

    def __init__(
        self, app: ASGIApp, api_key: str, admin_key: str, tenants: Callable[[], Tenants], *, local_only: bool
    ) -> None:
        self._app = app
        self._api = _digest_of(api_key)
        self._admin = _digest_of(admin_key)
        self._tenants = tenants
        self._local_only = local_only

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        error = self._check(scope) if scope["type"] == "http" and scope["path"].startswith(KEYED_PATHS) else None
        if error is None:
            return self._app(scope, receive, send)
        is_open_to_some = error.code != _DISABLED
        headers = {"www-authenticate": f'Bearer realm="{self._wanted(scope)}"'} if is_open_to_some else None
        return Response(error.encode(), error.status, headers, "application/json")(scope, receive, send)

    def _wanted(self, scope: MutableMapping[str, Any]) -> str:
        """Return the name of the key that opens the path."""
        return "admin key" if self._admin and scope["path"].startswith(_ADMIN_PATH) else "API key"

    def _check(self, scope: MutableMapping[str, Any]) -> ApiError | None:
        """Note the tenant of a request, or return the error that answers it."""
        tenants, is_admin, wanted = self._tenants(), scope["path"].startswith(_ADMIN_PATH), self._wanted(scope)
        is_closed = is_admin and not (self._admin or self._api)  # no key opens it
        if is_closed and not tenants.is_empty:
            return _TENANTS_KEYS_ALONE
        if not (is_admin and self._admin) and not self._api and tenants.is_empty:
            return _NO_KEY if is_closed and scope["method"] == "POST" and not self._local_only else None
        key = _key_of(scope["headers"])
        if _fits(key, self._admin):
            return None
        if _fits(key, self._api):
            return _NOT_THE_ADMIN_KEY if is_admin and self._admin else None
        tenant = tenants.of_key(key)
        if tenant is None:
            code = f"invalid_{wanted.lower().replace(' ', '_')}"
            return ApiError(401, f"incorrect or missing {wanted}: send 'Authorization: Bearer KEY'", code=code)
        if is_admin:
            return ApiError(403, f"this key is a tenant's; /admin takes the {wanted}", code="not_an_operator")
        scope[_TENANT] = tenant.name
        return None


_SET_A_KEY = "set an admin key (SPLITSERVE_ADMIN_KEY or --admin-key-file) or an API key"
_NO_KEY = ApiError(
    403,
    f"operations are off without a key where other machines can reach the server: {_SET_A_KEY}",
    code=_DISABLED,
)
_TENANTS_KEYS_ALONE = ApiError(403, f"/admin is off where only tenants have keys: {_SET_A_KEY}", code=_DISABLED)
_NOT_THE_ADMIN_KEY = ApiError(403, "this is the API key; /admin takes the admin key", code="not_an_operator")


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
