"""Prometheus metrics of the router and, from their last heartbeats, of the workers."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from splitserve.messages import TierLoad, WorkerLoad
from splitserve.router.core_effects import Count, CountTokens, Observe
from splitserve.router.membership import WorkerRecord, WorkerState

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_HANDOVER_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.01, 0.02, 0.04, 0.1, 0.25, 1, 5)
_E2E_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

_LOAD_COUNTERS = frozenset(
    {
        "steps",
        "prompt_tokens",
        "output_tokens",
        "prefix_hit_tokens",
        "preemptions",
        "handovers",
        "handover_bytes",
        "handover_failures",
        "stale_messages",
        "undeliverable_messages",
        "malformed_messages",
        "kv_mismatches",
        "reads_direct",
        "reads_layers",
        "reads_staged",
        "reads_gathered",
        "reads_mapped",
        "reads_kernel",
        "tier_stored_blocks",
        "tier_loaded_blocks",
        "tier_failures",
        "peer_prefixes",
        "peer_prefix_blocks",
        "peer_prefix_failures",
        "other_copies",
        "host_offered_blocks",
        "reads_repeated",
    }
)


class RouterMetrics:
    """All metrics, in a registry of their own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.http_requests = Counter(
            "splitserve_http_requests",
            "HTTP requests by endpoint and status code",
            ("endpoint", "status"),
            registry=registry,
        )
        self.connections_refused = Counter(
            "splitserve_connections_refused",
            "HTTP connections refused before a request was complete, or cut for another one, by reason",
            ("reason",),
            registry=registry,
        )
        self.requests_finished = Counter(
            "splitserve_requests_finished",
            "Requests that ended: where they were meant to run, where they ran, and why it ended so",
            ("intended", "actual", "reason"),
            registry=registry,
        )
        self.requests_in_flight = Gauge(
            "splitserve_requests_in_flight", "Requests that were admitted and haven't ended", registry=registry
        )
        self.requests_waiting = Gauge(
            "splitserve_requests_waiting", "New requests that wait because no worker can take them", registry=registry
        )
        self.ttft_seconds = _histogram(registry, "ttft", "Arrival of an HTTP request to its first token", _TTFT_BUCKETS)
        self.itl_seconds = _histogram(registry, "itl", "Time between deliveries of tokens of a request", _ITL_BUCKETS)
        self.e2e_seconds = _histogram(
            registry, "e2e", "Arrival of an HTTP request to its end, whatever that was", _E2E_BUCKETS
        )
        self.handover_seconds = _histogram(
            registry, "handover", "First token from prefill to decode ready, both as heard here", _HANDOVER_BUCKETS
        )
        self.prompt_tokens = _counter(registry, "prompt_tokens", "Prompt tokens of placed requests")
        self.output_tokens = _counter(registry, "output_tokens", "Output tokens received and delivered in order")
        self.objectives = Counter(
            "splitserve_objectives",
            "Requests by objective of the cluster spec and whether they met it; a failed one did not",
            ("objective", "met"),
            registry=registry,
        )
        self.ladder_steps = Counter(
            "splitserve_ladder_steps",
            "Attempts that failed, by what came next (handover, local, gave_up) and why",
            ["rung", "reason"],
            registry=registry,
        )
        self.stale_messages = _counter(registry, "stale_messages", "Messages dropped: old attempt, incarnation, ended")
        self.wire_errors = _counter(registry, "wire_errors", "Bytes from sockets that were no message of our schema")
        self.workers_refused = _counter(registry, "workers_refused", "Registrations of workers that were refused")
        self.handshakes_failed = _counter(
            registry, "handshakes_failed", "Connections to membership without the cluster's shared secret"
        )
        self.workers_lost = _counter(
            registry,
            "workers_lost",
            "Workers that died or fell silent, but not those that left in order",
        )

    def watch_workers(self, records: Callable[[], list[WorkerRecord]]) -> None:
        self.registry.register(_WorkerCollector(records))

    def watch_requests(self, num_admitted: Callable[[], int], num_waiting: Callable[[], int]) -> None:
        self.requests_in_flight.set_function(num_admitted)
        self.requests_waiting.set_function(num_waiting)

    # ---- effects of the core ----

    def count(self, effect: Count) -> None:
        counter = getattr(self, effect.metric)
        (counter.labels(*effect.labels) if effect.labels else counter).inc(effect.amount)

    def count_tokens(self, effect: CountTokens) -> None:
        self.output_tokens.inc(effect.num_tokens)
        (self.ttft_seconds if effect.are_first else self.itl_seconds).observe(effect.seconds)

    def observe(self, effect: Observe) -> None:
        getattr(self, effect.metric).observe(effect.seconds)

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _WorkerCollector(Collector):
    """Gauges and counters per worker, read at scrape time."""

    def __init__(self, records: Callable[[], list[WorkerRecord]]) -> None:
        self._records = records

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        records = self._records()
        labels = ("worker", "role")
        ready = GaugeMetricFamily("splitserve_worker_ready", "1 if the worker gets requests", labels=labels)
        placed = GaugeMetricFamily("splitserve_worker_requests_in_flight", "Requests placed there", labels=labels)
        for record in records:
            ready.add_metric(_labels(record), float(record.state is WorkerState.READY))
            placed.add_metric(_labels(record), record.num_requests)
        yield ready
        yield placed
        yield _identities(records)
        yield from _links(records)
        yield from _tiers(records)
        for name in WorkerLoad.__struct_fields__:
            if name == "tiers":
                continue
            family: CounterMetricFamily | GaugeMetricFamily
            text = f"{name} of the worker's last heartbeat"
            if name in _LOAD_COUNTERS:
                family = CounterMetricFamily(f"splitserve_worker_{name}", text, labels=labels)
            else:
                family = GaugeMetricFamily(f"splitserve_worker_{name}", text, labels=labels)
            for record in records:
                family.add_metric(_labels(record), getattr(record.load, name))
            yield family

    def describe(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        return ()


def _identities(records: list[WorkerRecord]) -> GaugeMetricFamily:
    """Which process a worker is: what an operator needs to look at it, or to end it."""
    labels = ("worker", "role", "incarnation", "endpoint", "pid", "kv_events_endpoint")
    family = GaugeMetricFamily("splitserve_worker_info", "Always 1; the labels say who and where it is", labels=labels)
    for record in records:
        info = record.info
        where = (info.endpoint, str(info.pid), info.kv_events_endpoint)
        family.add_metric((*_labels(record), f"{info.party.incarnation:x}", *where), 1.0)
    return family


def _links(records: list[WorkerRecord]) -> Iterator[GaugeMetricFamily]:
    """A transport that nobody intended costs a factor of a hundred, and nothing else shows it."""
    labels = ("worker", "role", "peer", "transport")
    speed = GaugeMetricFamily(
        "splitserve_link_bytes_per_second", "One thread's large read of the peer's KV when connecting", labels=labels
    )
    slow = GaugeMetricFamily(
        "splitserve_link_slow", "1 if KV doesn't travel as it should; the log says why", labels=labels
    )
    for record in records:
        for link in (link for link in record.links if link.transport):
            values = (*_labels(record), link.peer, link.transport)
            speed.add_metric(values, link.bytes_per_second)
            slow.add_metric(values, float(bool(link.problem)))
    yield speed
    yield slow


def _tiers(records: list[WorkerRecord]) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
    """Each tier of each worker: docs/guides/tiers.md."""
    labels = ("worker", "role", "tier")
    for name in TierLoad.__struct_fields__[1:]:
        kind = GaugeMetricFamily if name in ("slots", "blocks", "available") else CounterMetricFamily
        family = kind(f"splitserve_tier_{name}", f"{name} of a tier, as of the last heartbeat", labels=labels)
        for record in records:
            for tier in record.load.tiers:
                family.add_metric((*_labels(record), tier.name), getattr(tier, name))
        yield family


def _labels(record: WorkerRecord) -> tuple[str, str]:
    return (record.info.party.engine_id, str(record.info.role))


def _counter(registry: CollectorRegistry, name: str, text: str) -> Counter:
    return Counter(f"splitserve_{name}", text, registry=registry)


def _histogram(registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(f"splitserve_{name}_seconds", text, buckets=buckets, registry=registry)
