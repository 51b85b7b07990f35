"""The calls of one message: their indices and identities."""

import re
import secrets

from splitserve.router.output.parts import Part, PartKind

_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_HALF = re.compile("[\ud800-\udfff]")
SHORT_CHARS = 9


class CallLog:
    """The calls so far.

    ``id_style``: ``call`` for identities as OpenAI's; ``short``: nine letters and digits, as Mistral's chat templates
    require; ``function``: the function's name and a number, as Kimi's.
    """

    def __init__(self, id_style: str = "call") -> None:
        self._id_style = id_style
        self.num_calls = 0

    def begin(self, name: str, call_id: str = "") -> Part:
        """Return the beginning of the next call; ``call_id`` is the model's own, if it wrote one."""
        name = _whole_characters(name)
        index = self.num_calls
        self.num_calls += 1
        return Part(PartKind.CALL, index=index, call_id=call_id or self._new_id(name, index), name=name)

    def arguments(self, text: str) -> Part:
        """Return more arguments of the last call."""
        return Part(PartKind.ARGUMENTS, _whole_characters(text), index=self.num_calls - 1)

    def _new_id(self, name: str, index: int) -> str:
        if self._id_style == "short":
            return "".join(secrets.choice(_ALPHABET) for _ in range(SHORT_CHARS))
        if self._id_style == "function":
            return f"functions.{name}:{index}"
        return f"call_{secrets.token_hex(12)}"


def _whole_characters(text: str) -> str:
    """Return the text with U+FFFD for each half of a character (``\\ud800`` in a model's JSON), which has no UTF-8."""
    return text if text.isascii() else _HALF.sub("\ufffd", text)
