"""Sums over the router processes on one port: of their metrics, rates and traces. Pure."""

from collections.abc import Iterable, Iterator, Sequence

from splitserve.protocol.cluster_report import RequestRates, RequestTraces

_HEAD = "# HELP "


def joined_metrics(own: bytes, others: Iterable[bytes]) -> bytes:
    """Return the series of all routers in Prometheus' text format, which wants each family in one place. The routers
    differ in a label of their series; ``own`` may have families that the others lack."""
    more: dict[str, list[str]] = {}
    for text in others:
        for name, lines in _families(text):
            more.setdefault(name, []).extend(line for line in lines if not line.startswith("#"))
    return "".join("".join([*lines, *more.get(name, [])]) for name, lines in _families(own)).encode()


def _families(text: bytes) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the lines of each family."""
    lines: list[str] = []
    for line in text.decode().splitlines(keepends=True):
        if line.startswith(_HEAD) and lines:
            yield _name(lines), lines
            lines = []
        lines.append(line)
    if lines:
        yield _name(lines), lines


def _name(lines: Sequence[str]) -> str:
    return lines[0].removeprefix(_HEAD).split(" ", 1)[0]


def summed_rates(rates: Sequence[RequestRates]) -> RequestRates:
    """Return the rates of all routers. The median of TTFT is the mean of their medians, by requests; the 99th
    percentile is the largest."""
    timed = [each for each in rates if each.ttft_seconds_median is not None]
    weights = [each.requests_per_second or 1e-9 for each in timed]
    medians = [each.ttft_seconds_median or 0.0 for each in timed]
    return RequestRates(
        seconds=max(each.seconds for each in rates),
        num_in_flight=sum(each.num_in_flight for each in rates),
        num_waiting=sum(each.num_waiting for each in rates),
        requests_per_second=sum(each.requests_per_second for each in rates),
        failures_per_second=sum(each.failures_per_second for each in rates),
        prompt_tokens_per_second=sum(each.prompt_tokens_per_second for each in rates),
        output_tokens_per_second=sum(each.output_tokens_per_second for each in rates),
        ttft_seconds_median=(
            sum(weight * median for weight, median in zip(weights, medians, strict=True)) / sum(weights)
            if timed
            else None
        ),
        ttft_seconds_p99=max((each.ttft_seconds_p99 or 0.0 for each in timed), default=None),
    )


def joined_traces(traces: Iterable[RequestTraces]) -> RequestTraces:
    """Return the traces that any router has."""
    return RequestTraces(traces=[trace for each in traces for trace in each.traces])
