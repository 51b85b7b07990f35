"""Random JSON schemas, answered by a cluster and judged by ``jsonschema``. Not a test module.

    python tests/support/random_schemas.py --count 500 --first 0

The requests bias the tokens that close strings, lists and objects, so that most answers end by themselves. One that its
length has cut is completed by the shortest way on, and judged, too. With SPLITSERVE_FIGURES set, figures of the run go
to that file.
"""

import argparse
import json
import os
import random
import string
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
from llguidance import LLMatcher

from serving import complete_all
from splitserve.common.grammars import GrammarTokenizer, load_grammar_tokenizer
from splitserve.router.text.grammars import json_schema_grammar
from splitserve.router.text.tokenizer import ModelTokenizer

CLOSING = ("}", "]", '"', ',"', "0", "1", "}}", "]}", '"}', "},")
CLOSING_BIAS = 9.0
MAX_TOKENS = 120
_ENDINGS = ("}", "]", '"', "l", "e", "0", "1", ":", ",")
_CHARACTERS = string.printable.replace("\\", "")  # an escape would use the closing quote up
_MOST_FORCED = 4000
_FORMATS = ("uuid", "ipv4", "email")  # of dates Python knows no year 0, which RFC 3339 allows
_REFUSED_OFTEN = ("uniqueItems", "not", "if", "propertyNames", "dependentRequired", "contains")


@dataclass
class Outcomes:
    """Counts of what became of the schemas."""

    ended: int = 0  # answers that ended by themselves
    cut: int = 0  # by their length
    refused: Counter[str] = field(default_factory=Counter)  # schemas, by keyword
    problems: list[str] = field(default_factory=list)

    @property
    def num_refused(self) -> int:
        return sum(self.refused.values())

    @property
    def figures(self) -> Counter[str]:
        found = Counter({f"refused: {keyword}": count for keyword, count in self.refused.items()})
        answers = Counter({"ended": self.ended, "cut": self.cut, "refused": self.num_refused})
        found.update(answers)
        found["invalid documents"] = len(self.problems)
        return found


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema of at most four levels; one in twelve has a keyword that can't be enforced."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "format", "pattern"]
    if depth < 3:
        kinds += ["object"] * 6 + ["array"] * 3 + ["anyOf", "ref", "allOf"]
    schema = _schema_of(chance.choice(kinds), chance, depth)
    if depth == 0 and chance.random() < 1 / 12:
        schema = {**schema, chance.choice(_REFUSED_OFTEN): chance.choice([True, {"type": "string"}])}
    return schema


def _schema_of(kind: str, chance: random.Random, depth: int) -> dict[str, Any]:
    match kind:
        case "string":
            low = chance.randint(0, 3)
            return {"type": "string", "minLength": low, "maxLength": low + chance.randint(0, 12)}
        case "integer":
            return {"type": "integer", **_bounds(chance, 3)}
        case "number":
            step = {"multipleOf": 0.25} if chance.random() < 0.2 else {}
            return {"type": "number", **_bounds(chance, 0.5), **step}
        case "boolean" | "null":
            return {"type": [kind, "integer"]} if chance.random() < 0.3 else {"type": kind}
        case "enum":
            return {"enum": chance.sample(["red", "é", 1, 2.5, None, True, ["a", 1], {"b": 2}, "x y"], 3)}
        case "const":
            return {"const": chance.choice(["fixed", 42, None, {"k": ["v"]}])}
        case "format":
            return {"type": "string", "format": chance.choice(["date", "time", "date-time", "uuid", "ipv4", "email"])}
        case "pattern":
            return {"type": "string", "pattern": chance.choice([r"^[a-z]{2,5}$", r"^\d+-[AB]$", r"^(ab)+$", r"x"])}
        case "array":
            items = random_schema(chance, depth + 1)
            if chance.random() < 0.3:
                return {"type": "array", "prefixItems": [items, random_schema(chance, depth + 1)], "items": False}
            low = chance.randint(0, 2)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + chance.randint(0, 3)}
        case "anyOf":
            return {"anyOf": [random_schema(chance, depth + 1) for _ in range(2)]}
        case "allOf":
            return {"allOf": [_object(chance, depth + 1), {"type": "object", "required": ["a"]}]}
        case "ref":
            return {"$defs": {"d": random_schema(chance, 3)}, "type": "array", "items": _ref(depth), "maxItems": 3}
    return _object(chance, depth)


