"""Structured output on real clusters: the same constrained tokens on every shape, and after the loss of a worker."""

import json
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from random_schemas import judge
from serving import complete_all, wait_until_quiet, worker_metrics
from small_clusters import body, cluster
from splitserve.orchestration.cluster.launcher import LocalCluster
from waiting import wait_until

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LONG = {"type": "array", "items": {"enum": ["the next token", "seven apples", 12.5, None, False]}, "minItems": 40}
PATTERN = r"[a-f]{3}-\d{2,4}( the)*"
CONSTRAINTS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}},
    {"structured_outputs": {"json": LONG}},
    {"structured_outputs": {"json": json.dumps({"type": "array", "items": PERSON, "minItems": 12})}},
    {"structured_outputs": {"regex": PATTERN}},
    {"structured_outputs": {"choice": ["yes", "no", "perhaps tomorrow"]}},
    {"structured_outputs": {"grammar": 'start: item ("," item)*\nitem: "a" | "b" item | "(" start ")"'}},
    {"response_format": {"type": "json_object"}},
]


def bodies(model: Path) -> list[dict[str, Any]]:
    """Two requests for each constraint, greedy and drawn, beside others without one."""
    found = []
    for number, constraint in enumerate([*CONSTRAINTS, {}]):
        prompt = [300 + (7 * number + 3 * position) % 900 for position in range(20 + 9 * number)]
        for temperature in (0, 0.9):
            options = {"temperature": temperature, "seed": number, "max_tokens": 64, "ignore_eos": False}
            found.append(body(model, prompt, **options, **constraint))
    return found


def token_ids(answers: list[dict[str, Any]]) -> list[list[int]]:
    assert [answer["status"] for answer in answers] == [200] * len(answers), answers
    return [answer["choices"][0]["token_ids"] for answer in answers]


def check_text(constraint: dict[str, Any], choice: dict[str, Any]) -> None:
    """A text that ended by itself satisfies its constraint."""
    if choice["finish_reason"] != "stop" or not constraint:
        return
    outputs, text = constraint.get("structured_outputs", {}), choice["text"]
    if "regex" in outputs:
        assert re.fullmatch(PATTERN, text)
    elif "choice" in outputs:
        assert text in outputs["choice"]
    elif "grammar" in outputs:
        assert re.fullmatch(r"[ab(),]+", text) and text.count("(") == text.count(")")
    else:
        schema = outputs.get("json") or constraint["response_format"].get("json_schema", {}).get("schema")
        schema = json.loads(schema) if isinstance(schema, str) else schema or {"type": "object"}
        jsonschema.validate(json.loads(text), schema)


@pytest.fixture(scope="module")
def mixed(tiny_qwen3: Path) -> Iterator[LocalCluster]:
    with cluster(tiny_qwen3, "mixed") as running:
        yield running


@pytest.fixture(scope="module")
def expected(mixed: LocalCluster, tiny_qwen3: Path) -> list[list[int]]:
    """Tokens of one undisturbed worker."""
    alone = complete_all(mixed.url, bodies(tiny_qwen3), at_once=False)
    together = complete_all(mixed.url, bodies(tiny_qwen3), at_once=True)
    assert token_ids(alone) == token_ids(together)
    constraints = [constraint for constraint in [*CONSTRAINTS, {}] for _ in range(2)]
    for constraint, answer in zip(constraints, alone, strict=True):
        check_text(constraint, answer["choices"][0])
    assert sum(answer["choices"][0]["finish_reason"] == "stop" for answer in alone) >= 4
    return token_ids(alone)


@pytest.mark.slow
def test_a_small_pool_and_a_lost_worker_change_no_token(tiny_qwen3: Path, expected: list[list[int]]) -> None:
    """Two decode workers that preempt; one of them is killed when answers have begun."""
    settings = {"kv_memory_bytes": 32 * 65536, "max_model_len": 384}
    with cluster(tiny_qwen3, "2P2D", **settings) as running:
        calm = complete_all(running.url, bodies(tiny_qwen3), at_once=True)
        assert token_ids(calm) == expected
        assert sum(each["preemptions_total"] for each in wait_until_quiet(running.url).values()) > 0
        before = decoded(running)
        killer = threading.Thread(target=kill_when_busy, args=(running, before))
        killer.start()
        storm = complete_all(running.url, bodies(tiny_qwen3), at_once=True)
        killer.join()
        assert token_ids(storm) == expected
        attempts = [answer["splitserve"]["attempts"] for answer in storm]
        assert max(attempts) > 1, "no answer lost its worker"


def decoded(running: LocalCluster) -> float:
    return sum(each["output_tokens_total"] for each in worker_metrics(running.url).values())


def kill_when_busy(running: LocalCluster, before: float) -> None:
    wait_until(lambda: decoded(running) > before + 50, "answers that have begun")
    running.send_signal("decode-0", signal.SIGKILL)


def test_errors_name_the_field_and_come_before_any_work(mixed: LocalCluster, tiny_qwen3: Path) -> None:
    before = sum(each["prompt_tokens_total"] for each in wait_until_quiet(mixed.url).values())
    unsupported = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": unsupported}}
    refused = [
        ({"response_format": schema}, "response_format.json_schema.schema", "keywords can't be enforced: not"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex", "look-around"),
        ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs.json", "no text satisfies it"),
    ]
    answers = complete_all(mixed.url, [body(tiny_qwen3, [400], **fields) for fields, _, _ in refused], at_once=False)
    for (_, param, message), answer in zip(refused, answers, strict=True):
        assert (answer["status"], answer["error"]["param"]) == (400, param), answer
        assert message in answer["error"]["message"]
    schema["json_schema"]["strict"] = False
    (answer,) = complete_all(mixed.url, [body(tiny_qwen3, [400], response_format=schema)], at_once=False)
    assert answer["status"] == 200, answer
    after = sum(each["prompt_tokens_total"] for each in wait_until_quiet(mixed.url).values())
    assert after == before + 1, "a refused request was computed"


def test_answers_satisfy_random_schemas(mixed: LocalCluster, tiny_qwen3: Path) -> None:
    outcomes = judge(mixed.url, tiny_qwen3, range(60))
    assert not outcomes.problems, outcomes.problems[:3]
    assert outcomes.ended >= outcomes.cut and 0 < outcomes.num_refused <= 0.2 * 60, outcomes
