"""Loads on the twin, as records like those of a real load: the same code computes the figures of both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from splitserve.benchmarks.common.stats import Objective, RequestRecord, summarise
from splitserve.benchmarks.goodput.arms import Arm
from splitserve.benchmarks.goodput.objectives import Objectives
from splitserve.benchmarks.goodput.probe import ProbeResult, result_of
from splitserve.benchmarks.serving.conversations import TurnRecord, with_unsent
from splitserve.common.errors import ConfigError
from splitserve.protocol.request import Role
from splitserve.simulation.twin.cluster import TwinCluster, TwinResult, TwinSpec
from splitserve.simulation.twin.models import Calibration
from splitserve.simulation.twin.worker import WorkerSetup
from splitserve.workloads.conversation import Conversation, Workload
from splitserve.workloads.named import Source

Workers = Callable[[Arm], Sequence[WorkerSetup]]
APART = 3.0
"""Time between requests that come one at a time, in terms of what the slowest worker's step model says of one."""


def records_of(result: TwinResult) -> list[TurnRecord]:
    """Return the records that a client would have made."""
    return [
        TurnRecord(
            conversation=turn.conversation,
            number=turn.number,
            num_new_tokens=turn.num_prompt_tokens,
            num_output_tokens=turn.num_output_tokens,
            record=RequestRecord(
                due_seconds=turn.arrived_at,
                sent_seconds=turn.arrived_at,
                end_seconds=turn.ended_at,
                chunk_seconds=turn.token_times,
                chunk_tokens=bytearray(b"\x01") * len(turn.token_times),
                input_tokens=turn.num_prompt_tokens,
                output_tokens=len(turn.token_times),
                cached_tokens=turn.num_cached_tokens,
                finish_reason="" if turn.error else "length",
                error=turn.error,
            ),
        )
        for turn in result.turns
    ]


def figures_of(workload: Workload, result: TwinResult, objective: Objective) -> dict[str, Any]:
    """Return the figures of a load on the twin, as of `splitserve bench serve`."""
    return summarise([turn.record for turn in with_unsent(workload, records_of(result))], objective)


@dataclass(frozen=True, slots=True)
class LongestSequence:
    """The longest sequence that a cluster takes."""

    num_tokens: int
    reason: str  # what bounds it, as a clause
    remedy: str  # what allows longer ones


def longest_of(
    workers: Sequence[WorkerSetup], *, origin: str, num_positions: int = 0, max_model_len: int = 0
) -> LongestSequence:
    """Return the longest sequence that ``workers`` take.

    ``origin``: the model, or the running cluster; ``num_positions``: of the model, 0 if they aren't known;
    ``max_model_len``: the option, 0 if it wasn't given.
    """
    num_tokens = max(worker.max_model_len for worker in workers if worker.role is not Role.PREFILL)
    if not num_positions:
        return LongestSequence(num_tokens, f"the longest sequence of {origin} is {num_tokens} tokens", "")
    if num_tokens == max_model_len:
        return LongestSequence(num_tokens, f"--max-model-len is {num_tokens}", ", or raise --max-model-len")
    if num_tokens < num_positions:
        return LongestSequence(
            num_tokens, f"the KV memory of a worker holds {num_tokens} tokens", ", or raise --kv-memory"
        )
    return LongestSequence(
        num_tokens, f"the positions of {origin} end at {num_tokens}", ", or choose a --model with more positions"
    )


def check_lengths(workload: Workload, longest: LongestSequence) -> str:
    """Return a note on requests that are too long for the cluster; "" if there are none. Raises :class:`ConfigError` if
    all are."""
    totals = [
        sum(turn.num_new_tokens + turn.num_output_tokens for turn in conversation.turns)
        for conversation in workload.conversations
    ]
    num_longer = sum(total > longest.num_tokens for total in totals)
    if not num_longer:
        return ""
    # The first turn alone decides whether any request of a conversation fits.
    shortest = min(each.turns[0].num_new_tokens + each.turns[0].num_output_tokens for each in workload.conversations)
    if shortest > longest.num_tokens:
        raise ConfigError(
            f"each request of the workload {workload.name} has {shortest} tokens or more, prompt and output together, "
            f"but {longest.reason}: shorten the requests{longest.remedy}"
        )
    kind = "conversations" if workload.num_requests > len(totals) else "requests"
    return (
        f"{num_longer} of {len(totals)} {kind} have up to {max(totals)} tokens and will fail, since {longest.reason}: "
        f"shorten them (of a trace, --max-tokens {longest.num_tokens} leaves them out){longest.remedy}"
    )