def _bounds(chance: random.Random, least: float) -> dict[str, float]:
    """Return one or two bounds of numbers, at least ``least`` apart; many are fractions, 0, or in the same unit."""
    low = chance.choice([0, 1, -1, -least, chance.randint(-50, 50), *(round(chance.uniform(-2, 2), n) for n in (1, 3))])
    high = round(low + least + chance.choice([0, 0.125, 1, chance.randint(1, 200)]), 3)
    bounds = {chance.choice(["minimum", "exclusiveMinimum"]): low, chance.choice(["maximum", "exclusiveMaximum"]): high}
    return dict(chance.sample(sorted(bounds.items()), chance.choice([1, 2, 2])))


def _ref(depth: int) -> dict[str, Any]:
    return {"$ref": "#/$defs/d"} if depth == 0 else {"type": "integer"}


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(["a", "b", "name", "total sum", "é", 'q"t', "x1"], chance.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(chance, depth + 1) for name in names},
        "required": chance.sample(names, chance.randint(0, len(names))),
    }
    if chance.random() < 0.8:
        schema["additionalProperties"] = False
    elif chance.random() < 0.5:
        schema["additionalProperties"] = {"type": "integer"}
    return schema


def judge(url: str, model: Path, seeds: Sequence[int]) -> Outcomes:
    """Have the cluster answer a random schema for each seed, and judge the answers."""
    tokenizer = ModelTokenizer(model)
    bias = {ids[0]: CLOSING_BIAS for ids in (_encode(tokenizer, text) for text in CLOSING) if len(ids) == 1}
    schemas = [random_schema(random.Random(seed)) for seed in seeds]
    bodies = [_body(model, *each, bias) for each in zip(seeds, schemas, strict=True)]
    answers = complete_all(url, bodies, at_once=True)
    # On a busy machine so many grammars at once are too many: these requests are sent again, one after the other.
    busy = [index for index, answer in enumerate(answers) if answer["status"] == 503]
    for index, answer in zip(busy, complete_all(url, [bodies[index] for index in busy], at_once=False), strict=True):
        answers[index] = answer
    outcomes = Outcomes()
    vocabulary = load_grammar_tokenizer(model, tokenizer.eos_token_ids)
    for seed, schema, answer in zip(seeds, schemas, answers, strict=True):
        if answer["status"] == 400:
            outcomes.refused[_keyword(answer["error"]["message"])] += 1
        elif answer["status"] != 200:
            outcomes.problems.append(f"seed {seed}: {answer}")
        elif problem := _problem(schema, answer["choices"][0], vocabulary, tokenizer, outcomes):
            outcomes.problems.append(f"seed {seed}: {problem}: {json.dumps(schema)}")
    return outcomes


