"""The state of a grammar in one sequence: a function of the constraint and the output's token ids."""

from collections.abc import Sequence

from llguidance import LLMatcher

from splitserve.common.errors import SplitserveError
from splitserve.models.constraints.grammars import ConstraintError, Grammars, problem_of
from splitserve.protocol.sampling_features import Constraint


class Progress:
    """The position in a grammar after an output, which :meth:`advance` extends.

    ``matcher`` is None before the grammar begins, and after an error. ``error`` says why no token can be drawn any
    more: the grammar can't be compiled here, the output doesn't match it, or it has become too complex.
    """

    def __init__(self, constraint: Constraint, grammars: Grammars) -> None:
        self.matcher: LLMatcher | None = None
        self.error = ""
        self._constraint = constraint
        self._grammars = grammars
        self._before: list[int] = []  # output tokens before the grammar begins
        self._num_taken = 0  # tokens since the grammar began
        self._end_token_ids = frozenset(constraint.end_token_ids)
        self._has_ended = False  # an end token has been taken
        self.advance([])

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens of the output. A replayed token costs 1 us."""
        if self.error:
            return
        try:
            new = token_ids if self.matcher is not None else self._begin(token_ids)
            if self.matcher is not None and new:
                self._take(self.matcher, new)
        except SplitserveError as error:
            self.fail(str(error))

    def check(self) -> None:
        """Note an error of the matcher, which it reports once a mask has been made."""
        if self.matcher is not None and self.matcher.is_error():
            self.fail(f"the grammar can't be followed: {problem_of(self.matcher)}")

    def fail(self, error: str) -> None:
        """Give the grammar up."""
        self.error, self.matcher = error, None

    @property
    def position(self) -> tuple[int, int, str]:
        """Tokens before the grammar and in it, and the error: equal for equal outputs."""
        return len(self._before), self._num_taken, self.error

    def _take(self, matcher: LLMatcher, token_ids: Sequence[int]) -> None:
        """Let the matcher take tokens up to the first one that ends the text: it takes no second one, but goes on to
        allow end tokens alone, which is what an output with ignore_eos needs."""
        self._num_taken += len(token_ids)
        is_end = token_ids[0] in self._end_token_ids
        if self._has_ended or (is_end and matcher.is_stopped()):
            return
        if not self._end_token_ids.isdisjoint(token_ids):
            self._has_ended = True
            end = next(number for number, each in enumerate(token_ids, 1) if each in self._end_token_ids)
            token_ids = token_ids[:end]
        if not matcher.consume_tokens(list(token_ids)):
            raise ConstraintError(f"the output doesn't match the grammar: {problem_of(matcher)}")

    def _begin(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return those of ``token_ids`` that the grammar applies to, with a matcher if it begins with or before
        them."""
        num_searched = len(self._before)
        self._before += token_ids
        begin = self._constraint.begin(self._before, num_searched)
        if begin is None:
            return ()
        new = self._before[begin:]
        del self._before[begin:]
        self.matcher = self._grammars.new_matcher(self._constraint)
        return new
