"""The served model as clients see it: its ids, and the sampling parameters of requests that set none."""

import time
from typing import Any

from splitserve.router.http.api_error import ApiError
from splitserve.router.text.sampling_defaults import SamplingDefaults


class ServedModel:
    """The one model of a router. ``names`` are its ids, the main one first."""

    def __init__(self, names: tuple[str, ...], defaults: SamplingDefaults) -> None:
        self.names = names
        self._defaults = defaults
        self._created = int(time.time())

    def name(self, given: str | None) -> str:
        """Return the id that a request means: ``given``, or the main one. Raises :class:`ApiError` 404."""
        if given is None:
            return self.names[0]
        if given not in self.names:
            served = ", ".join(repr(name) for name in self.names)
            message = f"the model {given!r} does not exist; this server serves {served}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return given

    def cards(self) -> list[dict[str, Any]]:
        """Return the model under each of its ids, as in OpenAI's list of models."""
        return [self.card(name) for name in self.names]

    def card(self, name: str) -> dict[str, Any]:
        """Return the model as OpenAI's object; ``sampling_defaults`` and ``root``, the main id, are additions."""
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "splitserve",
            "root": self.names[0],
            "sampling_defaults": self._defaults.values,
        }
