"""Errors of the HTTP interface, in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from typing import Any

import msgspec

from splitserve.router.requests.operations.refusal import OperationRefusedError, RefusalReason
from splitserve.router.requests.state import Failure, FailureReason

RETRY_AFTER_SECONDS = 1
MAX_MESSAGE_CHARS = 2000
MAX_PARAM_CHARS = 200

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def clipped(text: str, max_chars: int) -> str:
    """Return ``text``, cut after ``max_chars``: names and values in messages come from clients and files."""
    return text if len(text) <= max_chars else f"{text[:max_chars]}... ({len(text)} characters)"


class ApiError(Exception):
    """An answer other than 200. ``param`` names the request's field at fault; ``retry_after_seconds`` is sent with 429
    and 503. Long texts are cut, since they may repeat input of the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: int = RETRY_AFTER_SECONDS,
    ) -> None:
        message = clipped(message, MAX_MESSAGE_CHARS)
        super().__init__(message)
        self._retry_after_seconds = retry_after_seconds
        self.status = status
        self.message = message
        self.param = None if param is None else clipped(param, MAX_PARAM_CHARS)
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def encode(self) -> bytes:
        return msgspec.json.encode(self.body())

    def headers(self) -> dict[str, str]:
        return {"retry-after": str(self._retry_after_seconds)} if self.status in (429, 503) else {}


def of_prompt(error: ApiError, index: int, num_prompts: int) -> ApiError:
    """Let an error say which of several prompts it is about."""
    if num_prompts > 1:
        error.message = f"prompt[{index}]: {error.message}"
    return error


_STATUS_BY_REASON = {
    FailureReason.INVALID: 400,
    FailureReason.OVERLOADED: 503,
    FailureReason.DEADLINE: 504,
    FailureReason.HANDOVER: 502,
    FailureReason.INTERNAL: 502,
    FailureReason.WORKER_LOST: 503,
    FailureReason.CONTRADICTION: 502,
    FailureReason.SHUTDOWN: 503,
    FailureReason.PAUSED: 503,
}


def error_of_failure(failure: Failure) -> ApiError:
    """Return the answer for a request that failed after its placement."""
    return ApiError(_STATUS_BY_REASON[failure.reason], failure.message, code=failure.reason.value)


_STATUS_AND_PARAM_BY_REFUSAL = {
    RefusalReason.UNKNOWN_WORKER: (404, "worker"),
    RefusalReason.PAUSED: (409, None),
    RefusalReason.NOT_READY: (409, None),
    RefusalReason.LAST_WORKER: (409, "force"),
    RefusalReason.NO_WORKER: (503, None),
}


def error_of_refusal(refusal: OperationRefusedError) -> ApiError:
    """Return the answer to an operator whose act was refused."""
    status, param = _STATUS_AND_PARAM_BY_REFUSAL[refusal.reason]
    return ApiError(status, str(refusal), param=param, code=refusal.reason.value)
