"""Streamed answers of the real storm: all choices with text, calls, log-probabilities. Not a test module."""

import time
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import aiohttp
import msgspec

from splitserve.benchmarks.chaos.load import FailedAttempt

LOGPROB_TOLERANCE = 1e-4
_EXACT = ("text", "reasoning", "calls", "finish_reason")


@dataclass(slots=True)
class Call:
    """A tool call as its deltas add up."""

    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class ChoiceAnswer:
    """One choice of an answer. ``arrivals``: times of the chunks that carried tokens, on the monotonic clock."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    finish_reason: str = ""
    logprobs: list[list[float]] = field(default_factory=list)  # of each token: its own, then the alternatives'
    prompt_logprobs: list[list[float]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    failed_attempts: list[FailedAttempt] = field(default_factory=list)

    def difference(self, expected: "ChoiceAnswer") -> str:
        """Describe the difference from an undisturbed worker's choice; "" if there is none."""
        if (position := self.first_difference(expected)) is not None:
            ours, theirs = ([*each.token_ids, None][position] for each in (self, expected))
            return f"token {position} is {ours} instead of {theirs}"
        for name in _EXACT:
            if getattr(self, name) != getattr(expected, name):
                return f"{name} is {getattr(self, name)!r} instead of {getattr(expected, name)!r}"
        for name in ("logprobs", "prompt_logprobs"):
            if not _are_close(getattr(self, name), getattr(expected, name)):
                return f"{name} are {getattr(self, name)} instead of {getattr(expected, name)}"
        return ""

    def first_difference(self, expected: "ChoiceAnswer") -> int | None:
        """Return the position of the first token that differs, or that only one of the two has."""
        ours, theirs = self.token_ids, expected.token_ids
        if ours == theirs:
            return None
        pairs = enumerate(zip(ours, theirs, strict=False))
        return next((position for position, (one, other) in pairs if one != other), min(len(ours), len(theirs)))


def _are_close(ours: list[list[float]], theirs: list[list[float]]) -> bool:
    if list(map(len, ours)) != list(map(len, theirs)):
        return False
    pairs = zip(chain(*ours), chain(*theirs), strict=True)
    return all(abs(one - other) <= LOGPROB_TOLERANCE for one, other in pairs)


@dataclass(slots=True)
class StormAnswer:
    """The answer to one request."""

    case: str
    sent_at: float
    choices: list[ChoiceAnswer]
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    def take(self, chunk: dict[str, Any], now: float) -> None:
        """Take in one event of the stream."""
        self.error = self.error or (f"error event: {chunk['error']}" if "error" in chunk else "")
        if chunk.get("usage"):
            self.usage = {name: chunk["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
        for each in chunk.get("choices", ()):
            choice = self.choices[each["index"]]
            _take(choice, each, now)
            if route := chunk.get("splitserve"):
                choice.failed_attempts = msgspec.convert(route.get("failed_attempts", []), list[FailedAttempt])


def _take(choice: ChoiceAnswer, chunk: dict[str, Any], now: float) -> None:
    delta = chunk.get("delta", {})
    choice.text += (chunk.get("text") or "") + (delta.get("content") or "")
    choice.reasoning += delta.get("reasoning_content") or ""
    for call in delta.get("tool_calls", ()):
        if call.get("id"):
            assert call["index"] == len(choice.calls), f"call {call['index']} begins after {len(choice.calls)}"
            choice.calls.append(Call(call["function"]["name"]))
        choice.calls[call["index"]].arguments += call["function"]["arguments"]
    choice.finish_reason = chunk["finish_reason"] or choice.finish_reason
    choice.logprobs += _rows_of(chunk["logprobs"]) if chunk.get("logprobs") else []
    if chunk.get("prompt_logprobs"):
        choice.prompt_logprobs += [_sorted_logprobs(entry) for entry in chunk["prompt_logprobs"]]
    if chunk.get("token_ids"):
        choice.token_ids += chunk["token_ids"]
        choice.arrivals.append(now)


def _rows_of(logprobs: dict[str, Any]) -> list[list[float]]:
    """Return a token's own log-probability and the best ones, in either endpoint's form."""
    if "content" in logprobs:
        tops = [[top["logprob"] for top in entry["top_logprobs"]] for entry in logprobs["content"]]
        return [[entry["logprob"], *top] for entry, top in zip(logprobs["content"], tops, strict=True)]
    pairs = zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    return [[own, *sorted(top.values(), reverse=True)] for own, top in pairs]


def _sorted_logprobs(entry: dict[str, Any] | None) -> list[float]:
    return sorted((each["logprob"] for each in (entry or {}).values()), reverse=True)


async def ask(session: aiohttp.ClientSession, url: str, path: str, name: str, body: dict[str, Any]) -> StormAnswer:
    """Stream one request; any failure is in the answer's ``error``."""
    answer = StormAnswer(name, time.monotonic(), [ChoiceAnswer() for _ in range(body.get("n", 1))])
    try:
        async with session.post(url + path, json=body) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return answer
            async for line in response.content:
                if not line.startswith(b"data:"):  # an empty line, or a comment in a silence
                    continue
                payload = line.removeprefix(b"data:").strip()
                if payload == b"[DONE]":
                    break
                answer.take(msgspec.json.decode(payload), time.monotonic())
            else:
                answer.error = "the stream ended without [DONE]"
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if not answer.error and not all(choice.finish_reason for choice in answer.choices):
        answer.error = "the stream ended without a finish reason"
    return answer
