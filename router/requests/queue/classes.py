"""Classes of requests, with their objectives and priorities. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.protocol.config import RequestClass
from splitserve.router.http.api_error import ApiError, clipped

DEFAULT_CLASS = "default"
USUAL_TTFT_SECONDS = 30.0
"""Time after the arrival at which a request of a class without an objective for TTFT is due."""
_SHOWN_CHARS = 100


@dataclass(frozen=True, slots=True)
class Classes:
    """The declared classes, and that of requests which name none."""

    by_name: dict[str, RequestClass]

    @classmethod
    def declared(cls, classes: Sequence[RequestClass], ttft_ms: float, itl_ms: float) -> "Classes":
        """Return the classes; one named "default" is made of the cluster's objectives unless it is among them."""
        default = RequestClass(name=DEFAULT_CLASS, ttft_ms=ttft_ms, itl_ms=itl_ms)
        return cls({DEFAULT_CLASS: default} | {each.name: each for each in classes})

    def of(self, name: str) -> RequestClass:
        """Return a class by its name, "" for the default one. Raises :class:`ApiError` 400 for an unknown name."""
        found = self.by_name.get(name or DEFAULT_CLASS)
        if found is None:
            allowed = ", ".join(self.by_name)
            message = f"request_class is {clipped(name, _SHOWN_CHARS)!r}; it must be one of: {allowed}"
            raise ApiError(400, message, param="request_class", code="invalid_value")
        return found
