"""Prometheus metrics of the router and, from their last heartbeats, of the workers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import nan
from typing import TypeAlias

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from splitserve.protocol.cluster_report import RequestSummary, WorkerState
from splitserve.protocol.counters import Counter as CounterField
from splitserve.protocol.counters import Distribution, TierLoad, WorkerLoad, metrics_of
from splitserve.protocol.counters import Histogram as HistogramField
from splitserve.router.admin.histogram import QuickHistogram
from splitserve.router.links.worker_record import WorkerRecord
from splitserve.router.placement.modes.serving_mode import Held
from splitserve.router.requests.effects import Count, Observe
from splitserve.router.requests.timeline.stages import HANDOVER_STAGES, TTFT_STAGES

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_HANDOVER_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.01, 0.02, 0.04, 0.1, 0.25, 1, 5)
_E2E_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

_GAP_BUCKETS = (0.001, 0.01, 0.025, 0.05, 0.1, 0.12, 0.15, 0.2, 0.3, 0.5, 1, 2)

_LABELS = ("worker", "role")

_STAGE_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60)
_LENGTH_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the series, and no query needs them


class RouterMetrics:
    """All metrics, in a registry of their own. Each sample gets the label ``model``, unless that is empty; those that
    are not of workers get the label ``router``, unless that is empty: it is, in a router that is alone."""

    def __init__(self, model: str = "", router: str = "") -> None:
        self._model = model
        self._router = router
        self._workers: WorkerCollector | None = None
        self._counted: dict[tuple[str, ...], int] = {}  # by metric and labels; the counters lack it: they lock
        self._http: dict[tuple[str, str], Counter] = {}  # likewise
        self.before_collection: Callable[[], None] = lambda: None  # brings the metrics up to date
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
            "Requests that ended: where they were meant to run, where they ran (or failed, or cancelled: the client "
            "hung up), and why it ended so",
            ("intended", "actual", "reason"),
            registry=registry,
        )
        self.class_requests = Counter(
            "splitserve_class_requests",
            "Requests by class and tenant, as they ended: finished, failed, cancelled, or refused for their predicted "
            "time to first token",
            ("class", "tenant", "outcome"),
            registry=registry,
        )
        self.next_turns = Counter(
            "splitserve_next_turns",
            "Prompts that continue an earlier request, by how their ids differ from those of its output: same, "
            "template, join, tokenisation, truncated, text",
            ("reason",),
            registry=registry,
        )
        self.requests_in_flight = Gauge(
            "splitserve_requests_in_flight", "Requests that were admitted and haven't ended", registry=registry
        )
        self.requests_waiting = Gauge(
            "splitserve_requests_waiting", "New requests that wait because no worker can take them", registry=registry
        )
        self.requests_queued = Gauge(
            "splitserve_requests_queued",
            "Requests that wait for their turn, since the workers are full",
            registry=registry,
        )
        self._add_modes(registry)
        self._add_histograms(registry)
        self.prompt_tokens = _counter(registry, "prompt_tokens", "Prompt tokens of placed requests")
        self.output_tokens = _counter(registry, "output_tokens", "Output tokens received and delivered in order")
        self._add_failures(registry)

    def _add_modes(self, registry: CollectorRegistry) -> None:
        self.serving_is_aggregated = Gauge(
            "splitserve_serving_is_aggregated", "1 while `cost` lets all workers do both phases", registry=registry
        )
        self.held_requests_per_second = Gauge(
            "splitserve_held_requests_per_second",
            "Requests per second that the cluster holds within the objectives, by serving mode, as `cost` predicts; "
            "NaN: not known",
            ("mode",),
            registry=registry,
        )

    def _add_failures(self, registry: CollectorRegistry) -> None:
        self.objectives = Counter(
            "splitserve_objectives",
            "Requests by objective of the cluster spec and whether they met it; a failed one did not",
            ("objective", "met"),
            registry=registry,
        )
        self.ladder_steps = Counter(
            "splitserve_ladder_steps",
            "Attempts that failed, by what came next (handover, local, gave_up) and why",
            ("rung", "reason"),
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
            "Workers that died or sent no heartbeats; not those that left in order",
        )

    def _add_histograms(self, registry: CollectorRegistry) -> None:
        self.router_report_gap_seconds = _histogram(
            registry, "router_report_gap", "Time between reports of another router process on the port", _GAP_BUCKETS
        )
        self.ttft_seconds = _histogram(registry, "ttft", "Arrival of an HTTP request to its first token", _TTFT_BUCKETS)
        self.itl_seconds = _histogram(registry, "itl", "Time between deliveries of tokens of a request", _ITL_BUCKETS)
        self.predicted_ttft_seconds = _histogram(
            registry, "predicted_ttft", "Time to first token as predicted at the request's arrival", _TTFT_BUCKETS
        )
        self.prediction_error_seconds = _histogram(
            registry,
            "prediction_error",
            "Difference of the predicted and the actual time from placement to first token",
            _TTFT_BUCKETS,
        )
        self.e2e_seconds = _histogram(
            registry, "e2e", "Arrival of an HTTP request to its end, whatever that was", _E2E_BUCKETS
        )
        self.handover_seconds = _histogram(
            registry, "handover", "Arrival of the last token that prefill sent to decode's readiness", _HANDOVER_BUCKETS
        )
        self.stage_seconds = QuickHistogram(
            "splitserve_stage_seconds",
            "Stages of the time to first token; the stages of a request add up to it: "
            + "; ".join(f"{stage}: {meaning}" for stage, meaning in TTFT_STAGES.items()),
            _STAGE_BUCKETS,
            registry,
            ("stage",),
        )
        self.handover_stage_seconds = QuickHistogram(
            "splitserve_handover_stage_seconds",
            "Stages from the last token that prefill drew to decode's own first one, by transport: "
            + "; ".join(f"{stage}: {meaning}" for stage, meaning in HANDOVER_STAGES.items()),
            _STAGE_BUCKETS,
            registry,
            ("stage", "transport"),
        )
        self.request_prompt_tokens = QuickHistogram(
            "splitserve_request_prompt_tokens", "Prompt tokens of a request that ended", _LENGTH_BUCKETS, registry
        )
        self.request_output_tokens = QuickHistogram(
            "splitserve_request_output_tokens", "Output tokens of a request that ended", _LENGTH_BUCKETS, registry
        )

    def watch_workers(self, records: Callable[[], list[WorkerRecord]]) -> None:
        self._workers = WorkerCollector(records)

    def watch_requests(
        self, num_admitted: Callable[[], int], num_waiting: Callable[[], int], num_queued: Callable[[], int]
    ) -> None:
        self.requests_in_flight.set_function(num_admitted)
        self.requests_waiting.set_function(num_waiting)
        self.requests_queued.set_function(num_queued)

    def watch_mode(self, is_aggregated: Callable[[], bool], held: Callable[[], Held | None]) -> None:
        self.serving_is_aggregated.set_function(is_aggregated)
        gauge = self.held_requests_per_second
        gauge.labels("disaggregated").set_function(lambda: nan if (rates := held()) is None else rates.disaggregated)
        gauge.labels("aggregated").set_function(lambda: nan if (rates := held()) is None else rates.aggregated)

    def count_http(self, path: str, status: int) -> None:
        """Count an HTTP request by endpoint and status."""
        key = (path, str(status))
        counter = self._http.get(key)
        if counter is None:
            counter = self._http[key] = self.http_requests.labels(*key)
        counter.inc()

    # ---- effects of the core ----

    def count(self, effect: Count) -> None:
        """Count now; the counter itself follows at its collection."""
        key = (effect.metric, *effect.labels)
        self._counted[key] = self._counted.get(key, 0) + effect.amount

    def observe(self, effect: Observe) -> None:
        getattr(self, effect.metric).observe(effect.seconds)

    def observe_end(self, summary: RequestSummary) -> None:
        """Observe the stages and lengths of a request that has ended."""
        self.request_prompt_tokens.observe(summary.num_prompt_tokens)
        self.request_output_tokens.observe(summary.num_output_tokens)
        if summary.predicted_ttft_seconds is not None:
            self.predicted_ttft_seconds.observe(summary.predicted_ttft_seconds)
        self.stage_seconds.observe_each(summary.ttft_stages)
        self.handover_stage_seconds.observe_each(summary.handover_stages, summary.transport)

    def render(self, *, with_workers: bool = True) -> bytes:
        """Return the metrics as text; those of workers are the same at all routers."""
        return generate_latest(self if with_workers else _Own(self))

    def collect(self) -> Iterator[Metric]:
        """Yield all families, their samples with the labels ``model`` and ``router``."""
        yield from self.collect_own()
        if self._workers is not None:
            yield from _labelled(self._workers.collect(), {"model": self._model})

    def collect_own(self) -> Iterator[Metric]:
        """Yield the families that are not of workers."""
        self.before_collection()
        for (metric, *labels), amount in self._counted.items():
            counter: Counter = getattr(self, metric)
            (counter.labels(*labels) if labels else counter).inc(amount)
        self._counted.clear()
        yield from _labelled(self.registry.collect(), {"model": self._model, "router": self._router})


class _Own(Collector):
    """The metrics of a router without those of workers."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.collect_own()


