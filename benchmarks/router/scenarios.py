"""The loads that the router's limits are measured with. Each returns rows of figures."""

import argparse
import asyncio
import contextlib
import itertools
from array import array
from collections.abc import Coroutine, Iterator, Sequence
from random import Random
from statistics import median
from typing import Any, TypeVar

import uvloop

from splitserve.benchmarks.common.pauses import without_collector
from splitserve.benchmarks.common.stats import percentiles_ms
from splitserve.benchmarks.router.clients import Arm, DirectClient, HttpPool, wait_ready
from splitserve.benchmarks.router.cluster import Running, running
from splitserve.benchmarks.router.requests import Bodies, Body, Kind
from splitserve.benchmarks.router.streams import Answer, StreamClient, open_loop
from splitserve.benchmarks.router.vocabulary import VOCABULARY, Language
from splitserve.benchmarks.serving.workload import arrival_seconds

Row = dict[str, Any]
Result = TypeVar("Result")

_WARM_UP = 200
_OUTPUT_TOKENS = 64
_SHORT_OUTPUT_TOKENS = 8
_SUSTAINED_RATES = {Kind.IDS: 500.0, Kind.NEW: 250.0}
_POLICIES = ("cost", "least-loaded")
_WORKERS_RATE, _WORKERS_ROUNDS = 100.0, 7
_NUM_STREAMS, _EVENTS_PER_SECOND = 256, 15_000
_LONG_TOKENS, _LONG_RATE, _LONG_REQUESTS = 100_000, 5.0, 30
_CANARIES, _CANARY_SECONDS = 16, 0.02
_MEMORY_SAMPLES = 10
_MEMORY_AT_ONCE = 16


def latency_by_rate(language: Language, options: argparse.Namespace) -> list[Row]:
    """Measure CPU time and added latency at each rate, by kind of prompt."""
    rows: list[Row] = []
    bodies = Bodies(language, options.prompt_tokens, options.seed)
    with running(language) as cluster:
        _run(_warm_up(cluster, bodies))
        for rate in options.rate:
            due = arrival_seconds(int(rate * options.seconds), rate, "poisson", options.seed)
            direct = _run(_direct(cluster, due, options))
            for kind in Kind:
                chosen = _some(bodies.of(kind, _OUTPUT_TOKENS, salt=int(rate)), len(due))
                rows.append({"kind": str(kind), "rate": rate, **_run(_load(cluster, chosen, due, direct))})
    return rows


def sustained(language: Language, options: argparse.Namespace) -> list[Row]:
    """Measure the rates that the router has to sustain, with short outputs."""
    rows: list[Row] = []
    bodies = Bodies(language, options.prompt_tokens, options.seed)
    with running(language) as cluster:
        _run(_warm_up(cluster, bodies))
        for kind, rate in _SUSTAINED_RATES.items():
            due = arrival_seconds(int(rate * options.seconds), rate, "poisson", options.seed)
            chosen = _some(bodies.of(kind, _SHORT_OUTPUT_TOKENS, salt=1), len(due))
            rows.append({"kind": str(kind), "rate": rate, **_run(_load(cluster, chosen, due, None))})
    return rows


