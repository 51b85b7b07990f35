"""The type of a request's body. Types that a web page may send without a preflight (forms, text, none) are refused."""

from email.message import Message

from starlette.requests import Request

from splitserve.router.http.api_error import ApiError

_JSON = "application/json"
_PLAIN = "identity"
_MAX_CHARACTERS = 100  # the rest is neither parsed nor shown


def check_json(request: Request) -> None:
    """Raise :class:`ApiError` 415 unless the request says that its body is JSON in UTF-8, and not compressed."""
    codings = ", ".join(request.headers.getlist("content-encoding"))
    if codings and {each.strip(" \t").lower() for each in codings.split(",")} - {"", _PLAIN}:
        what = f"the body's Content-Encoding is {codings[:_MAX_CHARACTERS]!r}"
        raise ApiError(415, f"{what}; send it uncompressed, without that header", code="unsupported_media_type")
    given = request.headers.getlist("content-type")
    if given == [_JSON]:
        return
    value = ", ".join(given)
    if len(value) <= _MAX_CHARACTERS and _is_json(value):
        return
    what = f"the body's Content-Type is {value[:_MAX_CHARACTERS]!r}" if given else "the body has no Content-Type"
    remedy = "it must be application/json, in UTF-8 (curl: -H 'Content-Type: application/json')"
    raise ApiError(415, f"{what}; {remedy}", code="unsupported_media_type")


def _is_json(value: str) -> bool:
    message = Message()
    message["content-type"] = value
    charset = message.get_param("charset", "utf-8")
    is_utf8 = isinstance(charset, str) and charset.lower() in ("utf-8", "utf8")
    return is_utf8 and message.get_content_type() == _JSON
