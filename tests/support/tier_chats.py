"""Chats whose history is larger than a worker's block pool."""

import asyncio
import random
from pathlib import Path

import aiohttp

from serving import complete
from small_clusters import BLOCK_SIZE, body

NUM_USERS = 12


NUM_TURNS = 5


TURN_TOKENS = 40


ANSWER_TOKENS = 8


BLOCK_BYTES = 4 * 4 * 2 * BLOCK_SIZE * 32 * 4  # of the tiny model, in float32


SMALL_POOL = 48 * BLOCK_BYTES  # three users' last turns fill it


# Whole blocks of the turns before. The KV of an answer's last token was never needed, so it isn't there.
KEPT = NUM_USERS * sum(
    ((TURN_TOKENS + ANSWER_TOKENS) * turn - 1) // BLOCK_SIZE * BLOCK_SIZE for turn in range(1, NUM_TURNS)
)


def chat(url: str, model: Path) -> tuple[list[list[list[int]]], int]:
    """All users at once, each one turn after the other: tokens by user and turn; prompt tokens that were cached."""
    chosen = random.Random(11)
    said = [
        [[chosen.randrange(300, 1500) for _ in range(TURN_TOKENS)] for _ in range(NUM_TURNS)] for _ in range(NUM_USERS)
    ]

    async def user(session: aiohttp.ClientSession, turns: list[list[int]]) -> tuple[list[list[int]], int]:
        history: list[int] = []
        answers, num_cached = [], 0
        for turn in turns:
            history = history + turn
            answer = await complete(session, url, body(model, history, max_tokens=ANSWER_TOKENS))
            assert answer["status"] == 200, answer
            answers.append(answer["choices"][0]["token_ids"])
            num_cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            history = history + answers[-1]
        return answers, num_cached

    async def run() -> list[tuple[list[list[int]], int]]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            return list(await asyncio.gather(*(user(session, turns) for turns in said)))

    results = asyncio.run(run())
    return [answers for answers, _ in results], sum(num_cached for _, num_cached in results)