def left_out_words(source: Source) -> str:
    """Return a note on the conversations of a trace that are too long to be taken from it; "" if there are none."""
    if source.trace is None or not source.max_tokens:
        return ""
    found = source.trace.conversations
    totals = [sum(turn.num_new_tokens + turn.num_output_tokens for turn in each.turns) for each in found]
    num_longer = sum(total > source.max_tokens for total in totals)
    if not num_longer:
        return ""
    return (
        f"{num_longer} of {len(totals)} conversations of the trace {source.name} have more than {source.max_tokens} "
        f"tokens, up to {max(totals)}, and are left out; --max-tokens sets that bound"
    )


def notes_of(source: Source, num_runs: int) -> list[str]:
    """Return notes on what a trace leaves out, and on what its runs have in common."""
    found = [left_out_words(source)]
    if source.trace is not None and num_runs > 1:
        found.append(
            f"each run has the same requests of the trace {source.name} at the same times: the lowest and the highest "
            "figure don't show what other arrivals would change"
        )
    return list(filter(None, found))


def check_arrivals(source: Source, num_requests: int) -> str:
    """Return why no rate can be offered with the first ``num_requests`` requests of a trace: all come at the same time,
    as those of a single line or without timestamps do, or are turns of one conversation; "" if one can."""
    if source.trace is None:
        return ""
    conversations = source.at(1.0, max(2, num_requests), 0).conversations
    if len({conversation.start_seconds for conversation in conversations}) > 1:
        return ""
    if len(conversations) == 1:
        return (
            f"the load of the trace {source.name} is one conversation, the same at any rate: raise --num-requests, or "
            "use a trace of more conversations"
        )
    return (
        f"all {len(conversations)} requests of the trace {source.name} come at the same time, at any rate: "
        "give its lines timestamps that differ, or a workload like 1024/128"
    )


def one_at_a_time(workload: Workload, workers: Sequence[WorkerSetup]) -> Workload:
    """Return the same conversations, each of which begins long after the one before has ended."""
    conversations, begin = [], 0.0
    for each in workload.conversations:
        conversations.append(replace(each, start_seconds=begin))
        begin += 1.0 + APART * max(_seconds_of(each, worker) for worker in workers)
    return Workload(workload.name, tuple(conversations))


def _seconds_of(conversation: Conversation, worker: WorkerSetup) -> float:
    """Return the seconds that a conversation takes a worker that has no other one."""
    context, seconds = 0, 0.0
    for turn in conversation.turns:
        seconds += turn.think_seconds
        seconds += worker.model.prefill_seconds(0, context + turn.num_new_tokens, worker.engine.max_num_batched_tokens)
        context += turn.num_new_tokens + turn.num_output_tokens
        seconds += turn.num_output_tokens * worker.model.decode_seconds(1, context)
    return seconds


class TwinProber:
    """Prober of arms on the twin, as :mod:`splitserve.benchmarks.goodput.comparison` calls it."""

    def __init__(
        self,
        workers: Workers,
        calibration: Calibration,
        source: Source,
        objectives: Objectives,
        num_requests: Callable[[float], int],
    ) -> None:
        """``num_requests``: of a load, by its rate."""
        self._workers = workers
        self._calibration = calibration
        self._source = source
        self._objectives = objectives
        self._num_requests = num_requests

    def __call__(self, name: str, arm: Arm | None, rate: float, seed: int) -> ProbeResult:
        """Run the workload at ``rate`` on the arm's twin."""
        assert arm is not None, "an endpoint has no twin"
        workload = self._source.at(rate, self._num_requests(rate), seed)
        return self._result(name, arm, rate, seed, workload)

    def alone(self, name: str, arm: Arm, rate: float, seed: int) -> ProbeResult:
        """Run the requests of the load at ``rate`` one at a time: no load's latencies are lower."""
        workload = self._source.at(rate, self._num_requests(rate), seed)
        return self._result(name, arm, 0.0, seed, one_at_a_time(workload, self._workers(arm)))

    def _result(self, name: str, arm: Arm, rate: float, seed: int, workload: Workload) -> ProbeResult:
        spec = TwinSpec(
            workers=self._workers(arm),
            calibration=self._calibration,
            policy=arm.policy,
            ttft_ms=self._objectives.ttft_ms,
            tpot_ms=self._objectives.itl_ms,
        )
        result = TwinCluster(spec, seed).run(workload, seed)
        return result_of(name, rate, seed, workload, records_of(result))
