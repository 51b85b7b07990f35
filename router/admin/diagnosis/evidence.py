"""Figures that several causes look at, from an overview. Pure."""

from collections.abc import Iterable
from statistics import mean

from splitserve.protocol.cluster_report import WorkerState
from splitserve.protocol.reports.overview import Finding, Overview, WorkerFigures
from splitserve.protocol.request import Role
from splitserve.router.admin.overview.request_figures import WAIT_STAGES

MIN_REQUESTS = 3
"""Requests in the window below which their times say nothing."""
MIN_LOST_SECONDS = 0.025
"""Mean time per request below which a wait is of no interest."""
BUSY_SHARE = 0.85
"""Share of the time from which on a worker counts as saturated."""
MET_SHARE = 0.95
"""Share of requests that must meet an objective for it to count as met."""
TTFT, TPOT = "ttft", "tpot"


class Evidence:
    """An overview, and figures that follow from it."""

    def __init__(self, view: Overview) -> None:
        self.view = view
        self._stages = {stage.name: stage.times.mean for stage in view.stages}
        alive = (str(WorkerState.READY), str(WorkerState.DRAINING))
        self.workers = [worker for worker in view.workers if worker.state in alive]
        self.prefill = self._of(Role.PREFILL) or self._of(Role.MIXED)
        self.decode = self._of(Role.DECODE) or self._of(Role.MIXED)

    def _of(self, role: Role) -> list[WorkerFigures]:
        return [worker for worker in self.workers if worker.role == str(role)]

    @property
    def has_requests(self) -> bool:
        return self.view.ttft.num >= MIN_REQUESTS

    def stage(self, *names: str) -> float:
        """Return the mean seconds of stages of the time to first token."""
        return sum(self._stages.get(name, 0.0) for name in names)

    @property
    def wait(self) -> float:
        """Return the mean wait of a prompt for its first step."""
        return self.stage(*WAIT_STAGES)

    def share(self, seconds: float) -> float:
        """Return the share of the mean time to first token that ``seconds`` are."""
        return min(1.0, seconds / self.view.ttft.mean) if self.view.ttft.mean > 0 else 0.0

    @property
    def prefill_busy(self) -> float:
        return _mean(worker.busy_share for worker in self.prefill)

    @property
    def decode_busy(self) -> float:
        return _mean(worker.busy_share for worker in self.decode)

    @property
    def waiting_tokens(self) -> int:
        """Return the prompt tokens that wait, at prefill workers or in the router for them."""
        return self.view.router.queued_tokens + sum(worker.waiting_tokens for worker in self.prefill)

    @property
    def missed_tokens(self) -> int:
        """Return the tokens with which an earlier prompt began, and that were computed nevertheless."""
        prompts = self.view.prompts
        return max(0, (prompts.known_tokens or 0) - prompts.cached_tokens)

    @property
    def missed_share(self) -> float:
        """Return these tokens over all tokens to compute."""
        computed = self.view.prompts.tokens - self.view.prompts.cached_tokens
        return min(1.0, self.missed_tokens / computed) if computed > 0 else 0.0

    def is_met(self, objective: str) -> bool:
        """Return whether nearly all requests meet an objective; False if the cluster has none."""
        return any(
            each.name == objective and each.num >= MIN_REQUESTS and each.num_met >= MET_SHARE * each.num
            for each in self.view.objectives
        )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return mean(found) if found else 0.0


def finding(name: str, severity: float, sentence: str, reasons: Iterable[str], remedy: str) -> Finding:
    """Return a finding, its severity within 0 and 1, without empty reasons."""
    kept = [reason for reason in reasons if reason]
    return Finding(name=name, sentence=sentence, severity=min(1.0, severity), reasons=kept, remedy=remedy)


def milliseconds(seconds: float) -> str:
    """Return a duration for people."""
    if seconds >= 1.0:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.1f} ms"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def rate(bytes_per_second: float) -> str:
    """Return a speed for people."""
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.1f} GB/s"
    return f"{bytes_per_second / 1e6:.1f} MB/s"
