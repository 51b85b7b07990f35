"""Web pages of other origins that may call the endpoint (CORS)."""

from collections.abc import Collection

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

ANY_ORIGIN = "*"
_MAX_AGE_SECONDS = 600


def allow_origins(app: ASGIApp, origins: Collection[str]) -> ASGIApp:
    """Return ``app`` with answers that let pages of ``origins`` read them; without origins, ``app`` itself.

    Preflights carry no key: this belongs outside of the check of the API key.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        allow_private_network=ANY_ORIGIN not in origins,  # pages of named origins may call a server on loopback
        expose_headers=["x-request-id", "traceparent", "retry-after"],
        max_age=_MAX_AGE_SECONDS,
    )
