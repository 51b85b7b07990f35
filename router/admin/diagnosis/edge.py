"""Causes at the router: its processor time, clients that do not read. Pure."""

from collections.abc import Iterator

from splitserve.protocol.reports.overview import Finding
from splitserve.router.admin.diagnosis.evidence import Evidence, finding, milliseconds, percent

BUSY_ROUTER = 0.85
LATE_SECONDS = 0.05
HALF_BUSY = 0.6
ROUTER_STAGES = ("prepare", "delivery", "write", "unexplained")
MIN_UNREAD = 2
MIN_UNREAD_SHARE = 0.25
MIN_UNREAD_SECONDS = 1.0


def router_cpu(evidence: Evidence) -> Iterator[Finding]:
    """The router's event loop has no processor time left."""
    router = evidence.view.router
    wanted = router.busy_share + router.starved_share
    is_late = router.lag_seconds >= LATE_SECONDS and wanted >= HALF_BUSY
    if wanted < BUSY_ROUTER and not is_late:
        return
    own = evidence.stage(*ROUTER_STAGES)
    yield finding(
        "router_cpu",
        max(evidence.share(own), 0.5 * wanted),
        f"The router has no processor time left: its event loop runs {percent(router.busy_share)} of the time"
        + (f", and waits {percent(router.starved_share)} for a core." if router.starved_share >= 0.1 else "."),
        [
            f"its timers are up to {milliseconds(router.lag_seconds)} late",
            f"{milliseconds(own)} of the time to first token pass in the router" if own else "",
        ],
        "Send token ids instead of text, or fewer and longer streams; give the router a core of its own; or run a "
        "second cluster.",
    )


def slow_clients(evidence: Evidence) -> Iterator[Finding]:
    """Clients do not read their answers, which keep slots among the requests in flight."""
    router = evidence.view.router
    share = router.num_unread / max(1, router.num_unread + router.num_active)
    if router.num_unread < MIN_UNREAD or share < MIN_UNREAD_SHARE or router.unread_seconds < MIN_UNREAD_SECONDS:
        return
    done = router.num_in_flight - router.num_active - router.num_queued - router.num_waiting
    yield finding(
        "slow_clients",
        min(1.0, share),
        f"Clients are slow: {router.num_unread} answers wait for clients that do not read, beside {router.num_active} "
        "requests that workers compute.",
        [
            f"the longest has waited for {milliseconds(router.unread_seconds)}",
            f"workers have finished {done} requests whose answers are still being sent" if done > 0 else "",
            f"{router.max_in_flight} requests may be in flight; further ones get 429",
        ],
        "Look for the clients, or a proxy before them, that stopped reading; `router: {max_requests_in_flight: N}` in "
        "the spec sets the number of slots.",
    )
