"""Updates of a request that arrive together count in their order."""

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from splitserve.protocol.request import SamplingParams
from splitserve.router.http.answers import GenerationResponse
from splitserve.router.http.api_error import ApiError
from splitserve.router.http.formats import CompletionFormat
from splitserve.router.http.prompt import Prompt
from splitserve.router.requests.state import Failure, FailureReason, Update
from splitserve.router.text.choice import Choice

LOST = Update(failure=Failure(FailureReason.WORKER_LOST, "gone"), ended=True)


class Letters:
    """Detokenizer of the alphabet "ab.": its token ids are 0 to 2."""

    def push(self, token_ids: list[int]) -> str:
        return "".join(self.push_each(token_ids))

    def push_each(self, token_ids: list[int]) -> list[str]:
        return ["ab."[each] for each in token_ids]

    def flush(self) -> str:
        return ""


async def answered(
    stream: bool,
    updates: list[tuple[int, Update]],
    num_prompts: int = 1,
    *,
    refused: int | None = None,
    cancel: Callable[[Any], None] = lambda _: None,
    on_sent: Callable[[Any], Awaitable[None]] | None = None,
) -> bytes:
    """Return the answer to prompts with the stop string ".", whose updates are all there at once. The prompt
    ``refused`` is refused a while after those before it have begun."""
    timeline = SimpleNamespace(on_written=lambda _: None)
    request = SimpleNamespace(state=SimpleNamespace(num_cached_tokens=0), timeline=timeline, siblings=())

    async def submit(index: int, *_: Any, **__: Any) -> Any:
        if index == refused:
            await asyncio.sleep(0.01)
            raise ApiError(429, "there is no room", code="overloaded")
        return request

    protocol = SimpleNamespace(stream_keep_alive_seconds=0)
    dispatcher: Any = SimpleNamespace(
        finish_at_stop_string=lambda _: None,
        config=SimpleNamespace(protocol=protocol),
        submit_in_time=submit,
        cancel=cancel,
    )
    prompts = [
        Prompt(array("i", [1]), SamplingParams(max_tokens=9), Choice(Letters(), ["."]))  # type: ignore[arg-type]
        for _ in range(num_prompts)
    ]
    response = GenerationResponse(dispatcher, prompts, CompletionFormat("m"), arrived_at=0.0, stream=stream)
    for index, update in updates:
        response._inbox.put(index, update)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if on_sent is not None:
            await on_sent(message)

    await (response._send_stream(send) if stream else response._send_whole(send))
    return b"".join(message.get("body", b"") for message in sent)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_behind_a_stop_string_is_none(stream: bool) -> None:
    updates = [(0, Update(array("i", [0, 1, 2]))), (0, LOST)]
    body = asyncio.run(answered(stream, updates))
    assert b'"finish_reason":"stop"' in body and b"error" not in body


@pytest.mark.parametrize("stream", [False, True])
def test_other_choices_go_on_behind_such_a_failure(stream: bool) -> None:
    updates = [(0, Update(array("i", [2]))), (0, LOST), (1, Update(array("i", [0, 2])))]
    body = asyncio.run(answered(stream, updates, num_prompts=2))
    assert body.count(b'"finish_reason":"stop"') == 2 and b'"text":"a"' in body and b"error" not in body


def test_a_failure_before_the_stop_string_ends_the_answer() -> None:
    updates = [(0, Update(array("i", [0]))), (0, LOST), (0, Update(array("i", [2])))]
    with pytest.raises(ApiError) as raised:
        asyncio.run(answered(False, updates))
    assert raised.value.status == 503
    body = asyncio.run(answered(True, updates))
    assert b"error" in body and b'finish_reason":"stop' not in body


BEGIN = (0, Update(array("i", [0])))


@pytest.mark.parametrize("updates", [[BEGIN], [BEGIN, (0, Update(array("i", [2]))), (0, LOST)]])
def test_the_refusal_of_a_later_prompt_ends_the_answer(updates: list[tuple[int, Update]]) -> None:
    with pytest.raises(ApiError) as raised:
        asyncio.run(answered(False, updates, 3, refused=1))
    assert (raised.value.status, raised.value.message) == (429, "prompt[1]: there is no room")
    body = asyncio.run(answered(True, updates, 3, refused=1))
    assert b'"text":"a"' in body and body.count(b"prompt[1]: there is no room") == 1
    assert body.endswith(b"data: [DONE]\n\n")


def test_a_stream_that_has_not_begun_is_refused_with_a_status() -> None:
    with pytest.raises(ApiError) as raised:
        asyncio.run(answered(True, [], 2, refused=1))
    assert raised.value.status == 429


def test_updates_of_a_prompt_wait_until_its_submission_is_known() -> None:
    updates = [(1, Update(array("i", [0]))), (1, Update(array("i", [1, 2]))), (0, Update(array("i", [2])))]
    body = asyncio.run(answered(False, updates, 2))
    assert b'"text":"ab"' in body and body.count(b'"finish_reason":"stop"') == 2


def test_the_refusal_of_a_later_prompt_cancels_the_others_before_the_client_reads_what_it_was_sent() -> None:
    async def refused_while_the_client_does_not_read() -> list[str]:
        order: list[str] = []
        cancelled = asyncio.Event()

        def cancel(_: Any) -> None:
            order.append("cancelled")
            cancelled.set()

        async def read(message: Any) -> None:
            if b'"text":"a"' in message.get("body", b""):
                await cancelled.wait()
                order.append("read")

        await answered(True, [BEGIN], 2, refused=1, cancel=cancel, on_sent=read)
        return order[:2]

    assert asyncio.run(asyncio.wait_for(refused_while_the_client_does_not_read(), 5.0)) == ["cancelled", "read"]