def by_workers(language: Language, options: argparse.Namespace) -> list[Row]:
    """Measure the CPU time of a request of token ids by policy and number of workers, half of them for prefill.

    The clusters of a policy are up side by side and take turns, since a machine's speed changes; medians of the rounds.
    Workers cost CPU time without requests, too (heartbeats): that is measured first, per second, and isn't a request's.
    """
    rows: list[Row] = []
    for policy in _POLICIES:
        with contextlib.ExitStack() as stack:
            clusters = []
            for number in options.num_workers:
                half = max(1, number // 2)
                sizes: dict[str, Any] = {"num_prefill": half, "num_decode": half, "has_step_models": True}
                clusters.append((2 * half, stack.enter_context(running(language, policy=policy, **sizes))))
            rows += [{"policy": policy, **row} for row in _in_turns(clusters, language, options)]
    return rows


def _in_turns(clusters: Sequence[tuple[int, Running]], language: Language, options: argparse.Namespace) -> list[Row]:
    """Return a row for each cluster, which comes with its number of workers."""
    bodies = Bodies(language, options.prompt_tokens, options.seed)
    for _, cluster in clusters:
        _run(_warm_up(cluster, bodies))
    idle = {workers: _run(_idle_ms_per_second(cluster, options.seconds)) for workers, cluster in clusters}
    rounds: dict[int, list[Row]] = {workers: [] for workers, _ in clusters}
    for number in range(_WORKERS_ROUNDS):
        count = max(1, int(_WORKERS_RATE * options.seconds / 2))
        due = arrival_seconds(count, _WORKERS_RATE, "poisson", options.seed + number)
        for workers, cluster in clusters:
            chosen = _some(bodies.of(Kind.IDS, _OUTPUT_TOKENS, salt=1000 * workers + number), count)
            row = _run(_load(cluster, chosen, due, None))
            own = row["cpu_ms"] - idle[workers] * due[-1] / count
            rounds[workers].append({"request_ms": own, **row})
    return [
        {
            "workers": workers,
            "idle_ms_per_second": round(idle[workers], 2),
            "request_ms": round(median(row["request_ms"] for row in rows), 3),
            "lowest_ms": round(min(row["request_ms"] for row in rows), 3),
            "highest_ms": round(max(row["request_ms"] for row in rows), 3),
            "requests": sum(row["requests"] for row in rows),
            "failed": sum(row["failed"] for row in rows),
            **{name: round(median(row[name] for row in rows), 3) for name in ("cpu_share", "p50_ms", "p99_ms")},
        }
        for workers, rows in rounds.items()
    ]


def streams(language: Language, options: argparse.Namespace) -> list[Row]:
    """Measure many streams at once, a token of each at a time."""
    token_seconds = _NUM_STREAMS / _EVENTS_PER_SECOND
    num_tokens = int(options.seconds / token_seconds)
    prompt = Bodies(language, 16, options.seed)
    with running(language, token_seconds=token_seconds, max_model_len=num_tokens + 4096) as cluster:
        chosen = _some(prompt.of(Kind.IDS, num_tokens), _NUM_STREAMS)
        due = [number * token_seconds / _NUM_STREAMS for number in range(_NUM_STREAMS)]
        _run(until_ready(cluster))
        answers, figures = _run(_measure(cluster, chosen, due, keeps_times=True))
    begin = max(answer.first_at for answer in answers)
    end = min(answer.last_at for answer in answers)
    events = sum(begin < at < end for answer in answers for at in answer.event_times)
    expected = _NUM_STREAMS * num_tokens
    lateness = [late for answer in answers for late in _lateness(answer, token_seconds)]
    return [
        {
            "streams": _NUM_STREAMS,
            "events": sum(answer.num_events for answer in answers),
            "expected": expected,
            "events_per_second": round(events / (end - begin)),
            "late_p99_ms": percentiles_ms(lateness)["p99"],
            "cpu_share": figures["cpu_share"],
            "cpu_us_per_event": round(1e3 * figures["cpu_ms"] * _NUM_STREAMS / expected, 1),
            "failed": figures["failed"],
        }
    ]


def long_prompts(language: Language, options: argparse.Namespace) -> list[Row]:
    """Measure prompts of 100,000 tokens, and how late the tokens of other streams come meanwhile."""
    rows: list[Row] = []
    with running(language, token_seconds=_CANARY_SECONDS, max_model_len=1 << 18) as cluster:
        _run(until_ready(cluster))
        rows.append({"kind": "none", **_run(_beside_canaries(cluster, [], language, options))})
        for kind, bodies in _long_bodies(language, options).items():
            rows.append({"kind": kind, **_run(_beside_canaries(cluster, bodies, language, options))})
    return rows


def memory(language: Language, options: argparse.Namespace) -> list[Row]:
    """Measure the router's resident memory over many requests, a third of each kind."""
    bodies = Bodies(language, options.prompt_tokens, options.seed)
    with running(language) as cluster:
        _run(_warm_up(cluster, bodies))
        return _run(_memory(cluster, bodies, options.memory_requests))


# ---- parts of them ----


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    result: Result = uvloop.run(work)
    return result


def _some(bodies: Iterator[Body], count: int) -> list[Body]:
    return list(itertools.islice(bodies, count))


async def until_ready(cluster: Running) -> None:
    host, port = cluster.url.removeprefix("http://").split(":")
    pool = HttpPool(host, int(port))
    await wait_ready(pool)
    pool.close()


async def _warm_up(cluster: Running, bodies: Bodies) -> None:
    await until_ready(cluster)
    client = StreamClient(cluster.url)
    for kind in Kind:
        for body in itertools.islice(bodies.of(kind, _SHORT_OUTPUT_TOKENS, salt=-1), _WARM_UP):
            await client.post(client.request(body.path, body.content))
    client.close()
    cluster.spread()


async def _idle_ms_per_second(cluster: Running, seconds: float) -> float:
    """Return the CPU time that router and helpers spend without requests, in milliseconds a second."""
    before = sum(cluster.cpu_seconds())
    await asyncio.sleep(seconds)
    return 1e3 * (sum(cluster.cpu_seconds()) - before) / seconds


async def _direct(cluster: Running, due: Sequence[float], options: argparse.Namespace) -> dict[str, float]:
    """Return the percentiles of answers straight from a worker."""
    client = DirectClient(cluster.workers[-1], _OUTPUT_TOKENS)
    random, arm = Random(options.seed), Arm()
    prompt = array("i", random.choices(range(VOCABULARY - 8), k=options.prompt_tokens))
    start = asyncio.get_running_loop().time()
    tasks = []
    with without_collector():
        for at in due:
            await asyncio.sleep(max(0.0, start + at - asyncio.get_running_loop().time()))
            tasks.append(asyncio.ensure_future(client.call(arm, prompt)))
        await asyncio.gather(*tasks)
    client.close()
    return percentiles_ms(arm.last_seconds)


async def _measure(
    cluster: Running, bodies: Sequence[Body], due: Sequence[float], *, keeps_times: bool = False
) -> tuple[list[Answer], Row]:
    client = StreamClient(cluster.url)
    requests = [client.request(body.path, body.content) for body in bodies]
    before, loop = cluster.cpu_seconds(), asyncio.get_running_loop()
    began_at = loop.time()
    with without_collector():  # its pauses would be taken for the router's
        answers, lags = await open_loop(lambda index: client.post(requests[index], keeps_times=keeps_times), due)
    seconds = loop.time() - began_at
    after = cluster.cpu_seconds()
    client.close()
    router, helpers = (late - early for early, late in zip(before, after, strict=True))
    count = max(1, len(answers))
    return answers, {
        "requests": len(answers),
        "failed": sum(not answer.is_ok for answer in answers),
        "cpu_ms": round(1e3 * (router + helpers) / count, 3),
        "cpu_ms_helpers": round(1e3 * helpers / count, 3),
        "cpu_share": round(router / max(seconds, 1e-9), 3),
        "lag_p99_ms": percentiles_ms(lags or [0.0])["p99"],
    }


async def _load(cluster: Running, bodies: Sequence[Body], due: Sequence[float], direct: dict[str, float] | None) -> Row:
    answers, row = await _measure(cluster, bodies, due)
    last = percentiles_ms([answer.last_at - answer.sent_at for answer in answers])
    row |= {"p50_ms": last["p50"], "p99_ms": last["p99"]}
    if direct is not None:
        row |= {f"added_{share}_ms": round(last[share] - direct[share], 2) for share in ("p50", "p99")}
    return row


def _long_bodies(language: Language, options: argparse.Namespace) -> dict[str, list[Body]]:
    """Return bodies of long prompts: token ids, first turns, and later turns of the same conversations."""
    bodies = Bodies(language, _LONG_TOKENS, options.seed)
    first = _some(bodies.of(Kind.NEW, 1), _LONG_REQUESTS)
    return {
        "ids": _some(bodies.of(Kind.IDS, 1), _LONG_REQUESTS),
        "first turn": first,
        "later turn": [bodies.with_turn(body, "And what follows from that?") for body in first],
    }


async def _beside_canaries(
    cluster: Running, bodies: Sequence[Body], language: Language, options: argparse.Namespace
) -> Row:
    """Send long prompts beside streams whose tokens come at a steady pace."""
    due = [number / _LONG_RATE for number in range(len(bodies))]
    seconds = (len(bodies) or _LONG_REQUESTS) / _LONG_RATE
    canaries = _some(Bodies(language, 16, options.seed).of(Kind.IDS, int((seconds + 1) / _CANARY_SECONDS)), _CANARIES)
    beside = asyncio.ensure_future(_measure(cluster, canaries, [0.0] * _CANARIES, keeps_times=True))
    await asyncio.sleep(0.5)
    before = sum(cluster.cpu_seconds())
    idle = asyncio.ensure_future(asyncio.sleep(seconds))
    _, row = await _measure(cluster, bodies, due)
    await idle
    spent = sum(cluster.cpu_seconds()) - before
    streams_, _ = await beside
    lateness = [late for answer in streams_ for late in _lateness(answer, _CANARY_SECONDS)]
    figures = percentiles_ms(lateness)
    return {
        "requests": len(bodies),
        "failed": row["failed"],
        "cpu_ms_of_all": round(1e3 * spent, 1),
        "cpu_ms": round(row["cpu_ms"], 1) if bodies else "",
        "late_p50_ms": figures["p50"],
        "late_p99_ms": figures["p99"],
    }


def _lateness(answer: Answer, token_seconds: float) -> list[float]:
    """Return how late each event came, against the pace that fits the earliest ones."""
    at_pace = [at - number * token_seconds for number, at in enumerate(answer.event_times)]
    earliest = min(at_pace, default=0.0)
    return [at - earliest for at in at_pace]


async def _memory(cluster: Running, bodies: Bodies, num_requests: int) -> list[Row]:
    client = StreamClient(cluster.url)
    kinds = [bodies.of(kind, _SHORT_OUTPUT_TOKENS, salt=7) for kind in Kind]
    mixed = itertools.islice((next(kind) for kind in itertools.cycle(kinds)), num_requests)
    rows: list[Row] = []
    num_failed = 0

    async def send_some() -> None:
        nonlocal num_failed
        for body in itertools.islice(mixed, num_requests // _MEMORY_SAMPLES // _MEMORY_AT_ONCE):
            num_failed += not (await client.post(client.request(body.path, body.content))).is_ok

    for number in range(1, _MEMORY_SAMPLES + 1):
        before = sum(cluster.cpu_seconds())
        await asyncio.gather(*(send_some() for _ in range(_MEMORY_AT_ONCE)))
        count = num_requests // _MEMORY_SAMPLES // _MEMORY_AT_ONCE * _MEMORY_AT_ONCE
        spent = 1e3 * (sum(cluster.cpu_seconds()) - before) / count
        row = {"requests": number * count, "memory_mib": round(cluster.memory_mib(), 1), "cpu_ms": round(spent, 3)}
        rows.append({**row, "failed": num_failed})
    client.close()
    return rows
