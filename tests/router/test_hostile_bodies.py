"""Bodies that are cheap to send and dear to parse: refused in words, while a stream beside them goes on."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from router_harness import RouterProcess, Workers, write_model_dir
from splitserve.benchmarks.attacks.bench import attacked_router, run_attack
from splitserve.benchmarks.attacks.http import Address
from splitserve.protocol.request import Role
from splitserve.router.http.api_error import ApiError
from splitserve.router.http.bodies import shape as body_shape
from splitserve.router.http.bodies.shape import BodyShape, check_shape, is_surely_small
from splitserve.router.http.parsing import parse, parse_checked
from splitserve.router.http.schema import ChatCompletionRequest, CompletionRequest
from waiting import wait_until

TRIES = 4  # asserted of the best: the router's threads wait for each other, too, where others have the cores
ANSWER_SECONDS = 60.0
MAX_STOP_MS = 100.0


@pytest.fixture(scope="module")
def target() -> Iterator[tuple[Address, tuple[int, int]]]:
    with attacked_router(num_descriptors=260) as found:
        yield found


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("900,000 unknown fields", "413"),
        ("250,000 unknown fields", "400"),
        ("130,000 empty messages", "400"),
        ("as many empty messages as pass", "200"),
        ("a million closed lists", "400"),
        ("brackets, 4 MiB deep", "400"),
        ("escaped quotes, 4 MiB", "400"),
        ("1 million floats", "400"),
        ("lists of token ids, 4 MiB", "400"),
        ("2 million token ids", "400"),
        ("a number of 4 million digits", "400"),
        ("one key four times, 1 MiB each", "400"),
        ("a profile request of 4 MiB", "413"),
    ],
)
def test_a_stream_goes_on_beside_it(target: tuple[Address, tuple[int, int]], name: str, status: str):
    rows = []
    for _ in range(TRIES):
        rows.append(run_attack(name, *target, ANSWER_SECONDS))
        # A refused body isn't read, and its connection may be cut before the answer has been read.
        answers = set(rows[-1]["outcomes"])
        assert status in answers and answers <= {status, "closed"}, rows
        if rows[-1]["longest_stop_ms"] < MAX_STOP_MS:
            return
    raise AssertionError(f"the stream stood still each time: {rows}")


# ---- counting ----


def reference(body: str) -> BodyShape:
    shape, depth, is_inside, is_escaped = BodyShape(), 0, False, False
    for char in body:
        if is_inside:
            is_inside = is_escaped or char != '"'
            is_escaped = char == "\\" and not is_escaped
            continue
        is_inside = char == '"'
        depth += (char in "[{") - (char in "]}")
        shape.depth = max(shape.depth, depth)
        shape.num_containers += char in "[{"
        shape.num_commas += char == ","
        shape.num_members += char == ":"
        shape.num_fields += char == ":" and depth == 1
    return shape


def random_value(rng: random.Random, depth: int = 0) -> object:
    text = "".join(rng.choices('\\"[]{},:a', k=rng.randrange(8)))
    match rng.randrange(5 if depth < 5 else 3):
        case 3:
            return [random_value(rng, depth + 1) for _ in range(rng.randrange(5))]
        case 4:
            return {text + str(index): random_value(rng, depth + 1) for index in range(rng.randrange(4))}
    return rng.choice([text, 1, None, 0.5, "é"])


def test_counts_are_exact_wherever_chunks_end(monkeypatch: pytest.MonkeyPatch):
    rng = random.Random(0)
    for _ in range(1500):
        monkeypatch.setattr(body_shape, "_CHUNK_BYTES", rng.choice([1, 2, 3, 7, 64]))
        text = json.dumps({"x": random_value(rng), "y": random_value(rng)}, indent=rng.choice([None, 1]))
        assert check_shape(text.encode()) == reference(text), text


def test_structure_in_strings_does_not_count():
    text = json.dumps({"model": "tiny", "prompt": '{"a": [1, 2, "\\\\"]}, ' * 20_000})
    assert parse_checked(CompletionRequest, text.encode()).prompt == json.loads(text)["prompt"]


def body(**fields: object) -> bytes:
    return json.dumps({"model": "tiny"} | fields).encode()


def nested(depth: int) -> object:
    return [nested(depth - 1)] if depth else 1


@pytest.mark.parametrize("padding", [0, 1000, 20_000, 100_000])
def test_the_bound_of_nesting_does_not_depend_on_the_size_of_the_body(padding: int):
    for depth, is_allowed in ((100, True), (128, False)):
        content = body(prompt="a" * padding, metadata=nested(depth))
        if is_allowed:
            check_shape(content)
        else:
            assert not is_surely_small(content), "else its shape isn't checked"
            with pytest.raises(ApiError, match="more than 128 levels"):
                check_shape(content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (body(prompt="a", logit_bias=nested(128)), "more than 128 levels of nesting"),
        (body(prompt="a", **{f"f{index}": 1 for index in range(127)}), "more than 128 fields;"),
        (body(prompt="a", user={f"f{index}": 1 for index in range(9000)}), "more than 8192 fields in all its objects"),
        (body(prompt=[[]] * 9000), "more than 8192 objects and lists"),
        (body(prompt=[[1] * 1000] * 140), "more than 131072 values"),
        (body(prompt=[1], stop_token_ids=[1] * 140_000), "more than 131072 values"),
    ],
)
def test_what_is_too_complex_is_refused_in_words(content: bytes, message: str):
    with pytest.raises(ApiError, match=message) as caught:
        parse_checked(CompletionRequest, content)
    assert (caught.value.status, caught.value.code) == (400, "body_too_complex")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": ""}] * 2049, "messages"),
        ([{"role": "user", "content": [{"type": "text", "text": ""}] * 1025}], "messages[0].content"),
    ],
)
def test_messages_and_parts_are_bounded(messages: list[object], param: str):
    with pytest.raises(ApiError, match=r"2048 items|at most 1024 items") as caught:
        parse_checked(ChatCompletionRequest, body(messages=messages))
    assert caught.value.param == param


def test_large_sound_bodies_are_parsed_as_small_ones_are():
    for fields in (
        {"prompt": list(range(200_000)), "n": 1, "stop": ["a"]},
        {"prompt": [[1] * 1000] * 100},
        {"prompt": 'é"\\\n' * 100_000, "temperature": 0.5},
    ):
        content = body(**fields)
        assert parse_checked(CompletionRequest, content) == parse(CompletionRequest, content)


def test_an_error_repeats_no_more_than_a_part_of_what_was_sent(tmp_path: Path):
    write_model_dir(tmp_path)
    router = RouterProcess(tmp_path)
    try:
        for fields in ({"k" * 10**6: 1, "prompt": "a"}, {"prompt": "a", "model": "m" * 10**6}):
            status, _, answer = router.post("/v1/completions", **fields)
            assert status in (400, 404) and len(json.dumps(answer)) < 5000
    finally:
        router.stop()


def test_the_limit_of_a_body_can_be_set(tmp_path: Path):
    write_model_dir(tmp_path)
    router = RouterProcess(tmp_path, max_body_mib=1)
    workers = Workers(router.membership)
    try:
        workers.start("mixed-0", Role.MIXED)
        wait_until(lambda: router.request("GET", "/ready")[0] == 200)
        status, _, answer = router.post("/v1/completions", prompt=" " * 1_000_000, max_tokens=1)
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
        try:
            status, _, answer = router.post("/v1/completions", prompt=" " * 1_100_000)
        except ConnectionError:
            return  # the connection was cut under the rest of the body
        assert status == 413 and "larger than 1048576 bytes" in answer["error"]["message"]
    finally:
        workers.close()
        router.stop()
