"""Tool calls in a growing text of JSON: the function's name as soon as it is complete, the arguments as they come.

Reads one call, a list of calls, or several calls one after the other: ``{"name": ..., "arguments": ...}``, with the
keys in any order, ``parameters`` for ``arguments``, and perhaps within ``{"type": "function", "function": {...}}``.
Arguments are passed on as the model wrote them, valid or not.
"""

import json

import msgspec

_NAME_KEY = "name"
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_WRAPPER_KEY = "function"
_CLOSING = {"{": "}", "[": "]"}


class CallText(msgspec.Struct, frozen=True, gc=False):
    """Addition to a call: its name, first of all, or more of its arguments."""

    name: str = ""
    arguments: str = ""


class JsonCalls:
    """Reader of calls. An object without a name adds nothing."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._stack: list[str] = []  # open brackets
        self._call_depth = 0  # depth within the object of the current call; 0: there is none
        self._is_in_string = False
        self._is_escaped = False
        self._expects_key = False
        self._key = ""
        self._value: list[str] = []  # text of a key, or of a value that is no object or list
        self._is_in_arguments = False
        self._found: list[CallText] = []
        self._name = ""  # of the current call
        self._arguments: list[str] = []  # not passed on so far
        self._has_arguments = False

    def push(self, text: str) -> list[CallText]:
        """Take in more text; return what it adds to calls."""
        for char in text:
            self._push(char)
        self._pass_arguments_on()
        found, self._found = self._found, []
        return found

    @property
    def _is_at_call(self) -> bool:
        return 0 < self._call_depth == len(self._stack)

    def _push(self, char: str) -> None:
        if self._is_in_string:
            self._keep(char)
            self._continue_string(char)
        elif char == '"':
            self._is_in_string = True
            self._keep(char)
        elif char in "{[":
            self._open(char)
        elif char in "]}":
            self._close(char)
        elif char == ":" and self._is_at_call:
            self._expects_key = False
            self._value = []
        elif char == "," and self._is_at_call:
            self._end_value()
            self._expects_key = True
            self._key = ""
        elif not (self._is_at_call and char.isspace()):
            self._keep(char)

    def _keep(self, char: str) -> None:
        if self._is_in_arguments:
            self._arguments.append(char)
        elif self._is_at_call:
            self._value.append(char)

    def _continue_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_in_string = False
            if self._is_at_call and self._expects_key:
                self._key = _text_of(self._value)
                self._value = []
            elif self._is_at_call:
                self._end_value()

    def _open(self, char: str) -> None:
        is_value = self._is_at_call and not self._expects_key
        is_call = char == "{" and (not self._call_depth or (is_value and self._key == _WRAPPER_KEY))
        if is_value and self._key in _ARGUMENT_KEYS and not self._has_arguments:
            self._is_in_arguments = self._has_arguments = True
        if self._is_in_arguments:
            self._keep(char)
        self._stack.append(char)
        if is_call:
            self._call_depth = len(self._stack)
            self._expects_key = True
            self._key = ""
            self._value = []

    def _close(self, char: str) -> None:
        if not self._stack or _CLOSING[self._stack[-1]] != char:
            self._keep(char)  # no JSON: the arguments are passed on as they are
        elif self._is_at_call:
            self._end_value()
            self._stack.pop()
            if self._stack and self._stack[-1] == "{":  # the call was within a wrapper
                self._call_depth = len(self._stack)
                self._key = ""
            else:
                self._end_call()
        else:
            if self._is_in_arguments:
                self._keep(char)
            self._stack.pop()
            self._is_in_arguments = self._is_in_arguments and not self._is_at_call

    def _end_value(self) -> None:
        """Handle the end of a value that is no object or list; objects and lists leave no text here."""
        text, self._value = self._value, []
        if not text:
            return
        if self._key == _NAME_KEY and not self._name:
            self._name = _text_of(text)
            if self._name:
                self.num_calls += 1
                self._found.append(CallText(name=self._name))
        elif self._key in _ARGUMENT_KEYS and not self._has_arguments and text != list("null"):
            self._has_arguments = True
            self._arguments = [_text_of(text) or "".join(text)]  # a string holds JSON in turn

    def _pass_arguments_on(self) -> None:
        if self._name and self._arguments:
            self._found.append(CallText(arguments="".join(self._arguments)))
            self._arguments = []

    def _end_call(self) -> None:
        if not self._has_arguments:
            self._arguments = ["{}"]
        self._pass_arguments_on()
        self._call_depth = 0
        self._name = ""
        self._arguments = []
        self._has_arguments = False


def _text_of(literal: list[str]) -> str:
    """Return the text of a JSON string; "" if it is none."""
    try:
        value = json.loads("".join(literal))
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
