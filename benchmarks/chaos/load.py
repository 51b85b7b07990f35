"""Requests of the chaos bench, their answers, and the comparison with the answers of a quiet system.

A :class:`Case` is one request body; its answer depends on nothing but the body (float32, seeds). :func:`ask` streams
one; :func:`record_expected` answers each on a quiet system; :class:`Streams` keeps a number of them in flight.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from splitserve.common.errors import SplitserveError

PROMPT_LENGTHS = (1, 16, 300, 17, 600, 64, 150, 401, 15, 800, 220)
VOCABULARY = range(300, 1500)  # ordinary tokens of the demo checkpoint
SHARED_PREFIX_TOKENS = 80
REQUEST_TIMEOUT_SECONDS = 180.0
STOP_STRING_CHARACTERS = 6


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class FailedAttempt(msgspec.Struct, frozen=True):
    """Failed attempt, in the words of the endpoint's route."""

    worker: str
    reason: str


class _Route(msgspec.Struct):
    mode: str
    decode: str
    failed_attempts: list[FailedAttempt] = []


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    splitserve: _Route | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    body: dict[str, Any]


@dataclass(slots=True)
class Answer:
    """Answer to one request. Times are of the client's monotonic clock."""

    case: str
    sent_at: float
    ended_at: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of chunks that carried tokens
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    mode: str = ""
    failed_attempts: list[FailedAttempt] = field(default_factory=list)
    error: str = ""

    def difference(self, expected: "Answer") -> str:
        """Describe the difference from a quiet system's answer; "" if there is none."""
        if self.error:
            return f"failed: {self.error}"
        pairs = enumerate(itertools.zip_longest(self.token_ids, expected.token_ids))
        for position, (ours, theirs) in pairs:
            if ours != theirs:
                return f"token {position} is {ours} instead of {theirs}"
        for name in ("text", "finish_reason", "prompt_tokens", "completion_tokens"):
            if getattr(self, name) != getattr(expected, name):
                return f"{name} is {getattr(self, name)!r} instead of {getattr(expected, name)!r}"
        return ""


def make_cases(model: str, count: int, seed: int) -> list[Case]:
    """Make prompts of many lengths, some with a common prefix; three of four greedy, the others sampled with a seed."""
    chosen = random.Random(seed)
    shared = chosen.choices(VOCABULARY, k=SHARED_PREFIX_TOKENS)
    cases = []
    for index in range(count):
        prompt = chosen.choices(VOCABULARY, k=PROMPT_LENGTHS[index % len(PROMPT_LENGTHS)])
        if index % 5 == 1:
            prompt = shared + prompt
        body: dict[str, Any] = {
            "model": model, "prompt": prompt, "max_tokens": chosen.choice((16, 48, 96, 200)), "temperature": 0,
            "ignore_eos": index % 3 != 0, "stream": True, "stream_options": {"include_usage": True},
            "return_token_ids": True, "return_route": True,
        }  # fmt: skip
        kind = "greedy"
        if index % 4 == 3:
            body |= {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "seed": 1000 + index}
            kind = "sampled"
        cases.append(Case(f"{kind}-{index}", body))
    return cases


def with_stop_string(case: Case, answer: Answer) -> Case:
    """Return the same request with a stop string from the middle of its text, so that its answer ends there."""
    middle = len(answer.text) // 2
    stop = answer.text[middle : middle + STOP_STRING_CHARACTERS]
    return Case(f"stop-{case.name}", {**case.body, "stop": [stop]})


async def ask(session: aiohttp.ClientSession, url: str, case: Case) -> Answer:
    """Stream one case; any failure is in the answer's ``error``."""
    answer = Answer(case.name, sent_at=time.monotonic())
    try:
        async with session.post(f"{url}/v1/completions", json=case.body) as response:
            if response.status == 200:
                await _receive(response, answer)
            else:
                answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended_at = time.monotonic()
    return answer


