"""The served model as clients see it: its ids, and the sampling parameters of requests that set none."""

import time
from datetime import UTC, datetime
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

    def page(self, max_model_len: int | None) -> dict[str, Any]:
        """Return the model under each of its ids, as in OpenAI's and Anthropic's lists of models; see :meth:`card`."""
        return {
            "object": "list",
            "data": [self.card(name, max_model_len) for name in self.names],
            "has_more": False,
            "first_id": self.names[0],
            "last_id": self.names[-1],
        }

    def card(self, name: str, max_model_len: int | None) -> dict[str, Any]:
        """Return the model as OpenAI's object, which is Anthropic's as well.

        Additions are ``root``, the main id, ``sampling_defaults``, and, as vLLM has it, ``max_model_len``: the longest
        prompt with its output that the workers take, in tokens; None while there are none.
        """
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "splitserve",
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "root": self.names[0],
            "max_model_len": max_model_len,
            "sampling_defaults": self._defaults.values,
        }
