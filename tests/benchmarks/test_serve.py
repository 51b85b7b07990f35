"""The load generator: against a real server that speaks OpenAI's streaming completions, and its pure parts."""

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from splitserve.benchmarks.common import report
from splitserve.benchmarks.common.stats import (
    Objective,
    RequestRecord,
    mean_of_longest_tenth_ms,
    parse_objective,
    summarise,
)
from splitserve.benchmarks.serving import serve
from splitserve.benchmarks.serving.load import Endpoint, run_load
from splitserve.benchmarks.serving.workload import TextPrompts, arrival_seconds, plain_token_ids, token_prompts
from splitserve.common.errors import ConfigError


class FakeEndpoint:
    """Streams ``max_tokens`` tokens, ``tokens_per_chunk`` at a time; misbehaves on every fourth request if told to."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.tokens_per_chunk = 1
        self.text = "x"  # of each token
        self.with_usage = True
        self.has_bare_end = False  # an event of its own has the finish reason
        self.misbehave = ""
        self.in_flight = self.max_in_flight = 0
        self.wanted_in_flight = 0  # answers wait until there have been so many at once
        self.url = ""

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        while self.max_in_flight < self.wanted_in_flight:
            await asyncio.sleep(0.005)
        try:
            return await self._answer(request, self.bodies[-1], len(self.bodies) % 4 == 0 and self.misbehave)
        finally:
            self.in_flight -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any], fault: Any) -> web.StreamResponse:
        if fault == "busy":
            return web.json_response({"error": {"message": "too busy"}}, status=429)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def event(data: Any) -> None:
            # In two writes: an event need not arrive in one piece.
            text = data if isinstance(data, str) else json.dumps(data)
            await response.write(f"data: {text[:5]}".encode())
            await asyncio.sleep(0.002)
            await response.write(f"{text[5:]}\n\n".encode())

        left = body["max_tokens"]
        while left:
            num_tokens = min(left, self.tokens_per_chunk)
            left -= num_tokens
            ids = {"token_ids": [7] * num_tokens} if body.get("return_token_ids") else {}
            finish = None if left or self.has_bare_end else "length"
            await event({"choices": [{"index": 0, "text": self.text * num_tokens, "finish_reason": finish, **ids}]})
            if fault == "error-event":
                await event({"error": {"message": "a worker died"}})
                return response
            if fault == "cut":
                assert request.transport is not None
                request.transport.close()
                return response
        if self.has_bare_end:
            await event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        if self.with_usage:
            usage = {"prompt_tokens": 3, "completion_tokens": body["max_tokens"], "total_tokens": 0}
            await event({"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 2}}})
        await event("[DONE]")
        return response


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    fake = FakeEndpoint()
    loop = asyncio.new_event_loop()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/completions", fake.completions)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    runner = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield fake
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def run_bench(fake: FakeEndpoint, directory: Path, *more: str) -> tuple[int, dict[str, Any]]:
    argv = ["--base-url", fake.url, "--model", "m", "--request-rate", "inf", "--num-requests", "8"]
    status = serve.main([*argv, "--input-len", "12", "--output-len", "5", "--result-dir", str(directory), *more])
    [path] = directory.iterdir()
    return status, json.loads(path.read_text())


def test_whole_bench(endpoint: FakeEndpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, result = run_bench(endpoint, tmp_path, "--shared-prefix-len", "4", "--slo", "ttft:60000")
    assert status == 0
    figures = result["figures"]
    assert (figures["completed"], figures["failed"]) == (8, {})
    assert figures["output_tokens"] == 40 and figures["input_tokens"] == 24 and figures["cached_input_tokens"] == 16
    assert figures["tokens_per_chunk"] == {"mean": 1.0, "max": 1.0}
    assert figures["slo_attainment"] == 1.0
    assert figures["ttft_ms"]["p50"] > 0 and figures["itl_ms"]["max"] >= figures["itl_ms"]["p99"] > 0
    assert result["command"][:3] == ["splitserve", "bench", "serve"]
    assert result["versions"]["splitserve"] and result["machine"]["cpus"] >= 1
    text = capsys.readouterr().out
    assert "TTFT" in text and "8 of 8" in text

    prompts = [body["prompt"] for body in endpoint.bodies]
    assert len(prompts) == 9  # a warm-up, too
    assert all(len(prompt) == 12 for prompt in prompts)
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 1
    assert len({prompt[4] for prompt in prompts}) == 9
    assert all(body["ignore_eos"] and body["max_tokens"] == 5 and body["stream"] for body in endpoint.bodies)


def test_packed_streams_are_noticed(endpoint: FakeEndpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint.tokens_per_chunk = 3
    _, result = run_bench(endpoint, tmp_path, "--no-token-ids")
    assert result["figures"]["tokens_per_chunk"] == {"mean": 2.5}
    assert "packs several tokens" in capsys.readouterr().out
    assert "return_token_ids" not in endpoint.bodies[0]


@pytest.mark.parametrize("more", [(), ("--no-token-ids",)])
@pytest.mark.parametrize("has_bare_end", [False, True])
def test_tokens_without_text_are_counted(
    endpoint: FakeEndpoint, tmp_path: Path, more: tuple[str, ...], has_bare_end: bool
) -> None:
    endpoint.text, endpoint.has_bare_end = "", has_bare_end
    status, result = run_bench(endpoint, tmp_path, *more)
    figures = result["figures"]
    assert status == 0 and figures["failed"] == {} and figures["output_tokens"] == 40
    assert figures["tokens_per_chunk"]["mean"] == 1.0, "each token has an arrival of its own"
    assert figures["ttft_ms"]["max"] < figures["e2e_ms"]["max"]


def test_a_stream_without_a_token_has_no_output(endpoint: FakeEndpoint) -> None:
    endpoint.has_bare_end = True
    [record] = asyncio.run(run_load(Endpoint(endpoint.url), [{"max_tokens": 0}], [0.0]))
    assert record.error == "the stream ended without output"


def test_tokens_are_counted_without_usage(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    endpoint.with_usage, endpoint.tokens_per_chunk = False, 2
    _, result = run_bench(endpoint, tmp_path)
    assert result["figures"]["output_tokens"] == 40
    assert result["figures"]["tokens_per_chunk"]["max"] == 2.0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("busy", "HTTP 429: "),
        ("error-event", 'error event: {"message":"a worker died"}'),
        ("cut", "Client"),
    ],
)
def test_failed_requests_are_misses_with_a_reason(
    endpoint: FakeEndpoint, tmp_path: Path, fault: str, reason: str
) -> None:
    endpoint.misbehave = fault
    status, result = run_bench(endpoint, tmp_path, "--num-warmups", "0", "--slo", "ttft:60000")
    figures = result["figures"]
    assert status == 1
    assert figures["completed"] == 6 and sum(figures["failed"].values()) == 2
    assert next(iter(figures["failed"])).startswith(reason)
    assert figures["slo_attainment"] == 0.75


def test_unreachable_endpoint_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"127.0.0.1:9/v1/completions failed: ClientConnectorError"):
        serve.main(["--base-url", "http://127.0.0.1:9/v1", "--model", "m"])


def test_time_out_is_recorded(endpoint: FakeEndpoint) -> None:
    body = {"max_tokens": 1000, "prompt": [1]}
    [record] = asyncio.run(run_load(Endpoint(endpoint.url, timeout_seconds=0.2), [body], [0.0]))
    assert record.error == "time-out"


def test_load_is_open_loop_unless_bounded(endpoint: FakeEndpoint) -> None:
    bodies = [{"max_tokens": 20, "prompt": [1]}] * 6
    endpoint.wanted_in_flight = 6
    asyncio.run(run_load(Endpoint(endpoint.url), bodies, [0.0] * 6))
    assert endpoint.max_in_flight == 6
    endpoint.max_in_flight = endpoint.wanted_in_flight = 0
    records = asyncio.run(run_load(Endpoint(endpoint.url), bodies, [0.0] * 6, max_concurrency=2))
    assert endpoint.max_in_flight <= 2
    assert not any(record.error for record in records)


def test_arrivals() -> None:
    assert arrival_seconds(4, 2.0, "fixed", 0) == [0.0, 0.5, 1.0, 1.5]
    assert arrival_seconds(3, float("inf"), "poisson", 0) == [0.0] * 3
    poisson = arrival_seconds(4001, 10.0, "poisson", 1)
    gaps = [late - early for early, late in itertools.pairwise(poisson)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.1, rel=0.1)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.15)  # as of an exponential distribution
    assert poisson == arrival_seconds(4001, 10.0, "poisson", 1) != arrival_seconds(4001, 10.0, "poisson", 2)
    assert arrival_seconds(0, 1.0, "fixed", 0) == []
    with pytest.raises(ConfigError, match="request rate is 0"):
        arrival_seconds(1, 0, "fixed", 0)


def test_token_prompts_share_exactly_the_prefix() -> None:
    prompts = token_prompts(20, 30, 10, range(50), seed=3)
    assert prompts == token_prompts(20, 30, 10, range(50), seed=3)
    assert {len(prompt) for prompt in prompts} == {30}
    assert len({tuple(prompt[:10]) for prompt in prompts}) == 1
    assert len({prompt[10] for prompt in prompts}) == 20
    assert token_prompts(2, 5, 5, range(9), 0)[0] == token_prompts(2, 5, 5, range(9), 0)[1]
    with pytest.raises(ConfigError, match="prefix must not be longer"):
        token_prompts(1, 5, 6, range(9), 0)


@pytest.fixture
def tokenizer() -> Any:
    """A byte-level BPE with a begin-of-text token, trained here."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    result = Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    words = [f"{first}{vowel}{last}" for first in "bdgkl" for vowel in "aeiou" for last in "mnrst"]
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=["<bot>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    result.train_from_iterator([" ".join(["the", *words])] * 10, trainer)
    bot = result.token_to_id("<bot>")
    result.post_processor = processors.TemplateProcessing(single="<bot> $A", special_tokens=[("<bot>", bot)])
    return result


def test_text_prompts_have_exact_length_and_prefix(tokenizer: Any) -> None:
    texts = TextPrompts(tokenizer).make(8, 40, 17, seed=5)
    encoded = [tokenizer.encode(text).ids for text in texts]
    assert {len(ids) for ids in encoded} == {40}
    assert len({tuple(ids[:17]) for ids in encoded}) == 1
    assert len({ids[17] for ids in encoded}) == 8
    assert tokenizer.token_to_id("<bot>") not in plain_token_ids(tokenizer)


def test_text_prompts_need_words() -> None:
    from tokenizers import Tokenizer, models

    with pytest.raises(ConfigError, match="use --prompt-format tokens"):
        TextPrompts(Tokenizer(models.BPE({"a": 0, "b": 1}, [])))


def record(ttft: float, gaps: list[float], error: str = "") -> RequestRecord:
    arrivals = [1.0 + ttft]
    for gap in gaps:
        arrivals.append(arrivals[-1] + gap)
    return RequestRecord(
        due_seconds=0.9,
        sent_seconds=1.0,
        end_seconds=arrivals[-1],
        chunk_seconds=arrivals,
        input_tokens=10,
        output_tokens=len(arrivals),
        error=error,
    )


def test_summary_figures() -> None:
    records = [record(0.1, [0.01] * 9), record(0.3, [0.01] * 8 + [0.21]), record(0.0, [], "HTTP 503: x")]
    figures = summarise(records, Objective(ttft_ms=400, tpot_ms=20))
    assert figures["ttft_ms"]["p50"] == pytest.approx(200) and figures["ttft_ms"]["max"] == pytest.approx(300)
    assert figures["tpot_ms"]["max"] == pytest.approx(1e3 * 0.29 / 9)
    assert figures["itl_ms"]["p50"] == pytest.approx(10) and figures["itl_ms"]["max"] == pytest.approx(210)
    assert figures["second_token_ms"]["max"] == pytest.approx(10) and figures["later_itl_ms"]["max"] == pytest.approx(
        210
    )
    assert figures["itl_longest_tenth_mean_ms"] == pytest.approx(210)
    assert figures["failed"] == {"HTTP 503: x": 1}
    assert figures["duration_seconds"] == pytest.approx(1.59)
    assert figures["output_tokens_per_second"] == pytest.approx(20 / 1.59)
    assert figures["slo_attainment"] == pytest.approx(1 / 3)  # one too slow, one failed
    assert figures["goodput_requests_per_second"] == pytest.approx(1 / 1.59)
    assert figures["dispatch_lag_ms"]["p50"] == pytest.approx(100)
    assert figures["bunched_gaps_share"] == 0.0
    assert summarise([], None)["completed"] == 0


def test_bunched_chunks_are_noticed() -> None:
    figures = summarise([record(0.1, [0.03, 0.0, 0.0, 0.03, 0.0])], None)
    assert figures["bunched_gaps_share"] == pytest.approx(0.6)
    assert any("60% of chunks arrived together" in note for note in serve.notes(figures, 6))


def test_objectives() -> None:
    assert parse_objective(["ttft:500", "tpot:30"]) == Objective(ttft_ms=500, tpot_ms=30)
    assert not Objective(itl_ms=100).is_met_by(record(0.1, [0.01, 0.2]))
    for bad in ("ttft", "ttft:x", "speed:3", "tpot:-1"):
        with pytest.raises(ConfigError, match="write ttft:MS"):
            parse_objective([bad])
    assert mean_of_longest_tenth_ms([0.001 * gap for gap in range(1, 21)]) == pytest.approx(19.5)


def test_table_aligns() -> None:
    assert report.table([["a", 1.0], ["long", 12345.678]], ("x", "y")).splitlines() == [
        "x             y",
        "a          1.00",
        "long  12,345.68",
    ]
