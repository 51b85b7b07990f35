"""Client of conversations: each turn's prompt is the conversation so far with new tokens, sent after the answer before
it and a pause. Conversations begin when they are due, whether or not earlier ones have ended.

A single process is enough for hundreds of requests per second; :func:`run_in_processes` shares the conversations among
several.
"""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import aiohttp
import msgspec

from splitserve.benchmarks.common.stats import RequestRecord
from splitserve.benchmarks.serving.load import Client, Endpoint, no_collections
from splitserve.workloads.conversation import Conversation, Piece, Turn, Workload

START_SECONDS = 0.5
"""Time before the first arrival, in which the client makes the first prompts."""
PROCESS_START_SECONDS = 4.0
NOT_SENT = "not sent: an earlier turn of its conversation failed"
_MAX_CACHED_PIECES = 4096


@dataclass(frozen=True, slots=True)
class Prompts:
    """Maker of prompts: the vocabulary that they are drawn from, and the fields that all bodies share."""

    vocabulary: range
    seed: int
    body: dict[str, Any]

    def encode(self, prompt: list[int], num_output_tokens: int) -> bytes:
        """Return the body of POST /v1/completions."""
        return msgspec.json.encode({**self.body, "prompt": prompt, "max_tokens": num_output_tokens})


@dataclass(slots=True)
class TurnRecord:
    """Record of one turn: its conversation, its number in it, and what the client saw."""

    conversation: str
    number: int
    num_new_tokens: int
    num_output_tokens: int  # requested
    record: RequestRecord = field(default_factory=lambda: RequestRecord(due_seconds=0.0))


def completion_body(model: str, *, temperature: float = 0.0, top_p: float = 1.0) -> dict[str, Any]:
    """Return the fields of a completion of forced length, streamed with token ids and usage."""
    return {
        "model": model,
        "temperature": temperature,
        "top_p": top_p,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }


async def run_conversations(
    endpoint: Endpoint,
    workload: Workload,
    prompts: Prompts,
    id_prefix: str = "",
    start_at: float | None = None,
) -> list[TurnRecord]:
    """Run all conversations; returns the record of each turn that was due, in the order of arrival.

    A conversation ends with its first failed turn. ``start_at``: the load's start by :func:`time.perf_counter`; by
    default :data:`START_SECONDS` from now. Requests get X-Request-Ids that begin with ``id_prefix``, if there is one.
    """
    first_prompts = [_new_tokens(conversation.turns[0], prompts) for conversation in workload.conversations]
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=endpoint.timeout_seconds),
        headers=endpoint.headers,
    ) as session:
        start = time.perf_counter() + START_SECONDS if start_at is None else start_at
        client = Client(session, endpoint.completions_url, contextlib.nullcontext(), start)
        with no_collections():
            async with asyncio.TaskGroup() as tasks:
                running = []
                for conversation, prompt in zip(workload.conversations, first_prompts, strict=True):
                    await asyncio.sleep(max(0.0, start + conversation.start_seconds - time.perf_counter()))
                    talk = _Talk(client, conversation, prompts, prompt, id_prefix)
                    running.append(tasks.create_task(talk.run()))
    records = [record for task in running for record in task.result()]
    return sorted(records, key=lambda each: each.record.due_seconds)


def with_unsent(workload: Workload, turns: Sequence[TurnRecord]) -> list[TurnRecord]:
    """Return ``turns``, and as failed ones those that were not sent since an earlier one of the conversation had
    failed, due when that ended; in the order of arrival.

    Without them a load of which turns fail would count as one of fewer requests.
    """
    ends = {turn.conversation: turn for turn in turns if turn.record.error}
    unsent = []
    for conversation in workload.conversations:
        if (last := ends.get(conversation.name)) is None:
            continue
        at = last.record.end_seconds
        for number, turn in enumerate(conversation.turns[last.number + 1 :], last.number + 1):
            record = RequestRecord(due_seconds=at, sent_seconds=at, end_seconds=at, error=NOT_SENT)
            sizes = turn.num_new_tokens, turn.num_output_tokens
            unsent.append(TurnRecord(conversation.name, number, *sizes, record))
    return sorted([*turns, *unsent], key=lambda each: each.record.due_seconds)


