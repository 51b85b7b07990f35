"""HTTP client of a cluster's endpoint for the doctor."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from splitserve import __version__
from splitserve.common.errors import ConfigError, SplitserveError
from splitserve.orchestration.spec.cluster_spec import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE

_KEYS = f"set {ADMIN_KEY_VARIABLE}, or {API_KEY_VARIABLE} where there is no admin key, or give --api-key-file PATH"

T = TypeVar("T")


class UnreachableError(SplitserveError):
    """Endpoint that doesn't answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes

    def json(self) -> Any:
        """Decode the body; None if it isn't JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    def words(self) -> str:
        """Return the answer's message, for people."""
        value = self.json()
        if isinstance(value, dict):
            error = value.get("error")
            said = error.get("message") if isinstance(error, dict) else value.get("reason") or value.get("status")
            if said:
                return str(said)
        return self.body[:200].decode(errors="replace")


class Endpoint:
    """Client of one endpoint, which ignores any proxy of the environment. Methods raise :class:`UnreachableError` if
    the endpoint doesn't answer, and :class:`ConfigError` if the key is wrong or missing."""

    def __init__(self, url: str, api_key: str = "", timeout_seconds: float = 10.0) -> None:
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
        except ValueError:  # of brackets, and of characters that aren't a host's
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is no URL of an endpoint; write it like http://127.0.0.1:8000")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_seconds = timeout_seconds
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str) -> Answer:
        request = urllib.request.Request(self.url + path, headers=self._headers)  # noqa: S310 - http or https
        return self._ask(request, self._timeout_seconds)

    def post(
        self, path: str, body: dict[str, Any], timeout_seconds: float, headers: Mapping[str, str] = MappingProxyType({})
    ) -> Answer:
        headers = {**self._headers, "Content-Type": "application/json", **headers}
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method="POST")  # noqa: S310
        return self._ask(request, timeout_seconds)

    def decoded(self, answer: Answer, kind: type[T]) -> T:
        """Decode an answer's body. Raises :class:`ConfigError` if it is nothing of this ``kind``."""
        try:
            return msgspec.json.decode(answer.body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(
                f"{self.url} answers in a form that this version ({__version__}) doesn't know: {error}"
            ) from error

    def _ask(self, request: urllib.request.Request, timeout_seconds: float) -> Answer:
        try:
            with self._opener.open(request, timeout=timeout_seconds) as response:
                answer = Answer(response.status, response.read())
        except urllib.error.HTTPError as error:
            answer = Answer(error.code, error.read())
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise UnreachableError(f"{request.full_url} gives no answer: {reason}") from error
        if answer.status == HTTPStatus.UNAUTHORIZED:
            raise ConfigError(f"{self.url} requires another API key: {_KEYS} ({answer.words()})")
        if answer.status == HTTPStatus.FORBIDDEN:
            raise ConfigError(f"{self.url} answers 403: {answer.words()}: {_KEYS}")
        return answer
