"""Compiled grammars of one model, kept for later requests with the same one."""

from collections import OrderedDict
from pathlib import Path
from threading import Lock

from llguidance import LLMatcher, LLParserLimits

from splitserve.common.errors import SplitserveError
from splitserve.common.grammars import GRAMMAR_LIMITS, GrammarTokenizer, load_grammar_tokenizer
from splitserve.protocol.sampling_features import Constraint

MAX_GRAMMARS = 64

_Source = tuple[str, tuple[int, ...]]


class ConstraintError(SplitserveError):
    """A constraint that this worker can't apply to a request's output."""


class Grammars:
    """Compiler of grammars for the tokenizer in ``model_dir``, which is loaded with the first of them. Safe to use
    from several threads; llguidance releases the GIL while it compiles."""

    def __init__(self, model_dir: Path, vocab_size: int, max_grammars: int = MAX_GRAMMARS) -> None:
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._max_grammars = max_grammars
        self._lock = Lock()
        self._tokenizers: dict[tuple[int, ...], GrammarTokenizer] = {}  # by end tokens: one, unless routers disagree
        self._compiled: OrderedDict[_Source, LLMatcher] = OrderedDict()  # least recently used first

    @property
    def num_compiled(self) -> int:
        """Grammars that are kept."""
        return len(self._compiled)

    def new_matcher(self, constraint: Constraint) -> LLMatcher:
        """Return a matcher at the grammar's beginning. Raises :class:`ConstraintError`, CheckpointError."""
        source = (constraint.grammar, constraint.end_token_ids)
        with self._lock:
            compiled = self._compiled.get(source)
            if compiled is None:
                compiled = self._compile(constraint)
                self._compiled[source] = compiled
                if len(self._compiled) > self._max_grammars:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(source)
            return compiled.deep_copy()

    def _compile(self, constraint: Constraint) -> LLMatcher:
        limits = LLParserLimits(**GRAMMAR_LIMITS)
        tokenizer = self._tokenizer(constraint.end_token_ids).of(constraint.grammar)
        matcher = LLMatcher(tokenizer, constraint.grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ConstraintError(f"the grammar can't be compiled: {problem_of(matcher)}")
        return matcher

    def _tokenizer(self, end_token_ids: tuple[int, ...]) -> GrammarTokenizer:
        tokenizer = self._tokenizers.get(end_token_ids)
        if tokenizer is None:
            if outside := [token_id for token_id in end_token_ids if token_id >= self._vocab_size]:
                raise ConstraintError(f"end tokens {outside} are outside the vocabulary of {self._vocab_size} tokens")
            tokenizer = load_grammar_tokenizer(self._model_dir, end_token_ids, self._vocab_size)
            self._tokenizers = {end_token_ids: tokenizer}
        return tokenizer


def problem_of(matcher: LLMatcher) -> str:
    """Return the reason why a matcher has failed, without the state that llguidance adds."""
    return (matcher.get_error() or matcher.stop_reason()).partition("\n")[0][:500]
