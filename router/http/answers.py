"""The answer to one generation request: submits its prompts and turns their updates into JSON or a stream of events.

A failure before the first byte is an HTTP error; a later one is an error event in the stream, followed by ``[DONE]``.
The response's head waits for the first token, so that most failures still get a status. A client that disconnects
cancels its requests, streamed or not.

The first prompt is submitted before anything is sent, the others while the answer goes on: each waits until there is
room for it at the workers.

A stream has an event per token, however workers packed them into messages, and however many the router handles at once.
A stream without tokens for a while sends comments, so that clients and proxies don't take its connection for dead: once
the stream has begun, or while a request waits for a worker that replaces a lost one.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from splitserve.protocol.messages.logprobs import Logprobs
from splitserve.router.http.api_error import ApiError, error_of_failure, of_prompt
from splitserve.router.http.formats import STREAM_START, Format, Usage, send_json
from splitserve.router.http.inbox import Inbox
from splitserve.router.http.keep_alive import KEEP_ALIVE, Pulse
from splitserve.router.http.prompt import Prompt
from splitserve.router.output.parts import Part
from splitserve.router.requests.active_request import NO_CONTEXT, ActiveRequest, RequestContext
from splitserve.router.requests.dispatcher import ClientGoneError, Dispatcher
from splitserve.router.requests.outcome import route
from splitserve.router.requests.state import NOTHING, Failure, Update, each_by_itself
from splitserve.router.scores.forms import joined
from splitserve.router.text.choice import Piece, Texts

READ_GRACE_SECONDS = 5.0
"""Time to read the answer beyond the deadline, or beyond the last request's end if a pause has put that off: a slower
client would occupy its slots for ever."""

log = logging.getLogger(__name__)


class GenerationResponse(Response):
    """An ASGI response. ``prompts`` were admitted; their slots are released when the response has ended."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        prompts: Sequence[Prompt],
        answer_format: Format,
        *,
        arrived_at: float,
        stream: bool,
        return_route: bool = False,
        continuous_usage: bool = False,
        context: RequestContext = NO_CONTEXT,
    ) -> None:
        super().__init__()
        self._dispatcher = dispatcher
        self._prompts = prompts
        self._format = answer_format
        self._arrived_at = arrived_at
        self._stream = stream
        self._return_route = return_route
        self._continuous_usage = continuous_usage
        self._context = context
        self._inbox = Inbox(num_known=0)
        self._later: list[tuple[int, Update]] = []  # updates that have been taken, behind a failure
        self._requests: list[ActiveRequest] = []  # those that have begun
        self._submission: asyncio.Task[ApiError | None] | None = None  # of the prompts after the first one
        self._num_open = len(prompts)
        self._num_running = len(prompts)  # in the core, those that haven't begun included
        self._num_streamed = 0  # tokens of chunks with usage
        self._num_cached = [0] * len(prompts)  # tokens of each prompt, as of the last chunk with usage
        self._num_cached_streamed = 0  # their sum
        self._gone = False
        self._is_silent = False  # a comment is due

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch_client(receive))
        self._watcher = watcher
        try:
            await self._send_in_time(send)
        except ClientGoneError:
            pass
        except TimeoutError:  # the server closes the connection of an answer that isn't complete
            log.warning("request %s is given up: its client does not read the answer", self._context.client_id)
        except ApiError as error:
            await self._give_up()
            await send_json(send, error.status, self._format.error_body(error), error.headers())
        finally:
            watcher.cancel()
            try:
                await self._give_up()
            finally:
                # Their errors will name frames that have this response: cycles for the garbage collector.
                del self._watcher, self._submission
                self._cancel()
                self._dispatcher.release(len(self._prompts), self._context.tenant)

    async def _send_in_time(self, send: Send) -> None:
        """Send the answer. Raises TimeoutError if the client doesn't read it although all requests have ended.

        Until then the core sees to their deadlines, which pauses put off."""
        async with asyncio.timeout(None) as limit:
            self._inbox.on_end = lambda: self._on_request_ended(limit)
            try:
                await (self._send_stream(send) if self._stream else self._send_whole(send))
            finally:
                self._inbox.on_end = None  # it refers to this response: a cycle for the garbage collector

    def _on_request_ended(self, limit: asyncio.Timeout) -> None:
        self._num_running -= 1
        if not self._num_running:
            deadline = self._arrived_at + self._dispatcher.deadline_seconds
            limit.reschedule(max(deadline, asyncio.get_running_loop().time()) + READ_GRACE_SECONDS)

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._inbox.put(0, NOTHING)

    async def _submit(self) -> None:
        first, *others = self._first_choices()
        await self._begin(*first)
        if others:
            self._submission = asyncio.create_task(self._submit_others(others))
            self._submission.add_done_callback(lambda _: self._inbox.put(0, NOTHING))  # it may have been refused

    async def _submit_others(self, prompts: Sequence[tuple[int, Prompt]]) -> ApiError | None:
        """Submit the prompts in order; return the error if one is refused."""
        try:
            for index, prompt in prompts:
                await self._begin(index, prompt)
        except ClientGoneError:  # which ends the answer by itself
            return None
        except ApiError as error:
            self._cancel()
            return error
        return None

    async def _give_up(self) -> None:
        """Cancel all requests: the answer has ended, or an error ends it as soon as the client reads it. What waits
        leaves the queue first: it would begin once those that run are cancelled."""
        if self._submission is not None and not self._submission.done():
            self._submission.cancel()
            await asyncio.wait((self._submission,))
        self._cancel()

    def _cancel(self) -> None:
        for request in self._requests:
            self._dispatcher.cancel(request)

    async def _begin(self, index: int, prompt: Prompt) -> None:
        """Begin a prompt's choices, the first of which has this index, once workers have room for them."""
        try:
            request = await self._dispatcher.submit_in_time(
                index,
                prompt.token_ids,
                prompt.sampling,
                self._inbox,
                self._arrived_at,
                watch_client=lambda: self._watcher,
                context=self._context.of_prompt(index),
                num_choices=prompt.num_choices,
            )
        except ApiError as error:
            raise self._of_prompt(error, index) from None
        self._requests += (request, *request.siblings)
        self._inbox.introduce(len(self._requests))

    def _first_choices(self) -> list[tuple[int, Prompt]]:
        """Return the first choice of each prompt, with its index."""
        return [(index, prompt) for index, prompt in enumerate(self._prompts) if not prompt.sampling.choice]

    async def _next_updates(self) -> tuple[list[tuple[int, Update]], tuple[int, Failure] | None]:
        """Return new updates of the choices, in order, and the choice and failure that follow them if a request failed:
        :meth:`_error_after` tells what it means once they are pushed."""
        updates, self._later = self._later or await self._inbox.take(), []
        if self._gone:
            raise ClientGoneError
        for number, (index, update) in enumerate(updates):
            if update.failure is not None:
                self._later = updates[number + 1 :]
                return updates[:number], (index, update.failure)
            if update.prompt_logprobs is not None:
                await self._take_prompt_scores(index, update.prompt_logprobs)
        return updates, None

    def _error_after(self, failed: tuple[int, Failure] | None) -> ApiError | None:
        """Return the error that ends the answer: of a choice that failed, unless it had ended already, at a stop
        string, or of a prompt that was refused."""
        if failed is not None and self._prompts[failed[0]].choice.finish_reason is None:
            return self._of_prompt(error_of_failure(failed[1]), failed[0])
        if self._submission is None or not self._submission.done():
            return None
        submission, self._submission = self._submission, None
        return submission.result()

    def _of_prompt(self, error: ApiError, index: int) -> ApiError:
        """Let an error of a choice say which prompt it is about: it ends the whole answer."""
        num_choices = self._prompts[index].num_choices
        return of_prompt(error, index // num_choices, len(self._prompts) // num_choices)

    async def _take_prompt_scores(self, index: int, logprobs: Logprobs) -> None:
        """Make the JSON of a prompt's log-probabilities, between which other requests get their turns."""
        scores = self._prompts[index].scores
        for _ in () if scores is None else scores.take_prompt(logprobs):
            await asyncio.sleep(0)

    def _push(self, index: int, update: Update) -> Piece | None:
        choice, scores = self._prompts[index].choice, self._prompts[index].scores
        if choice.finish_reason is not None or not (update.token_ids or update.finish_reason):
            return None
        piece = choice.push(update.token_ids, update.finish_reason)
        if scores is not None:
            piece = scores.add(piece, update.logprobs)
        if piece.finish_reason is not None:
            self._num_open -= 1
            self._dispatcher.finish_at_stop_string(self._requests[index])
        return piece

    # ---- one JSON object ----

    async def _send_whole(self, send: Send) -> None:
        await self._submit()
        texts: list[list[str]] = [[] for _ in self._prompts]
        token_ids: list[list[int]] = [[] for _ in self._prompts]
        logprobs: list[list[dict[str, Any] | None]] = [[] for _ in self._prompts]
        of_prompts: list[list[Any] | None] = [None for _ in self._prompts]
        parts: list[list[Part] | None] = [None for _ in self._prompts]
        while self._num_open:
            updates, failed = await self._next_updates()
            for index, update in updates:
                piece = self._push(index, update)
                if piece is None:
                    continue
                texts[index].append(piece.text)
                token_ids[index].extend(piece.token_ids)
                logprobs[index].append(piece.logprobs)
                of_prompts[index] = of_prompts[index] or piece.prompt_logprobs
                if piece.parts is not None:
                    if (gathered := parts[index]) is None:
                        parts[index] = gathered = []
                    gathered.extend(piece.parts)
            if (error := self._error_after(failed)) is not None:
                raise error
        choices = [
            Piece(
                "".join(texts[index]),
                token_ids[index],
                prompt.choice.finish_reason,
                parts[index],
                prompt.choice.has_calls,
                prompt.choice.stop_string,
                joined(logprobs[index]),
                of_prompts[index],
            )
            for index, prompt in enumerate(self._prompts)
        ]
        body = self._format.answer(choices, self._usage(), self._route(self._requests[0]))
        await send_json(send, 200, body)

    # ---- server-sent events ----

    async def _send_stream(self, send: Send) -> None:
        await self._submit()
        pulse = Pulse(self._dispatcher.config.protocol.stream_keep_alive_seconds, self._on_silence)
        try:
            await self._send_events(send, pulse)
        finally:
            pulse.stop()

    def _on_silence(self) -> None:
        self._is_silent = True
        self._inbox.put(0, NOTHING)

    def _comment(self, *, started: bool) -> bytes:
        """Return the comment for a stream without tokens to send; b"" if none is due."""
        is_due = self._is_silent and (started or any(each.is_stranded for each in self._requests))
        self._is_silent = False
        return KEEP_ALIVE if is_due else b""

    async def _send_events(self, send: Send, pulse: Pulse) -> None:
        started = False
        opened: set[int] = set()
        written: set[int] = set()
        while True:
            updates, failed = await self._next_updates()
            events = b"".join([self._events(index, update, opened) for index, update in updates])
            error = self._error_after(failed)
            if error is not None and not (started or events):
                raise error
            if not events and error is None:
                events = self._comment(started=started)
            if not started and (events or error is not None or not self._num_open):
                await send(STREAM_START)
                started = True
                events = self._format.begin(self._usage()) + events
            if error is not None or not self._num_open:
                break
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
                pulse.note_sent()
                self._note_written(opened, written)
        if error is not None:
            await self._give_up()
        events += self._format.end(self._usage()) if error is None else self._format.failure(error)
        await send({"type": "http.response.body", "body": events, "more_body": False})
        self._note_written(opened, written)

    def _note_written(self, opened: set[int], written: set[int]) -> None:
        """Note for the timelines of choices in ``opened`` that their first events are written, once."""
        if len(opened) != len(written):
            for index in opened - written:
                self._requests[index].timeline.on_written(time.monotonic())
            written |= opened

    def _events(self, index: int, update: Update, opened: set[int]) -> bytes:
        """Return the events of an update, after those that open its choice."""
        opening = b"" if index in opened else self._opening(index)
        events = [self._chunk(index, addition) for addition in self._additions(index, update)]
        if not events:
            return b""
        opened.add(index)
        return opening + b"".join(events)

    def _opening(self, index: int) -> bytes:
        extra = {"usage": self._usage_after(index, Piece("", (), None)).as_json()} if self._continuous_usage else {}
        return self._format.opening(index, extra)

    def _additions(self, index: int, update: Update) -> Iterator[Piece | Texts]:
        """Yield what the tokens of an update add to a choice, as if each of them had come alone."""
        prompt = self._prompts[index]
        choice, token_ids = prompt.choice, update.token_ids
        if prompt.scores is None and choice.is_plain and choice.finish_reason is None:
            num_texts = len(token_ids) - (update.finish_reason is not None)  # the last token ends the choice
            if num_texts > 0:
                yield choice.push_texts(token_ids[:num_texts])
                update = Update(token_ids[num_texts:], update.finish_reason)
        for tokens in each_by_itself(update):
            piece = self._push(index, tokens)
            if piece is not None:
                yield piece

    def _chunk(self, index: int, addition: Piece | Texts) -> bytes:
        if isinstance(addition, Texts):
            if not self._continuous_usage:
                return self._format.texts(index, addition)
            return b"".join([self._chunk(index, piece) for piece in addition.pieces()])
        extra = {} if addition.finish_reason is None else self._route(self._requests[index])
        if self._continuous_usage:
            extra["usage"] = self._usage_after(index, addition).as_json()
        return self._format.chunk(index, addition, extra)

    def _usage_after(self, index: int, addition: Piece) -> Usage:
        """Return the usage with a chunk of a choice. Answers may have a thousand prompts: only this one's is counted
        anew."""
        first = index - self._prompts[index].sampling.choice
        num_cached = self._requests[first].state.num_cached_tokens
        self._num_cached_streamed += num_cached - self._num_cached[first]
        self._num_cached[first] = num_cached
        self._num_streamed += len(addition.token_ids)
        return Usage(self._num_prompt_tokens, self._num_streamed, self._num_cached_streamed)

    @cached_property
    def _num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for _, prompt in self._first_choices())  # a prompt counts once

    def _usage(self) -> Usage:
        firsts = [index for index, _ in self._first_choices() if index < len(self._requests)]
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sum(prompt.num_output_tokens for prompt in self._prompts),
            cached_tokens=sum(self._requests[index].state.num_cached_tokens for index in firsts),
        )

    def _route(self, request: ActiveRequest) -> dict[str, Any]:
        return {"splitserve": route(request.state, request.timeline)} if self._return_route else {}
