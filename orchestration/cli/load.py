"""Load of a running cluster, from its router's report, as text for ``splitserve status``."""

from splitserve.common.errors import SplitserveError
from splitserve.orchestration.spec.sizes import format_bytes
from splitserve.protocol.cluster_report import ClusterReport, RequestRates, WorkerReport
from splitserve.protocol.counters import TierLoad


def load_of(url: str, api_key_file: str = "") -> str:
    """Return the load of the cluster with this endpoint; without a file the environment has its key. A problem is part
    of the text: the processes that ``status`` shows are worth seeing without it."""
    from splitserve.orchestration.doctor.cluster import read_report
    from splitserve.orchestration.doctor.http import Endpoint
    from splitserve.orchestration.spec.expansion import read_operators_key

    try:
        return load_text(read_report(Endpoint(url, read_operators_key(api_key_file))))
    except SplitserveError as error:
        return f"the load isn't known: {error}"


def load_text(report: ClusterReport) -> str:
    """Return a line of the requests' rates and a table of the workers."""
    header = ("worker", "role", "state", "running", "waiting", "prompt tokens", "KV used", "prefix hits", "tiers")
    rows = [header, *(_row(worker) for worker in report.workers)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(([] if report.rates is None else [_rates_text(report.rates)]) + lines)


def _rates_text(rates: RequestRates) -> str:
    text = f"{rates.num_in_flight} requests in flight, {rates.requests_per_second:.1f}/s"
    text += f", {rates.output_tokens_per_second:.0f} output tokens/s over {rates.seconds:.0f} s"
    if rates.ttft_seconds_median is not None and rates.ttft_seconds_p99 is not None:
        text += f"; TTFT {1e3 * rates.ttft_seconds_median:.0f} ms median, {1e3 * rates.ttft_seconds_p99:.0f} ms p99"
    return text


def _tier(tier: TierLoad) -> str:
    """Return a tier's state, and what was found there; of a shared one, without slots, hits are not known."""
    found = f"{tier.hits} hits" if tier.slots else f"{format_bytes(tier.loaded_bytes)} loaded"
    return f"{tier.name} {'up' if tier.available else 'down'}, {found}"


def _row(worker: WorkerReport) -> tuple[str, ...]:
    """Return a worker's cells. Hits: the share of prompt tokens that its prefix cache had."""
    info, load = worker.info, worker.load
    used = (load.blocks_referenced + load.blocks_quarantined) / info.num_blocks
    known = load.prefix_hit_tokens + load.prompt_tokens
    hits = f"{100 * load.prefix_hit_tokens / known:.0f}%" if known else "-"
    tiers = ", ".join(_tier(tier) for tier in load.tiers)
    return (
        info.party.engine_id,
        str(info.role),
        str(worker.state),
        str(load.num_running),
        str(load.num_waiting),
        str(load.waiting_tokens),
        f"{100 * used:.0f}%",
        hits,
        tiers or "-",
    )