def _encode(tokenizer: ModelTokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def _body(model: Path, seed: int, schema: dict[str, Any], bias: dict[int, float]) -> dict[str, Any]:
    chance = random.Random(seed)
    form = {"type": "json_schema", "json_schema": {"name": "random", "schema": schema, "strict": True}}
    return {
        "model": model.name,
        "prompt": [300 + chance.randrange(900) for _ in range(chance.randint(1, 40))],
        "max_tokens": MAX_TOKENS,
        "temperature": chance.choice([0.0, 0.8, 1.2]),
        "seed": seed,
        "return_token_ids": True,
        "response_format": form,
        "logit_bias": {str(token_id): value for token_id, value in bias.items()},
    }


def _problem(
    schema: dict[str, Any],
    choice: dict[str, Any],
    vocabulary: GrammarTokenizer,
    tokenizer: ModelTokenizer,
    outcomes: Outcomes,
) -> str:
    """Return what is wrong with an answer; "" for nothing."""
    text = choice["text"]
    if choice["finish_reason"] == "stop":
        outcomes.ended += 1
    else:
        outcomes.cut += 1
        whole = completed(choice["token_ids"], schema, vocabulary, tokenizer)
        if whole is None:
            return f"{text!r} is no beginning of an answer"
        text = whole
    try:
        value = json.loads(text)
        judge_of = jsonschema.Draft202012Validator
        jsonschema.validate(value, schema, judge_of, format_checker=jsonschema.FormatChecker(_FORMATS))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{text[-200:]!r}: {str(error).splitlines()[0][:200]}"
    return ""


def completed(
    token_ids: list[int], schema: dict[str, Any], vocabulary: GrammarTokenizer, tokenizer: ModelTokenizer
) -> str | None:
    """Return a cut answer with a short way to its end; None if no answer by the schema begins so."""
    grammar = json_schema_grammar(schema)
    matcher = LLMatcher(vocabulary.of(grammar), grammar, log_level=0)
    if not matcher.consume_tokens(token_ids):
        return None
    ids = token_ids + _completion(matcher, tokenizer)
    return vocabulary.usual.decode_bytes([each for each in ids if each not in tokenizer.eos_token_ids]).decode()


def _completion(matcher: LLMatcher, tokenizer: ModelTokenizer) -> list[int]:
    """Return the tokens of a short way to the end: forced ones, else the one used longest ago, so that no way leads
    round and round; at first those that close something."""
    preferred = [ids[0] for ids in (_encode(tokenizer, text) for text in _ENDINGS) if len(ids) == 1]
    preferred += [ids[0] for ids in (_encode(tokenizer, each) for each in _CHARACTERS) if len(ids) == 1]
    added: list[int] = []
    while not matcher.is_accepting() and len(added) < _MOST_FORCED:
        mask = matcher.compute_bitmask()
        allowed = [each for each in preferred if mask[each // 8] >> each % 8 & 1]
        allowed = allowed or [each for each in range(len(mask) * 8) if mask[each // 8] >> each % 8 & 1]
        latest = {token_id: position for position, token_id in enumerate(added)}
        forced = matcher.compute_ff_tokens() or [min(allowed, key=lambda each: latest.get(each, -1))]
        added += forced
        if not matcher.consume_tokens(forced):
            raise AssertionError(f"a forced token isn't allowed: {matcher.get_error()}")
    return added


def _keyword(message: str) -> str:
    """Return what a refusal names."""
    for words in ("can't be enforced: ", "Unknown format: ", "can't be used: "):
        if words in message:
            return message.partition(words)[2].partition(";")[0].split(": ")[0][:60]
    return message[:60]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    from small_clusters import cluster
    from splitserve.models.demo.checkpoint import write_demo_model

    with tempfile.TemporaryDirectory() as directory:
        model = write_demo_model(Path(directory) / "tiny", architecture="qwen3")
        outcomes = Outcomes()
        with cluster(model, "1P1D") as running:
            for first in range(options.first, options.first + options.count, 100):
                end = min(first + 100, options.first + options.count)
                part = judge(running.url, model, range(first, end))
                outcomes.ended += part.ended
                outcomes.cut += part.cut
                outcomes.refused += part.refused
                outcomes.problems += part.problems
    print(f"schemas: {options.count}, ended {outcomes.ended}, cut {outcomes.cut}, refused {outcomes.num_refused}")
    print(f"refused by keyword: {dict(outcomes.refused.most_common())}")
    print("\n".join(outcomes.problems[:10]))
    if path := os.environ.get("SPLITSERVE_FIGURES"):
        Path(path).write_text(json.dumps(outcomes.figures))
    few = outcomes.num_refused > 0.2 * options.count or 2 * outcomes.ended < outcomes.ended + outcomes.cut
    return 1 if outcomes.problems or few else 0


if __name__ == "__main__":
    sys.exit(main())
