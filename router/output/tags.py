"""Complete tags in a growing text, found by a pattern that comes with a response template."""

import re

import regex

from splitserve.router.output.search_budget import BoundedPattern, SearchBudget

_PLAIN_END = re.compile(r"(?<!\\)(?:\\[^\w\s]|[^\\\[\](){}.*+?|^$])+$")
_ESCAPE = re.compile(r"\\(.)")


class TagReader:
    """Reader of tags. Text that holds no complete tag so far isn't searched again with each addition, which would take
    quadratic time, but once the text that ends a tag has come, or once it has doubled."""

    def __init__(self, pattern: str, budget: SearchBudget) -> None:
        self._pattern = BoundedPattern(regex.compile(pattern, regex.DOTALL))
        self._budget = budget
        self._end = _plain_end(pattern)
        self._last = ""  # text, in which the next addition may complete the end of a tag
        self._rest: list[str] = []
        self._num_searched = 0
        self._num_unsearched = 0
        self.is_given_up = False
        """Whether a search took too long: no more tags are found."""

    def push(self, text: str, *, is_last: bool = False) -> list[str]:
        """Take in more text; return the tags found in it, in order. ``is_last``: no more text comes."""
        self._rest.append(text)
        self._num_unsearched += len(text)
        last = self._last + text
        self._last = last[max(0, len(last) - len(self._end) + 1) :]
        is_due = is_last or self._num_unsearched > self._num_searched or (self._end and self._end in last)
        return self._found() if is_due and not self.is_given_up else []

    def take_rest(self) -> str:
        """Return the text that follows the last tag found, and forget it."""
        rest, self._rest = "".join(self._rest), []
        return rest

    def _found(self) -> list[str]:
        rest = self.take_rest()
        tags: list[str] = []
        try:
            with self._budget:
                while (match := self._pattern.search(rest)) is not None and match.end():
                    tags.append(match.group())
                    rest = rest[match.end() :]
        except TimeoutError:
            self.is_given_up = True
        self._rest = [rest]
        self._num_searched, self._num_unsearched = len(rest), 0
        return tags


def _plain_end(pattern: str) -> str:
    """Return the text with which each match ends, as far as it is easily seen; a wrong one only delays searches."""
    found = _PLAIN_END.search(pattern)
    return "" if found is None else _ESCAPE.sub(r"\1", found[0])
