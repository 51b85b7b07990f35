"""Figures of requests for the overview, from their timelines and summaries. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from splitserve.protocol.cluster_report import RequestSummary
from splitserve.protocol.reports.overview import (
    Objective,
    Path,
    PromptFigures,
    Stage,
    Times,
    TransportFigures,
)
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.objectives import Objectives
from splitserve.router.requests.timeline.stages import HANDOVER_STAGES, TTFT_STAGES, ttft_stages
from splitserve.router.requests.timeline.timeline import Timeline

LONG_FACTOR = 8
"""A prompt with this multiple of the median's tokens to compute is a long one."""
MIN_TOKENS_OF_LONG = 64
WAIT_STAGES = ("queue", "dispatch", "prefill_queue")
EXPOSED_STAGES = ("offer", "post", "wire", "verify")


@dataclass(frozen=True, slots=True)
class EndedRequest:
    summary: RequestSummary
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A request whose first token came in the window, whether it has ended or not."""

    stages: Mapping[str, float]
    ttft_seconds: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_known_tokens: int | None
    is_sibling: bool  # a choice after the first: its prompt was computed for another one

    @property
    def num_computed(self) -> int:
        return max(1, self.num_prompt_tokens - self.num_cached_tokens)

    @property
    def wait_seconds(self) -> float:
        return sum(self.stages.get(stage, 0.0) for stage in WAIT_STAGES)


def first_tokens(ended: Iterable[EndedRequest], active: Iterable[ActiveRequest], since: float) -> list[FirstToken]:
    """Return the requests whose first token came after ``since``."""
    found = [
        FirstToken(
            each.summary.ttft_stages,
            each.summary.ttft_seconds,
            each.summary.num_prompt_tokens,
            each.summary.num_cached_tokens,
            each.summary.num_known_tokens,
            _is_sibling(each.timeline),
        )
        for each in ended
        if each.summary.ttft_seconds is not None and each.timeline.first_token_at >= since
    ]
    for request in active:
        timeline = request.timeline
        if timeline.ttft_seconds is not None and timeline.first_token_at >= since:
            found.append(
                FirstToken(
                    ttft_stages(timeline),
                    timeline.ttft_seconds,
                    len(request.token_ids),
                    request.state.num_cached_tokens,
                    request.num_known_tokens,
                    _is_sibling(timeline),
                )
            )
    return found


def _is_sibling(timeline: Timeline) -> bool:
    return bool(timeline.attempts) and timeline.attempts[0].primary is not None


def times_of(seconds: Iterable[float]) -> Times:
    """Return the distribution of durations."""
    ordered = sorted(seconds)
    if not ordered:
        return Times()
    last = len(ordered) - 1
    return Times(
        num=len(ordered),
        mean=fmean(ordered),
        p50=ordered[min(last, len(ordered) // 2)],
        p99=ordered[min(last, int(0.99 * len(ordered)))],
    )


def ttft_stage_figures(found: Sequence[FirstToken]) -> list[Stage]:
    """Return the stages of the time to first token; one that a request skipped counts as 0 s."""
    return _stages([each.stages for each in found], TTFT_STAGES)


def handover_stage_figures(ended: Iterable[EndedRequest]) -> list[Stage]:
    """Return the stages of the hand-overs."""
    stages = [each.summary.handover_stages for each in ended if each.summary.handover_stages]
    return _stages(stages, HANDOVER_STAGES)


def _stages(found: Sequence[Mapping[str, float]], meanings: Mapping[str, str]) -> list[Stage]:
    present = {name for stages in found for name in stages}
    return [
        Stage(name=name, meaning=meaning, times=times_of(stages.get(name, 0.0) for stages in found))
        for name, meaning in meanings.items()
        if name in present
    ]


def prompt_figures(found: Iterable[FirstToken]) -> PromptFigures:
    """Return the figures of prompts."""
    prompts = [each for each in found if not each.is_sibling]
    if not prompts:
        return PromptFigures()
    known = [each.num_known_tokens for each in prompts if each.num_known_tokens is not None]
    computed = [each.num_computed for each in prompts]
    middle = median(computed)
    long = [count for count in computed if count >= max(MIN_TOKENS_OF_LONG, LONG_FACTOR * middle)]
    short = [each for each in prompts if each.num_computed <= middle]
    return PromptFigures(
        num=len(prompts),
        tokens=sum(each.num_prompt_tokens for each in prompts),
        cached_tokens=sum(each.num_cached_tokens for each in prompts),
        known_tokens=sum(known) if known else None,
        median_tokens=int(middle),
        longest_tokens=max(computed),
        long_share=sum(long) / sum(computed),
        short_wait=times_of(each.wait_seconds for each in short),
        short_prefill_seconds=median(each.stages.get("prefill", 0.0) for each in short),
    )


def paths_of(ended: Iterable[EndedRequest]) -> list[Path]:
    """Return the outcomes, the most frequent first."""
    counts = Counter((each.summary.intended, each.summary.actual, each.summary.reason) for each in ended)
    return [
        Path(intended=intended, actual=actual, reason=reason, num=num)
        for (intended, actual, reason), num in counts.most_common()
    ]


def objective_figures(ended: Sequence[EndedRequest], objectives: Objectives) -> list[Objective]:
    """Return how many requests met each objective; a failed one did not, one that its client ended does not count."""
    judged = [each.summary for each in ended if each.summary.actual != "cancelled"]
    figures = []
    if objectives.ttft_seconds:
        num_met = sum(each.ttft_seconds is not None and each.ttft_seconds <= objectives.ttft_seconds for each in judged)
        figures.append(Objective(name="ttft", seconds=objectives.ttft_seconds, num=len(judged), num_met=num_met))
    if objectives.tpot_seconds:
        num_met = sum(
            each.status == "finished" and (each.itl_seconds or 0.0) <= objectives.tpot_seconds for each in judged
        )
        figures.append(Objective(name="tpot", seconds=objectives.tpot_seconds, num=len(judged), num_met=num_met))
    return figures


def transport_figures(
    ended: Iterable[EndedRequest],
    link_speeds: Mapping[str, Sequence[float]],
    problems: Mapping[str, str],
    seconds: float,
) -> list[TransportFigures]:
    """Return the hand-overs by transport, and the links without any. ``link_speeds`` in bytes per second, and
    ``problems``, both by transport."""
    by_transport: dict[str, list[EndedRequest]] = defaultdict(list)
    for each in ended:
        if each.summary.handover_bytes:
            by_transport[each.summary.transport.rpartition("/")[2]].append(each)  # without the connector's name
    figures = []
    for transport in sorted({*by_transport, *link_speeds}):
        requests = by_transport.get(transport, [])
        num_bytes = sum(each.summary.handover_bytes for each in requests)
        reading = sum(each.summary.handover_read_seconds for each in requests)
        speeds = link_speeds.get(transport, ())
        figures.append(
            TransportFigures(
                transport=transport,
                num=len(requests),
                bytes_per_second=num_bytes / seconds,
                read_bytes_per_second=num_bytes / reading if reading else 0.0,
                link_bytes_per_second=median(speeds) if speeds else 0.0,
                exposed=times_of(_exposed(each.summary) for each in requests if each.summary.handover_stages),
                problem=problems.get(transport, ""),
            )
        )
    return figures


def _exposed(summary: RequestSummary) -> float:
    return sum(summary.handover_stages.get(stage, 0.0) for stage in EXPOSED_STAGES)
