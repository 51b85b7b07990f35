"""Constraints of requests: the grammar that a body asks for, checked before any other work is done for it."""

import re
from collections.abc import Mapping, Sequence

from splitserve.protocol.sampling_features import Constraint
from splitserve.router.http.api_error import ApiError
from splitserve.router.http.schema import ChatCompletionRequest, GenerationRequest
from splitserve.router.output.forced import rule_function_index
from splitserve.router.text.chat import ChatForm, forced_functions
from splitserve.router.text.grammars import GrammarError, bounded, schema_text
from splitserve.router.text.processes.grammar_checker import CheckerBusyError, GrammarChecker
from splitserve.router.text.structured_output import refused, requested_grammar

# llguidance's error for a schema in a grammar
_IN_SCHEMA = re.compile(r"at (?P<line>\d+)\(\d+\): failed to compile JSON schema: (?P<reason>.*)")


class Constraints:
    """Maker of constraints for one model, whose outputs end with ``end_token_ids``."""

    def __init__(self, checker: GrammarChecker, end_token_ids: Sequence[int]) -> None:
        self._checker = checker
        self._end_token_ids = tuple(end_token_ids)

    async def of(self, request: GenerationRequest) -> Constraint | None:
        """Return the constraint that a body asks for, None if it asks for none. Raises :class:`ApiError` 400 that
        names the field, 503 if the grammar can't be checked now."""
        requested = requested_grammar(request.response_format, request.structured_outputs)
        return None if requested is None else await self.checked(*requested)

    async def of_chat(
        self, request: ChatCompletionRequest, form: ChatForm, prompt: str, token_ids: Mapping[str, int]
    ) -> Constraint | None:
        """Return the constraint of a chat: calls that ``tool_choice`` forces, or the answer's form; reasoning before
        either stays free. ``token_ids``: the vocabulary's added tokens. Raises :class:`ApiError` as :meth:`of` does.
        """
        requested = requested_grammar(request.response_format, request.structured_outputs)
        try:
            forced = form.forced_grammar(request, token_ids, prompt, schema_text)
        except GrammarError as error:
            raise refused("tools", error) from None
        if forced is not None and requested is not None:
            message = f"{requested[1]} and tool_choice both constrain the answer: give one of them"
            raise ApiError(400, message, param="tool_choice", code="invalid_value")
        if requested is not None:
            return await self.checked(form.after_reasoning(requested[0], prompt, token_ids), requested[1])
        functions = [function.name for function in forced_functions(request)]
        return None if forced is None else await self.checked(forced, "tools", functions)

    async def checked(
        self, grammar: str, field: str, functions: Sequence[str] = (), begins_after: Sequence[int] = ()
    ) -> Constraint:
        """Return the constraint by ``grammar``, which the body's ``field`` asks for, from the first occurrence of the
        tokens ``begins_after`` in the output on. ``functions``: names of those whose calls it forces. Raises
        :class:`ApiError` as :meth:`of` does."""
        if not self._end_token_ids:
            message = f"{field} can't be used: this model has no end-of-sequence token, so that no grammar could end"
            raise ApiError(400, message, param=field, code="unsupported_grammar")
        try:
            await self._checker.check(bounded(grammar))  # reasoning before the answer has made it longer
        except GrammarError as error:
            raise _refused_call(error, grammar, functions) if functions else refused(field, error) from None
        except CheckerBusyError as error:
            raise ApiError(503, str(error), code="overloaded") from None
        return Constraint(grammar, self._end_token_ids, tuple(begins_after))


def _refused_call(error: GrammarError, grammar: str, functions: Sequence[str]) -> ApiError:
    """Return the error for a grammar of calls; it names the function whose schema can't be used, and has no part of the
    grammar, which the client doesn't know."""
    reason = str(error).partition("\n")[0]
    found = _IN_SCHEMA.match(reason)
    index = found and rule_function_index(grammar.split("\n")[int(found["line"]) - 1])
    if found is None or index is None:
        return refused("tools", GrammarError(reason))
    return refused("tools", GrammarError(found["reason"]), functions[index])
