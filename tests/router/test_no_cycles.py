"""An answered request is freed at once: cycles of objects would leave it to the garbage collector, whose pauses every
stream feels."""

import asyncio
import gc
import time
import weakref
from collections.abc import MutableMapping
from typing import Any

import pytest

from live_router import PROMPT, LiveRouter
from splitserve.protocol.request import SamplingParams
from splitserve.router.http.answers import GenerationResponse
from splitserve.router.http.formats import CompletionFormat
from splitserve.router.http.prompt import Prompt
from splitserve.router.text.choice import Choice
from splitserve.router.text.tokens.byte_level import ByteLevelDetokenizer, TokenTable


class Client:
    """Reads an answer; it is gone after ``patience`` messages, if that is a number."""

    def __init__(self, patience: int | None) -> None:
        self._left = patience
        self._is_gone = asyncio.Event()
        self.messages: list[MutableMapping[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        await self._is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.messages.append(message)
        if self._left is not None and len(self.messages) >= self._left:
            self._is_gone.set()


@pytest.mark.parametrize("num_prompts", [1, 3])
@pytest.mark.parametrize(("stream", "patience"), [(True, None), (False, None), (True, 1)])
def test_an_answer_is_freed_without_the_collector(stream: bool, patience: int | None, num_prompts: int) -> None:
    async def run() -> None:
        router = LiveRouter()
        await router.start("w")
        client = Client(patience)
        router.dispatcher.admit(num_prompts)
        table = TokenTable(lambda token_id: chr(65 + token_id % 26))
        prompts = [
            Prompt(PROMPT, SamplingParams(max_tokens=8), Choice(ByteLevelDetokenizer(table), []))
            for _ in range(num_prompts)
        ]
        form = CompletionFormat("m")
        response = GenerationResponse(router.dispatcher, prompts, form, arrived_at=time.monotonic(), stream=stream)
        freed = weakref.ref(response)
        gc.collect()
        gc.disable()
        try:
            await response({"type": "http"}, client.receive, client.send)
            del response
            for _ in range(5):  # the task that watched the client ends
                await asyncio.sleep(0.01)
            assert freed() is None, gc.get_referrers(freed())
        finally:
            gc.enable()
            router.close()
        assert client.messages[0]["status"] == 200

    asyncio.run(run())
