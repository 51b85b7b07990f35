"""The goals of the router's limits, and whether a result meets them. Pure."""

from collections.abc import Iterator
from typing import Any

Rows = list[dict[str, Any]]

CPU_MS = {"ids": 2.2, "new": 4.5, "seen": 2.8}
ADDED_P99_MS = {"ids": 5.0, "new": 15.0, "seen": 8.0}
LATENCY_RATE = 200.0
EVENTS_PER_SECOND = 15_000
LONG_CPU_MS = {"ids": 20.0, "first turn": 250.0, "later turn": 30.0}
LATE_P99_MS = 10.0
SUSTAINED_P99_MS = 1000.0
FLAT = 1.10
TENANT_RATIO = 1.2


def verdicts(results: dict[str, Rows]) -> list[dict[str, Any]]:
    """Return each goal that the results say something about: its name, the value, the bound, and whether it is met."""
    found = [*_latency(results), *_sustained(results), *_streams(results), *_long(results), *_flat(results)]
    return [
        {"goal": name, "value": value, "bound": bound, "met": value >= bound if is_least else value <= bound}
        for name, value, bound, is_least in found
    ]


Goal = tuple[str, float, float, bool]


def _latency(results: dict[str, Rows]) -> Iterator[Goal]:
    for row in results.get("latency", ()):
        if row["rate"] == LATENCY_RATE:
            kind = row["kind"]
            yield f"CPU ms of a request, {kind}", row["cpu_ms"], CPU_MS[kind], False
            yield f"added p99 ms at {LATENCY_RATE:g} req/s, {kind}", row["added_p99_ms"], ADDED_P99_MS[kind], False


def _sustained(results: dict[str, Rows]) -> Iterator[Goal]:
    for row in results.get("sustained", ()):
        yield f"p99 ms at {row['rate']:g} req/s, {row['kind']}, 8 out", row["p99_ms"], SUSTAINED_P99_MS, False


def _streams(results: dict[str, Rows]) -> Iterator[Goal]:
    for row in results.get("streams", ()):
        yield "events/s of 256 streams", row["events_per_second"], 0.99 * EVENTS_PER_SECOND, True
        yield "events that came, none merged", row["events"], row["expected"], True


def _long(results: dict[str, Rows]) -> Iterator[Goal]:
    rows = results.get("long", [])
    idle = next((row for row in rows if row["kind"] == "none"), None)
    for row in rows:
        if row is idle or idle is None:
            continue
        spent = (row["cpu_ms_of_all"] - idle["cpu_ms_of_all"]) / row["requests"]
        yield f"CPU ms of 100k tokens, {row['kind']}", round(spent, 1), LONG_CPU_MS[row["kind"]], False
        yield f"others' tokens late p99 ms, {row['kind']}", row["late_p99_ms"], LATE_P99_MS, False


def _flat(results: dict[str, Rows]) -> Iterator[Goal]:
    tenants = {row["load"]: row for row in results.get("tenants", ())}
    if tenants:
        ratio = tenants["beside a flood"]["ttft_p99_ms"] / tenants["alone"]["ttft_p99_ms"]
        yield "p99 TTFT of a tenant beside a flood over alone", round(ratio, 3), TENANT_RATIO, False
        yield "429s of the tenant that floods", tenants["the flood itself"]["refused"], 1, True
    for policy in dict.fromkeys(row["policy"] for row in results.get("workers", ())):
        rows = [row for row in results["workers"] if row["policy"] == policy]
        ratio = round(rows[-1]["request_ms"] / rows[0]["request_ms"], 3)
        yield f"CPU with {rows[-1]['workers']} workers over {rows[0]['workers']}, {policy}", ratio, FLAT, False
    memory = results.get("memory", [])
    if memory:
        later = [row["memory_mib"] for row in memory[len(memory) // 2 :]]
        yield "memory at the end over that at half", round(later[-1] / later[0], 3), FLAT, False
