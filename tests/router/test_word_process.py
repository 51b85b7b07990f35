"""The process that tokenises long texts: its tokens are the tokenizer's, whatever happens to it."""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer

from splitserve.protocol.token_ids import TokenIds
from splitserve.router.text.processes import kept, word_encoder, word_process
from splitserve.router.text.processes.word_encoder import WordEncoder
from splitserve.router.text.tokens import encoder as text_encoder
from splitserve.router.text.tokens import words
from splitserve.router.text.tokens.encoder import TextEncoder
from tokenizer_forms import GPT_4, WITH_WORDS, random_texts, saved, with_expression
from waiting import PATIENCE_SECONDS

TEXT = " ".join(f"w{number} the worker, the router;" for number in range(2000))
SLICE_CHARS = 512


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "SLICE_CHARS", SLICE_CHARS)
    monkeypatch.setattr(kept, "RESTART_SECONDS", 0.05)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return with_expression(GPT_4)


def _children() -> list[psutil.Process]:
    """The processes of this one that tokenise."""
    children = psutil.Process().children()
    return [child for child in children if child.is_running() and word_process.__name__ in child.cmdline()]


async def _until(condition: Callable[[], object]) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < PATIENCE_SECONDS
        await asyncio.sleep(0.01)


class InPlace:
    """Encoding in place, which counts its parts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_parts = 0

    async def __call__(self, part: str, _check: Callable[[int], None]) -> TokenIds:
        self.num_parts += 1
        await asyncio.sleep(0)
        return TokenIds("i", self._tokenizer.encode(part, add_special_tokens=False).ids)


@asynccontextmanager
async def _started(tokenizer: Tokenizer, folder: Path) -> AsyncIterator[tuple[WordEncoder, InPlace]]:
    in_place = InPlace(tokenizer)
    encoder = WordEncoder(saved(tokenizer, folder)[1], in_place)
    encoder.start()
    try:
        await _until(lambda: encoder.is_ready)
        yield encoder, in_place
    finally:
        encoder.close()
        await asyncio.sleep(0.05)  # for the callbacks of the closed connection
    assert not _children()


def _encoded(encoder: WordEncoder, text: str) -> Awaitable[TokenIds]:
    return encoder.encode(text, 0, lambda _: None)


@pytest.mark.parametrize("name", WITH_WORDS)
def test_tokens_are_those_of_the_tokenizer(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_encoder, "MAX_INLINE_CHARS", 10)
    tokenizer, texts = WITH_WORDS[name](), random_texts(seed=3, count=150, most_fragments=1000)

    async def run() -> None:
        with ThreadPoolExecutor(1) as pool:
            encoder = TextEncoder(*saved(tokenizer, tmp_path), pool)
            encoder.start()
            try:
                assert encoder.words is not None
                await _until(lambda: encoder.words.is_ready)
                found = await asyncio.gather(
                    *(encoder.encode(text, add_special_tokens=True, check=lambda _: None) for text in texts)
                )
            finally:
                encoder.close()
        for text, token_ids in zip(texts, found, strict=True):
            assert token_ids.tolist() == tokenizer.encode(text).ids, repr(text)

    asyncio.run(run())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_texts_in_flight_survive_their_process(
    number: int, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tokenizer.encode(TEXT).ids
    monkeypatch.setattr(word_encoder, "REPLY_SECONDS", 0.5)

    async def run() -> None:
        async with _started(tokenizer, tmp_path) as (encoder, in_place):
            for _ in range(2):
                (child,) = _children()
                num_before = in_place.num_parts
                texts = [asyncio.ensure_future(_encoded(encoder, TEXT)) for _ in range(8)]
                await asyncio.sleep(0)
                child.send_signal(number)
                for token_ids in await asyncio.gather(*texts):
                    assert token_ids.tolist() == expected
                assert in_place.num_parts > num_before
                await _until(lambda: encoder.is_ready)
                assert child.pid not in [each.pid for each in _children()]
            num_before = in_place.num_parts
            assert (await _encoded(encoder, TEXT)).tolist() == expected
            assert in_place.num_parts == num_before, "the new process does it"

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert caplog.text.count("a process that tokenises texts ended with status -9: starting another one") == 2


def test_a_terminals_signals_leave_the_process_to_its_router(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async def run() -> None:
        async with _started(tokenizer, tmp_path) as (encoder, in_place):
            (child,) = _children()
            for number in (signal.SIGINT, signal.SIGTERM):
                child.send_signal(number)
                assert (await _encoded(encoder, TEXT)).tolist() == tokenizer.encode(TEXT).ids
            assert in_place.num_parts == 0

    asyncio.run(run())


def test_cancelled_and_refused_texts_leave_the_others_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    counts: list[int] = []

    def refuse(count: int) -> None:
        counts.append(count)
        if count > 100:
            raise ValueError

    async def run() -> None:
        async with _started(tokenizer, tmp_path) as (encoder, in_place):
            for delay in (0.0, 0.001, 0.01, 0.03):
                texts = [asyncio.ensure_future(_encoded(encoder, f"{number} {TEXT}")) for number in range(8)]
                refused = asyncio.ensure_future(encoder.encode(TEXT, 0, refuse))
                await asyncio.sleep(delay)
                for each in texts[::2]:
                    each.cancel()
                with pytest.raises(ValueError):
                    await refused
                for number in range(1, 8, 2):
                    assert (await texts[number]).tolist() == tokenizer.encode(f"{number} {TEXT}").ids
            assert in_place.num_parts == 0
            assert not encoder.num_waiting, "no reply is awaited any more"

    asyncio.run(run())
    assert len(counts) == 4, "each is refused after its first part"


def test_a_short_text_overtakes_long_ones(tokenizer: Tokenizer, tmp_path: Path) -> None:
    done: list[str] = []

    async def run() -> None:
        async with _started(tokenizer, tmp_path) as (encoder, _):

            async def encode(name: str, text: str) -> None:
                await _encoded(encoder, text)
                done.append(name)

            await asyncio.gather(encode("long", TEXT * 4), encode("longer", TEXT * 8), encode("short", "the worker"))

    asyncio.run(run())
    assert done == ["short", "long", "longer"]


def test_texts_without_cuts_are_encoded_in_place(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(word_encoder, "MAX_PART_CHARS", 1000)
    text = f"{TEXT} {'中文' * 2000} {TEXT}"

    async def run() -> None:
        async with _started(tokenizer, tmp_path) as (encoder, in_place):
            assert (await _encoded(encoder, text)).tolist() == tokenizer.encode(text).ids
            assert in_place.num_parts == 1

    asyncio.run(run())


def test_a_file_that_has_changed_is_not_used(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        in_place = InPlace(tokenizer)
        encoder = WordEncoder(saved(tokenizer, tmp_path)[1], in_place)
        WITH_WORDS["gpt-2"]().save(str(tmp_path / "tokenizer.json"))
        encoder.start()
        try:
            await _until(lambda: "ended with status 1" in caplog.text)
            assert (await _encoded(encoder, TEXT)).tolist() == tokenizer.encode(TEXT).ids
            assert in_place.num_parts > 1
        finally:
            encoder.close()

    asyncio.run(run())
    assert "tokenizer.json has changed since the router read it" in capfd.readouterr().err


def test_a_process_that_cannot_be_started_is_tried_again(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        in_place = InPlace(tokenizer)
        encoder = WordEncoder(saved(tokenizer, tmp_path)[1], in_place)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(sys, "executable", "/nowhere/python")
                encoder.start()
                await _until(lambda: "can't start a process that tokenises texts" in caplog.text)
                assert (await _encoded(encoder, TEXT)).tolist() == tokenizer.encode(TEXT).ids
            await _until(lambda: encoder.is_ready)
        finally:
            encoder.close()

    asyncio.run(run())
