"""Constraints on a request's output: a grammar that the text has to match, in llguidance's form.

The router writes the grammar, and compiles it once in a bounded process before any work is done for the request.
Workers compile it within the same limits, and find its state by replaying the output: the tokens that may come next
are a function of the constraint and the output's token ids.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from splitserve.protocol.wire_numbers import TokenId

MAX_GRAMMAR_CHARS = 1 << 17
MAX_BEGIN_TOKENS = 64

GRAMMAR_LIMITS: dict[str, Any] = {
    "max_items_in_row": 1200,  # 10 ms a token in the most ambiguous grammars; 300 optional properties of an object
    "initial_lexer_fuel": 1_000_000,  # 20 ms
    "step_lexer_fuel": 100_000,  # 7 ms, once for each new state of the lexer
    "step_max_items": 50_000,  # 3 ms
    "max_lexer_states": 50_000,  # 1 to 2 KB each
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""Arguments of llguidance.LLParserLimits, the same everywhere: what the router has compiled, a worker can compile."""


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A grammar, and the part of the output that it applies to."""

    grammar: Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR_CHARS)]  # in Lark's syntax, or in llguidance's JSON
    # Ids that end the text, all of the model's: allowed where the grammar may end, and nothing else is after its end.
    end_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(min_length=1, max_length=256)]
    # The grammar begins after the first occurrence of these output tokens, such as </think>; at once if empty.
    begins_after: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_BEGIN_TOKENS)] = ()

    def begin(self, output_ids: Sequence[int], num_searched: int = 0) -> int | None:
        """Return the index of the first output token that the grammar applies to; None if it doesn't begin yet.

        ``num_searched``: tokens known not to complete the tokens that it begins after.
        """
        marker = self.begins_after
        if not marker:
            return 0
        for end in range(max(len(marker), num_searched + 1), len(output_ids) + 1):
            if output_ids[end - 1] == marker[-1] and tuple(output_ids[end - len(marker) : end]) == marker:
                return end
        return None
