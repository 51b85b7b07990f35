"""GET /dashboard: the page's parts in one document. It has no data, so it needs no key; what it reads needs one."""

import base64
import functools
import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

MAX_BYTES = 150_000
_FOLDER = Path(__file__).parents[1] / "page"
_STYLES = ("style.css",)
_SCRIPTS = ("format.js", "parts.js", "lanes.js", "page.js")


async def dashboard(_request: Request) -> Response:
    """Answer with the page."""
    body, headers = page()
    return Response(body, headers=headers, media_type="text/html; charset=utf-8")


@functools.cache
def page() -> tuple[bytes, dict[str, str]]:
    """Return the page and its headers: the browser runs this script only, and asks this router only."""
    style = _joined(_STYLES)
    script = _joined(_SCRIPTS)
    html = (_FOLDER / "page.html").read_text(encoding="utf-8")
    body = html.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script).encode()
    policy = (
        f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return body, headers


def _joined(names: tuple[str, ...]) -> str:
    return "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in names)


def _source(text: str) -> str:
    """Return an inline part's name in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
