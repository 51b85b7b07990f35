"""Token messages that are handled together: what the requests get is the same as one by one."""

import asyncio
import contextlib
import json
import random
from typing import Any

import pytest

from router_harness import ready
from splitserve.benchmarks.router.worker_script import default_script
from splitserve.protocol.config import RouterConfig
from splitserve.protocol.messages.logprobs import Logprobs
from splitserve.protocol.messages.marks import Mark, MarkKind
from splitserve.protocol.messages.requests import (
    FailureCode,
    HandoverReport,
    ReadClock,
    RequestFailed,
    StepTokens,
    TokenDelta,
)
from splitserve.protocol.request import FinishReason, Party, RequestKey, Role
from splitserve.router.admin.metrics import RouterMetrics
from splitserve.router.links.arrivals import joined
from splitserve.router.requests.dispatcher import Dispatcher
from splitserve.router.requests.effects import Effect
from splitserve.router.requests.events import Close, Event, FromWorker
from splitserve.router.requests.state import Update, each_by_itself
from splitserve.router.requests.token_sequence import TokenSequence

_WORKER = Party("decode-0", 1)
_KEY, _KEY_2 = RequestKey("a"), RequestKey("b")


def _tokens(key: RequestKey, position: int, *token_ids: int, **more: Any) -> StepTokens:
    return StepTokens([TokenDelta(key, position, list(token_ids), **more)])


def test_adjacent_tokens_become_one_delta() -> None:
    messages = [_tokens(_KEY, 0, 5), _tokens(_KEY_2, 3, 9), _tokens(_KEY, 1, 6, 7, num_cached_tokens=64)]
    messages.append(_tokens(_KEY, 3, 8, finish_reason=FinishReason.LENGTH))
    first = TokenDelta(_KEY, 0, [5, 6, 7, 8], FinishReason.LENGTH, 64)
    assert joined([*messages]) == [StepTokens([first, TokenDelta(_KEY_2, 3, [9])])]


def test_messages_stay_in_order() -> None:
    failed = RequestFailed(_KEY_2, FailureCode.INTERNAL, "broken")
    messages = [_tokens(_KEY, 0, 5), failed, _tokens(_KEY, 1, 6), _tokens(_KEY, 2, 7), failed]
    assert joined([*messages]) == [messages[0], failed, _tokens(_KEY, 1, 6, 7), failed]


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(_tokens(_KEY, 2, 6), id="a gap"),
        pytest.param(_tokens(_KEY, 0, 5), id="the same position"),
        pytest.param(_tokens(RequestKey("a", 1), 1, 6), id="another attempt"),
        pytest.param(_tokens(_KEY, 1, 6, logprobs=Logprobs(0, bytes(4), b"")), id="log-probabilities"),
        pytest.param(_tokens(_KEY, 1, 6, marks=[Mark(MarkKind.ACCEPTED, 1.0)]), id="marks"),
        pytest.param(_tokens(_KEY, 1, 6, handover=HandoverReport("p", "nixl", 1, 1, 0, 1)), id="a hand-over"),
    ],
)
def test_other_deltas_stay_by_themselves(second: StepTokens) -> None:
    messages = [_tokens(_KEY, 0, 5), second, _tokens(_KEY, 7, 9)]
    assert joined([*messages]) == [StepTokens([message.deltas[0] for message in messages])]


def test_no_token_is_joined_to_the_end() -> None:
    messages = [_tokens(_KEY, 0, 5, finish_reason=FinishReason.STOP), _tokens(_KEY, 1, 6)]
    assert joined([*messages]) == [StepTokens([message.deltas[0] for message in messages])]


@pytest.mark.parametrize("seed", range(20))
def test_random_messages_bring_the_same_tokens(seed: int) -> None:
    """Tokens of requests in random pieces, some twice: each request's sequence is the same."""
    draw = random.Random(seed)
    outputs = {RequestKey(f"r{number}"): [draw.randrange(1000) for _ in range(40)] for number in range(4)}
    messages: list[StepTokens] = []
    sent = dict.fromkeys(outputs, 0)
    while any(count < 40 for count in sent.values()):
        deltas = []
        for key in draw.sample(list(outputs), k=draw.randint(1, 4)):
            begin = max(0, sent[key] - draw.choice((0, 0, 0, 1)))
            stop = min(40, sent[key] + draw.randint(1, 3))
            reason = FinishReason.LENGTH if stop == 40 else None
            deltas.append(TokenDelta(key, begin, outputs[key][begin:stop], reason))
            sent[key] = stop
        messages.append(StepTokens(deltas))
    (together,) = joined([*messages])
    assert isinstance(together, StepTokens)
    assert len(together.deltas) < sum(len(message.deltas) for message in messages)
    for key, output in outputs.items():
        sequence = TokenSequence(max_tokens=40)
        for delta in together.deltas:
            if delta.key == key:
                sequence.accept(delta.position, delta.token_ids, delta.finish_reason)
        assert sequence.output_ids == output
        assert sequence.complete


def test_an_error_leaves_the_other_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[object] = []
    errors: list[dict[str, Any]] = []

    def handle(event: Event, _now: float) -> list[Effect]:
        assert isinstance(event, FromWorker | Close)
        if isinstance(event, FromWorker):
            handled.append(event.body)
            if isinstance(event.body, RequestFailed):
                raise ValueError("broken")
        return []

    async def arrive() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context))
        dispatcher = Dispatcher(RouterConfig(model="none", served_model_name="none"), RouterMetrics())
        with contextlib.closing(dispatcher):
            monkeypatch.setattr(dispatcher.core, "handle", handle)
            dispatcher._on_messages(_WORKER, [*messages])

    failed = RequestFailed(_KEY_2, FailureCode.INTERNAL, "broken")
    messages = [_tokens(_KEY, 0, 5), _tokens(_KEY, 1, 6), failed, _tokens(_KEY, 2, 7), ReadClock(1.0)]
    asyncio.run(arrive())
    assert handled == [_tokens(_KEY, 0, 5, 6), *messages[2:]]
    assert [str(error["exception"]) for error in errors] == ["broken"]


def test_an_update_by_tokens() -> None:
    logprobs = Logprobs(0, b"".join(bytes([number] * 4) for number in range(3)), b"")
    parts = each_by_itself(Update([1, 2, 3], FinishReason.STOP, ended=True, logprobs=logprobs))
    assert [list(part.token_ids) for part in parts] == [[1], [2], [3]]
    assert [part.finish_reason for part in parts] == [None, None, FinishReason.STOP]
    assert [part.logprobs and part.logprobs.values for part in parts] == [bytes([number] * 4) for number in range(3)]
    alone = Update([1], FinishReason.STOP)
    assert list(each_by_itself(alone)) == [alone]


@pytest.mark.parametrize("tokens_per_message", [0, 1, 3])
def test_a_stream_has_an_event_per_token(serve: Any, tokens_per_message: int) -> None:
    router, workers = serve()
    workers.start("m0", Role.MIXED, default_script(tokens_per_message=tokens_per_message))
    ready(router)
    prompt = [40 + number % 20 for number in range(50)]
    _, _, text = router.post("/v1/completions", prompt=prompt, max_tokens=40, stream=True, return_token_ids=True)
    events = [json.loads(line.removeprefix("data: ")) for line in text.strip().split("\n\n")[:-1]]
    assert [event["choices"][0]["token_ids"] for event in events] == [[token_id] for token_id in prompt[:40]]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 39 + ["length"]
