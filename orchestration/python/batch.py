"""Batches of requests to a router: in flight up to a bound, answers in order, waits on the client's side.

A request is sent when one before it is answered, and has no time-out. It is sent again while the router refuses it for
now (429, 503) or can't be reached, as after the loss of a worker.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import aiohttp
import msgspec

from splitserve.common.errors import SplitserveError
from splitserve.orchestration.python.results import PromptError

UNAVAILABLE_SECONDS = 120.0  # without a worker or a router; supervision starts lost ones again meanwhile
RETRY_SECONDS = 0.5
_CONNECT_SECONDS = 30.0
_TOO_MANY, _UNAVAILABLE, _OK = 429, 503, 200
_RETRIED = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)

Answer = Mapping[str, Any]
Result = TypeVar("Result")


class Batch:
    """Batch of requests to one endpoint. ``check_alive`` raises if the endpoint is gone for good; ``on_answer`` is
    called after each request."""

    def __init__(
        self,
        url: str,
        api_key: str,
        *,
        concurrency: int,
        check_alive: Callable[[], None],
        on_answer: Callable[[], object],
        keep_going: bool,
    ) -> None:
        self._url = url
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._concurrency = concurrency
        self._check_alive = check_alive
        self._on_answer = on_answer
        self._keep_going = keep_going

    def run(self, bodies: Sequence[Mapping[str, Any]]) -> list[Answer | PromptError]:
        """Send all requests; return their answers in order. Without ``keep_going`` the first failure ends the batch and
        is raised; Ctrl-C ends it, too."""
        return run_apart(self._run(bodies))

    async def _run(self, bodies: Sequence[Mapping[str, Any]]) -> list[Answer | PromptError]:
        results: dict[int, Answer | PromptError] = {}
        pending = iter(enumerate(bodies))
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=self._headers) as session:
            senders = [
                asyncio.create_task(self._send_all(session, pending, results))
                for _ in range(min(self._concurrency, len(bodies)))
            ]
            try:
                await asyncio.gather(*senders)
            finally:
                for sender in senders:
                    sender.cancel()
                await asyncio.gather(*senders, return_exceptions=True)
        return [results[index] for index in range(len(bodies))]

    async def _send_all(
        self,
        session: aiohttp.ClientSession,
        pending: Iterator[tuple[int, Mapping[str, Any]]],
        results: dict[int, Answer | PromptError],
    ) -> None:
        """Send one request after another until none is pending."""
        for index, body in pending:
            try:
                results[index] = await self._answer(session, index, _encoded(index, body))
            except PromptError as error:
                if not self._keep_going:
                    raise
                results[index] = error
            self._on_answer()

    async def _answer(self, session: aiohttp.ClientSession, index: int, body: bytes) -> Answer:
        """Send a request until it is answered. Raises :class:`PromptError`."""
        unavailable_since: float | None = None
        while True:
            try:
                async with session.post(self._url, data=body) as response:
                    status, content = response.status, await response.read()
                if status == _OK:
                    answer: Answer = msgspec.json.decode(content)
                    return answer
                failure = _failure(index, status, content)
            except _RETRIED as error:
                status, failure = 0, PromptError(index, f"the router can't be reached: {error}")
            if status not in (0, _TOO_MANY, _UNAVAILABLE):
                raise failure
            self._check_alive()
            now = time.monotonic()
            unavailable_since = now if status == _TOO_MANY or unavailable_since is None else unavailable_since
            if now - unavailable_since > UNAVAILABLE_SECONDS:
                raise failure
            await asyncio.sleep(RETRY_SECONDS)


def _encoded(index: int, body: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError as error:
        raise PromptError(index, f"it isn't valid Unicode: {error}") from None
    except TypeError as error:  # a message may have values of any type
        raise PromptError(index, f"it isn't JSON: {error}") from None


def _failure(index: int, status: int, content: bytes) -> PromptError:
    try:
        error = msgspec.json.decode(content)["error"]
        return PromptError(
            index, error["message"], status=status, param=error.get("param") or "", code=error.get("code") or ""
        )
    except (msgspec.DecodeError, KeyError, TypeError):
        return PromptError(index, f"status {status}: {content[:500].decode(errors='replace')}", status=status)


def run_apart(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on an event loop of its own thread, since this thread may have a running one, as in a notebook.

    An exception in this thread, like KeyboardInterrupt, cancels the coroutine and waits for its end.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="batch", daemon=True)
    thread.start()
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
    finally:
        asyncio.run_coroutine_threadsafe(_settle(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _settle() -> None:
    """Wait for the end of all other tasks of this loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


class ClusterGoneError(SplitserveError):
    """End of a cluster while requests were in flight."""
