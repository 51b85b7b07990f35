"""The next turn's prompt against the ids that decode wrote: counted by reason."""

from collections.abc import Sequence

import pytest

from router_core import Core
from splitserve.protocol.request import FinishReason, Party, Role, SamplingParams
from splitserve.router.placement import next_turns
from splitserve.router.placement.next_turns import NextTurns, Texts, TurnReason
from splitserve.router.placement.prefix_view import PromptHashes
from splitserve.router.requests.active_request import ActiveRequest, RequestContext
from splitserve.router.requests.effects import Count
from splitserve.router.requests.events import Submit

BLOCK, END, THINK = 4, 900, 901
WORDS = {1: "a", 2: "b", 3: "ab", 4: "c", 5: "bc", 6: "xyz", END: "<end>", THINK: "<think>"}
PROMPT = [*range(100, 110)]  # two full blocks and a half
OUTPUT = [1, 2, 4, 2, 4, 1, END]


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(WORDS.get(token_id, f"[{token_id}]") for token_id in token_ids)


def hashed(token_ids: list[int]) -> PromptHashes:
    hashes = PromptHashes(token_ids)
    hashes.chain(b"root", BLOCK)
    return hashes


def reason(prompt: list[int], output: list[int] = OUTPUT, session: str = "", known: int = 8) -> TurnReason | None:
    turns = NextTurns()
    turns.texts = Texts(text_of, {END, THINK})
    turns.remember(hashed(PROMPT), PROMPT, output, session)
    return turns.reason(hashed(prompt), prompt, known, session)


@pytest.mark.parametrize(
    ("continuation", "expected"),
    [
        ([*OUTPUT, 200, 201], TurnReason.SAME),
        ([*OUTPUT[:-1], 300, 301], TurnReason.SAME),  # another token ends turns there
        ([3, 4, 2, 4, 1, END, 200], TurnReason.TOKENISATION),
        ([1, 2, 4, END, 200, 201], TurnReason.TRUNCATED),
        ([1, 2], TurnReason.TRUNCATED),
        ([1, 2, 4, 2, END, 200], TurnReason.TRUNCATED),
        ([3, END, 200, 201], TurnReason.TRUNCATED),  # in the middle, and tokenised in another way
        ([6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6], TurnReason.TEXT),
        ([1, 2, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6], TurnReason.TEXT),
    ],
)
def test_reasons(continuation: list[int], expected: TurnReason) -> None:
    assert reason([*PROMPT, *continuation]) is expected


def test_an_end_that_is_joined_with_what_follows() -> None:
    assert reason([*PROMPT, 1, 5, 200, 201], output=[1, 2]) is TurnReason.JOIN
    assert reason([*PROMPT, 1, 1, 3, 4], output=[1, 1, 1]) is TurnReason.JOIN


def test_a_part_that_the_template_leaves_out() -> None:
    assert reason([*PROMPT, 4, 4, END], output=[THINK, 1, 1, 4, 4, END]) is TurnReason.TEMPLATE


def test_a_rewritten_prompt_is_the_templates_doing_only_within_a_session() -> None:
    other = [*PROMPT[:9], 777, *OUTPUT, 200]
    assert reason(other) is None
    assert reason(other, session="s") is TurnReason.TEMPLATE


def test_the_same_prompt_again_is_no_next_turn() -> None:
    assert reason(PROMPT) is None
    assert reason([*PROMPT[:8], 1, 1], known=4) is None


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_turns, "MAX_TURNS", 10)
    monkeypatch.setattr(next_turns, "MAX_KEPT_TOKENS", 50)
    turns = NextTurns()
    for number in range(100):
        prompt = [number, *PROMPT]
        turns.remember(hashed(prompt), prompt, OUTPUT, "")
        turns.remember(hashed(prompt), prompt, OUTPUT, "")
    assert len(turns._turns) == 5 and turns._num_tokens == sum(len(turn.rest) for turn in turns._turns.values()) <= 50


def test_the_core_counts_them() -> None:
    core = Core()
    first, second = Party("mixed-0", 3), Party("mixed-1", 4)
    for worker in (first, second):
        core.join(worker, Role.MIXED)
    prompt = list(range(50))
    context = RequestContext(session="s")
    request = ActiveRequest.new("r", prompt, SamplingParams(max_tokens=2), core.now, context)
    core.handle(Submit(request))
    assert not [count for count in core.of(Count) if count.metric == "next_turns"]
    worker = request.state.placement.parties[0]
    core.tokens(worker, request.state.key, 0, 7, 8, finish_reason=FinishReason.LENGTH)
    for name, answer, expected in (("s1", [7, 8], "same"), ("s2", [9, 9], "text")):
        follower = ActiveRequest.new(name, [*prompt, *answer, 5, 6], SamplingParams(max_tokens=2), core.now, context)
        core.handle(Submit(follower))
        [count] = [count for count in core.of(Count) if count.metric == "next_turns"]
        assert count.labels == (expected,)


def test_a_chat_that_goes_on_is_counted(served, writer) -> None:
    router, _ = served
    messages = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 4}]

    def counts() -> dict[str, float]:
        return {each: router.metric(f'splitserve_next_turns_total{{reason="{each}"}}') for each in TurnReason}

    before = counts()
    status, _, answer = router.post("/v1/chat/completions", messages=messages, max_tokens=60)
    assert status == 200
    messages += [{"role": "assistant", "content": answer["choices"][0]["message"]["content"]}]
    messages += [{"role": "user", "content": "And then?"}]
    assert router.post("/v1/chat/completions", messages=messages, max_tokens=60)[0] == 200
    messages[1]["content"] = "Something else."
    assert router.post("/v1/chat/completions", messages=messages, max_tokens=60)[0] == 200
    grown = {each: count - before[each] for each, count in counts().items()}
    assert sum(grown.values()) == 2, grown
