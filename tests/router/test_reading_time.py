"""The time that clients are given to read their answers: beyond the deadline, wherever pauses have put that."""

import asyncio
import math
from collections.abc import Callable, Coroutine, MutableMapping
from typing import Any

import pytest

from live_router import PROMPT, LiveRouter, until
from splitserve.protocol.messages.requests import StepTokens, TokenDelta
from splitserve.protocol.request import FinishReason, SamplingParams
from splitserve.router.http import answers
from splitserve.router.http.answers import GenerationResponse
from splitserve.router.http.formats import CompletionFormat
from splitserve.router.http.prompt import Prompt
from splitserve.router.requests.events import PauseMode
from splitserve.router.text.choice import Choice
from splitserve.router.text.tokens.byte_level import ByteLevelDetokenizer, TokenTable


class Reader:
    """A client of an ASGI response; it reads ``most`` messages, then nothing any more."""

    def __init__(self, most: float = math.inf) -> None:
        self._most = most
        self.messages: list[MutableMapping[str, Any]] = []
        self.leaves = asyncio.Event()  # never set

    async def receive(self) -> dict[str, Any]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.messages.append(message)
        if len(self.messages) >= self._most:
            await self.leaves.wait()


def answer_of(router: LiveRouter, *, stream: bool) -> GenerationResponse:
    """Return the response to a request that has just come."""
    router.dispatcher.admit(1)
    detokenizer = ByteLevelDetokenizer(TokenTable(lambda token_id: chr(65 + token_id % 26)))
    prompt = Prompt(PROMPT, SamplingParams(max_tokens=8), Choice(detokenizer, []))
    arrived_at = asyncio.get_running_loop().time()
    return GenerationResponse(router.dispatcher, [prompt], CompletionFormat("m"), arrived_at=arrived_at, stream=stream)


def on_live_router(test: Callable[[LiveRouter], Coroutine[Any, Any, None]], **protocol: Any) -> None:
    async def run() -> None:
        router = LiveRouter(**protocol)
        try:
            await test(router)
        finally:
            router.close()

    asyncio.run(run())


def test_an_answer_that_gets_nowhere_is_given_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the client reads nothing: its places among the requests in flight aren't taken for ever."""
    monkeypatch.setattr(answers, "READ_GRACE_SECONDS", 0.1)

    async def test(router: LiveRouter) -> None:
        await router.start("m0")
        reader = Reader(most=1)
        await answer_of(router, stream=True)({}, reader.receive, reader.send)
        assert len(reader.messages) == 1 and router.dispatcher.core.admission.num_admitted == 0

    on_live_router(test, request_deadline_seconds=1.0)
    assert "does not read the answer" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_outlasts_pauses_that_freeze_its_request(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Its request's deadline stands still meanwhile, and so does the time to read it."""
    monkeypatch.setattr(answers, "READ_GRACE_SECONDS", 0.1)

    async def test(router: LiveRouter) -> None:
        worker = await router.start("m0", script=lambda _request: [])  # a frozen worker: it sends no tokens
        reader = Reader()
        answer = asyncio.create_task(answer_of(router, stream=stream)({}, reader.receive, reader.send))
        await until(lambda: len(router.dispatcher.core.requests), "the request does not run")
        for _ in range(2):
            await router.dispatcher.operations.pause(PauseMode.KEEP)
            await asyncio.sleep(0.5)
            await router.dispatcher.operations.resume()
        assert not answer.done()
        [request] = router.dispatcher.core.requests
        last = TokenDelta(request.state.key, 0, [7], FinishReason.STOP, 0)
        router.dispatcher._on_messages(worker.party, [StepTokens([last])])
        await answer
        bodies = b"".join(message.get("body", b"") for message in reader.messages)
        assert reader.messages[0]["status"] == 200 and b'"stop"' in bodies

    on_live_router(test, request_deadline_seconds=0.8)
    assert "given up" not in caplog.text