async def _receive(response: aiohttp.ClientResponse, answer: Answer) -> None:
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        payload = line.removeprefix(b"data:").strip()
        if payload == b"[DONE]":
            if not answer.finish_reason:
                answer.error = answer.error or "the stream ended without a finish reason"
            return
        _take(_decoder.decode(payload), answer)
    answer.error = "the stream ended without [DONE]"


def _take(chunk: _Chunk, answer: Answer) -> None:
    if chunk.error is not None:
        answer.error = f"error event: {chunk.error}"
    for choice in chunk.choices:
        answer.text += choice.text
        answer.token_ids += choice.token_ids
        answer.finish_reason = choice.finish_reason or answer.finish_reason
        if choice.token_ids:
            answer.arrivals.append(time.monotonic())
    if chunk.usage is not None:
        answer.prompt_tokens, answer.completion_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
    if chunk.splitserve is not None:
        answer.mode = chunk.splitserve.mode
        answer.failed_attempts = chunk.splitserve.failed_attempts


def new_session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECONDS)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


async def ask_all(url: str, cases: Sequence[Case], concurrency: int) -> list[Answer]:
    """Send all cases, ``concurrency`` at a time; returns their answers in order. Raises :class:`SplitserveError` if one
    fails."""
    slots = asyncio.Semaphore(concurrency)

    async def one(session: aiohttp.ClientSession, case: Case) -> Answer:
        async with slots:
            return await ask(session, url, case)

    async with new_session() as session:
        answers = list(await asyncio.gather(*(one(session, case) for case in cases)))
    for answer in answers:
        if answer.error:
            raise SplitserveError(f"on a quiet system {answer.case} {answer.error}")
    return answers


@dataclass(frozen=True, slots=True)
class Expected:
    """Answers of a quiet system."""

    cases: list[Case]
    answers: dict[str, Answer]  # by case, each sent alone
    unrepeated: list[Answer]  # answers that differed when sent beside others
    ttft_seconds: list[float]  # of requests beside others


async def record_expected(url: str, cases: Sequence[Case], concurrency: int, num_mixtures: int) -> Expected:
    """Answer each case alone, then all of them ``concurrency`` at a time, ``num_mixtures`` times in different
    combinations, on a quiet system."""
    alone = await ask_all(url, cases, 1)
    stopped = [with_stop_string(case, answer) for case, answer in list(zip(cases, alone, strict=True))[::6]]
    cases = [*cases, *stopped]
    alone += await ask_all(url, stopped, 1)
    answers = {answer.case: answer for answer in alone}
    unrepeated: list[Answer] = []
    for seed in range(num_mixtures):
        mixed = random.Random(seed).sample(cases, len(cases)) if seed else cases
        together = await ask_all(url, mixed, concurrency)
        unrepeated += [answer for answer in together if answer.difference(answers[answer.case])]
    ttft_seconds = [answer.arrivals[0] - answer.sent_at for answer in together]
    return Expected(cases, answers, unrepeated, ttft_seconds)


class Streams:
    """``count`` streams, each sending one random case after another until :meth:`finish`."""

    def __init__(
        self, url: str, cases: Sequence[Case], count: int, seed: int, on_answer: Callable[[Answer], None]
    ) -> None:
        self._url = url
        self._cases = cases
        self._chosen = random.Random(seed)
        self._on_answer = on_answer
        self._finishing = False
        self._tasks = [asyncio.create_task(self._run()) for _ in range(count)]

    async def finish(self) -> None:
        """Send no more requests and wait for those in flight."""
        self._finishing = True
        await asyncio.gather(*self._tasks)

    async def _run(self) -> None:
        async with new_session() as session:
            while not self._finishing:
                answer = await ask(session, self._url, self._chosen.choice(self._cases))
                self._on_answer(answer)
                if answer.error:
                    await asyncio.sleep(0.5)  # a system that fails at once must not turn this into a busy loop
