"""Protection against web pages that a user of the machine visits, for a server that only its loopback address protects.

A page's script can send requests to 127.0.0.1. If its own host name resolves there (DNS rebinding), it can also read
the answers. Browsers send the host that a request is meant for (Host) and the page's origin (Origin).
"""

import functools
import re
from collections.abc import Awaitable, Collection

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from splitserve.common.security import is_loopback
from splitserve.router.http.api_error import ApiError

_AUTHORITY = re.compile(r"(\[[0-9a-f:.]*\]|[^:\[\]@/]*)(?::[0-9]*)?")
_MAX_AUTHORITY = 100
_REMEDY = (
    "without an API key this server answers requests to and from this machine only: call it by localhost or 127.0.0.1 "
    "(a proxy has to send that as Host), or set an API key (SPLITSERVE_API_KEY or --api-key-file); --allowed-origins "
    "names web pages that may call it"
)


class RequireLocal:
    """ASGI middleware that answers 403 unless Host and Origin, if given, name a loopback host.

    Origin may also be one of ``allowed_origins``, which the server's owner trusts; Host may not: another name there
    shows DNS rebinding.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Collection[str] = ()) -> None:
        self._app = app
        self._allowed_origins = frozenset(origin.encode() for origin in allowed_origins)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        for name, value in scope.get("headers", ()):
            is_foreign_origin = name == b"origin" and value not in self._allowed_origins and not is_local_origin(value)
            if is_foreign_origin or (name == b"host" and not is_local(value)):
                shown = value[:_MAX_AUTHORITY].decode("ascii", "backslashreplace")
                error = ApiError(
                    403, f"{name.decode().title()} is {shown!r}: {_REMEDY}", code=f"foreign_{name.decode()}"
                )
                return Response(error.encode(), 403, media_type="application/json")(scope, receive, send)
        return self._app(scope, receive, send)


@functools.lru_cache(maxsize=64)
def is_local(authority: bytes) -> bool:
    """Return whether ``authority`` (host or host:port, IPv6 in brackets) is a loopback address or localhost."""
    if len(authority) > _MAX_AUTHORITY:
        return False
    match = _AUTHORITY.fullmatch(authority.decode("latin-1").lower())
    return match is not None and is_loopback(match[1])


def is_local_origin(origin: bytes) -> bool:
    scheme, separator, authority = origin.partition(b"://")
    return bool(separator) and scheme in (b"http", b"https") and is_local(authority)