def _labelled(families: Iterable[Metric], labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the families, their samples with more labels, unless these are empty."""
    more = {name: value for name, value in labels.items() if value}
    for family in families:
        if more:
            family.samples = [sample._replace(labels={**sample.labels, **more}) for sample in family.samples]
        yield family


class WorkerCollector(Collector):
    """Gauges and counters per worker, read at scrape time from ``records``."""

    def __init__(self, records: Callable[[], list[WorkerRecord]]) -> None:
        self._records = records

    def collect(self) -> Iterator[Family]:
        records = self._records()
        ready = GaugeMetricFamily("splitserve_worker_ready", "1 if the worker gets requests", labels=_LABELS)
        placed = GaugeMetricFamily("splitserve_worker_requests_in_flight", "Requests placed there", labels=_LABELS)
        for record in records:
            ready.add_metric(_labels(record), float(record.state is WorkerState.READY))
            placed.add_metric(_labels(record), record.num_requests_of_all)
        yield ready
        yield placed
        yield _kv_used(records)
        yield _identities(records)
        yield from _links(records)
        loads = [(_labels(record), record.load) for record in records]
        yield from _families("splitserve_worker", WorkerLoad, _LABELS, loads)
        tiers = [((*_labels(record), tier.name), tier) for record in records for tier in record.load.tiers]
        yield from _families("splitserve_tier", TierLoad, (*_LABELS, "tier"), tiers)

    def describe(self) -> Iterable[Family]:
        return ()


def _families(
    prefix: str,
    struct: type[msgspec.Struct],
    labels: Sequence[str],
    values: Sequence[tuple[tuple[str, ...], msgspec.Struct]],
) -> Iterator[Family]:
    """Yield a family for each annotated field of ``struct``; ``values`` are instances of it with their labels."""
    for name, metric in metrics_of(struct).items():
        if isinstance(metric, HistogramField):
            yield _histogram_family(
                f"{prefix}_{name}", metric, labels, [(of, getattr(each, name)) for of, each in values]
            )
            continue
        kind = CounterMetricFamily if isinstance(metric, CounterField) else GaugeMetricFamily
        family = kind(f"{prefix}_{name}", metric.help, labels=labels)
        for label_values, load in values:
            family.add_metric(label_values, getattr(load, name))
        yield family


def _histogram_family(
    name: str,
    metric: HistogramField,
    labels: Sequence[str],
    values: Sequence[tuple[tuple[str, ...], Distribution]],
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, metric.help, labels=labels)
    bounds = [*map(str, metric.buckets), "+Inf"]
    for label_values, distribution in values:
        counts = distribution.counts or [0] * len(bounds)
        family.add_metric(label_values, list(zip(bounds, accumulate(counts), strict=False)), distribution.total)
    return family


def _kv_used(records: list[WorkerRecord]) -> GaugeMetricFamily:
    """Return the share of each worker's KV blocks that requests hold, or that are in quarantine."""
    family = GaugeMetricFamily(
        "splitserve_worker_kv_used_ratio",
        "Share of the worker's KV blocks that are in use, from 0 to 1; cached blocks without references count as free",
        labels=_LABELS,
    )
    for record in records:
        used = record.load.blocks_referenced + record.load.blocks_quarantined
        family.add_metric(_labels(record), used / record.info.num_blocks)
    return family


def _identities(records: list[WorkerRecord]) -> GaugeMetricFamily:
    """Return the identity of each worker's process, with which an operator can inspect or end it."""
    labels = (*_LABELS, "incarnation", "endpoint", "pid", "kv_events_endpoint")
    family = GaugeMetricFamily("splitserve_worker_info", "Always 1; the labels identify its process", labels=labels)
    for record in records:
        info = record.info
        where = (info.endpoint, str(info.pid), info.kv_events_endpoint)
        family.add_metric((*_labels(record), f"{info.party.incarnation:x}", *where), 1.0)
    return family


def _links(records: list[WorkerRecord]) -> Iterator[Family]:
    """Yield metrics of the links: an unintended transport can be a hundred times slower, and only these show it."""
    labels = (*_LABELS, "peer", "transport")
    speed = GaugeMetricFamily(
        "splitserve_link_bytes_per_second", "One thread's large read of the peer's KV when connecting", labels=labels
    )
    slow = GaugeMetricFamily(
        "splitserve_link_slow", "1 if KV isn't transferred as fast as it should be; the log says why", labels=labels
    )
    prefixes = CounterMetricFamily(
        "splitserve_link_prefix_blocks",
        "Blocks of prompts' prefixes that the worker has read from the peer instead of computing them",
        labels=labels,
    )
    for record in records:
        for link in (link for link in record.links if link.transport):
            values = (*_labels(record), link.peer, link.transport)
            speed.add_metric(values, link.bytes_per_second)
            slow.add_metric(values, float(bool(link.problem)))
            prefixes.add_metric(values, link.prefix_blocks)
    yield speed
    yield slow
    yield prefixes


def _labels(record: WorkerRecord) -> tuple[str, str]:
    return (record.info.party.engine_id, str(record.info.role))


def _counter(registry: CollectorRegistry, name: str, text: str) -> Counter:
    return Counter(f"splitserve_{name}", text, registry=registry)


def _histogram(registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...]) -> QuickHistogram:
    return QuickHistogram(f"splitserve_{name}_seconds", text, buckets, registry)