def run_in_processes(
    endpoint: Endpoint, workload: Workload, prompts: Prompts, num_processes: int, id_prefix: str = ""
) -> list[TurnRecord]:
    """Run the conversations from ``num_processes`` processes, which take turns in them and begin together."""
    if num_processes == 1:
        return asyncio.run(run_conversations(endpoint, workload, prompts, id_prefix))
    start = time.perf_counter() + PROCESS_START_SECONDS  # one clock for all processes of a machine
    parts = [
        _Part(endpoint, Workload(workload.name, found), prompts, f"{id_prefix}{number}-" if id_prefix else "", start)
        for number in range(num_processes)
        if (found := workload.conversations[number::num_processes])
    ]
    with ThreadPoolExecutor(len(parts)) as threads:  # each waits for its process
        records = [record for found in threads.map(_run_in_child, parts) for record in found]
    return sorted(records, key=lambda each: each.record.due_seconds)


@dataclass(frozen=True, slots=True)
class _Part:
    """The share of one client process, as its arguments for :func:`run_conversations`."""

    endpoint: Endpoint
    workload: Workload
    prompts: Prompts
    id_prefix: str
    start: float


def _run_in_child(part: _Part) -> list[TurnRecord]:
    command = [sys.executable, "-m", "splitserve.benchmarks.serving.conversations"]
    given = msgspec.json.encode(part, enc_hook=lambda ids: [ids.start, ids.stop])
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=list[TurnRecord])


def main() -> int:
    """Run the part that a parent writes to this process, and write its records back."""
    part = msgspec.json.decode(sys.stdin.buffer.read(), type=_Part, dec_hook=lambda _, ends: range(*ends))
    records = asyncio.run(run_conversations(part.endpoint, part.workload, part.prompts, part.id_prefix, part.start))
    sys.stdout.buffer.write(msgspec.json.encode(records))
    return 0


@dataclass(slots=True)
class _Talk:
    """One running conversation; ``prompt`` is that of its next turn."""

    client: Client
    conversation: Conversation
    prompts: Prompts
    prompt: list[int]
    id_prefix: str

    async def run(self) -> list[TurnRecord]:
        found = []
        due = self.conversation.start_seconds
        for number, turn in enumerate(self.conversation.turns):
            made = TurnRecord(self.conversation.name, number, turn.num_new_tokens, turn.num_output_tokens)
            found.append(made)
            made.record.due_seconds = due
            await asyncio.sleep(max(0.0, self.client.start + due - time.perf_counter()))
            body = self.prompts.encode(self.prompt, turn.num_output_tokens)
            request_id = f"{self.id_prefix}{self.conversation.name}-{number}" if self.id_prefix else ""
            await self.client.send(body, made.record, request_id)
            if made.record.error or number + 1 == len(self.conversation.turns):
                break
            following = self.conversation.turns[number + 1]
            self.prompt += self._answer(made, number) + _new_tokens(following, self.prompts)
            due = made.record.end_seconds + following.think_seconds
        return found

    def _answer(self, made: TurnRecord, number: int) -> list[int]:
        """Return the answer's tokens; in their place ones of the same number if the endpoint doesn't report them."""
        if made.record.output_ids:
            return made.record.output_ids
        stand_in = Piece(f"answer {self.conversation.name} {number}", made.record.output_tokens)
        return stand_in.token_ids(self.prompts.vocabulary, self.prompts.seed)


def _new_tokens(turn: Turn, prompts: Prompts) -> list[int]:
    return [token for piece in turn.pieces for token in _tokens(piece, prompts.vocabulary, prompts.seed)]


@lru_cache(_MAX_CACHED_PIECES)
def _tokens(piece: Piece, vocabulary: range, seed: int) -> tuple[int, ...]:
    return tuple(piece.token_ids(vocabulary, seed))


if __name__ == "__main__":
    sys.exit(main())
