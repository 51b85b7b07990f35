"""Judgement of the documents in answers of the real storm, by ``jsonschema``. Not a test module."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import jsonschema

from random_schemas import completed
from splitserve.common.grammars import GrammarTokenizer, load_grammar_tokenizer
from splitserve.router.text.tokenizer import ModelTokenizer
from storm_answers import ChoiceAnswer
from storm_requests import TOOLS, StormCase


class DocumentJudge:
    """Judge of documents and of arguments of calls; ``model``: the checkpoint's directory."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._tokenizer = ModelTokenizer(model)

    @cached_property
    def _vocabulary(self) -> GrammarTokenizer:
        return load_grammar_tokenizer(self._model, self._tokenizer.eos_token_ids)

    def check(self, case: StormCase, choice: ChoiceAnswer) -> bool:
        """Check a choice against the schema of its request, or against those of the tools that it was forced to call;
        return whether there was something to check. A document that a stop string, a stop token or the length has cut
        is completed first. Raises AssertionError, ValueError or jsonschema.ValidationError."""
        is_cut = "stop" in case.body or "stop_token_ids" in case.body or choice.finish_reason == "length"
        if case.body.get("tool_choice", "auto") != "auto":
            return not is_cut and self._check_calls(case, choice)
        if (schema := _schema_of(case.body)) is None or (is_cut and not choice.text):
            return False
        text = self._completed(choice.text, schema) if is_cut else choice.text
        jsonschema.validate(json.loads(text), schema)
        return True

    def _check_calls(self, case: StormCase, choice: ChoiceAnswer) -> bool:
        assert choice.calls, f"{case.name} ended without the call that it was forced to make"
        for call in choice.calls:
            jsonschema.validate(json.loads(call.arguments), TOOLS[call.name])
        return True

    def _completed(self, text: str, schema: dict[str, Any]) -> str:
        begun = text.rstrip("\ufffd")  # a character of which the first bytes are there
        ids = self._tokenizer.encode(begun, add_special_tokens=False).ids
        whole = completed(ids, schema, self._vocabulary, self._tokenizer)
        assert whole is not None, f"no document by the schema begins with {text!r}"
        return whole


def _schema_of(body: dict[str, Any]) -> dict[str, Any] | None:
    """Return the JSON schema that a request's answer must satisfy; None for none."""
    if "response_format" in body:
        schema: dict[str, Any] = body["response_format"].get("json_schema", {}).get("schema", {"type": "object"})
        return schema
    return body.get("structured_outputs", {}).get("json")
