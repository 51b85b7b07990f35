"""The storm on real processes: requests with random mixes of features, while workers are killed, frozen and drained.

    python tests/support/real_storm.py --requests 100 [--first N] [--shape 2P2D] [--faults kill freeze drain]

One mixed worker answers all requests undisturbed; then prefill and decode workers answer them in a storm: each token,
text, call and log-probability must be equal. Between other faults prefill workers are killed while their blocks wait to
be read. Exit status 1: some answer differs, more than by near-ties of sampled tokens in 3 of 1,000 requests. With
SPLITSERVE_FIGURES set, figures of the run go to that file.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import jsonschema

from small_clusters import SHAPES
from small_clusters import cluster as quiet_cluster
from splitserve.benchmarks.chaos import chaos
from splitserve.benchmarks.chaos.checks import Leftovers
from splitserve.benchmarks.chaos.faults import Fault, FaultInjector, FaultKind
from splitserve.benchmarks.chaos.load import new_session
from splitserve.orchestration.cluster.launcher import LocalCluster
from storm_ambush import ambush
from storm_answers import ChoiceAnswer, StormAnswer, ask
from storm_referee import StormReferee
from storm_requests import FEATURES, StormCase, check_documents, storm_cases, write_storm_model

STREAMS = 16
PATIENCE = ("--lease-seconds", "3", "--read-deadline-seconds", "3", "--dead-after-seconds", "3", "--drain-seconds", "5")
MAX_NEAR_TIES = 0.003  # as a share of the requests; one is accepted in any number of them
LOST, HANDOVER = "worker_lost", "handover"


class RealStorm:
    """The outcome of a storm. ``problems`` describes every choice that isn't the undisturbed worker's."""

    def __init__(self, cases: Sequence[StormCase]) -> None:
        self.cases = {case.name: case for case in cases}
        self.answers: list[StormAnswer] = []
        self.faults: list[Fault] = []
        self.problems: list[str] = []
        self.near_ties: list[str] = []
        self.num_documents = 0

    @property
    def figures(self) -> Counter[str]:
        """Numbers of requests by feature and by what they lived through, and of faults by kind and role."""
        found = Counter(f"with {name}" for case in self.cases.values() for name in case.features)
        found.update(f"faults: {fault.kind.value} {fault.role}" for fault in self.faults)
        for answer in self.answers:
            found["requests"] += 1
            found["choices"] += len(answer.choices)
            found["tokens"] += sum(len(choice.token_ids) for choice in answer.choices)
            found["lost a worker"] += any(choice.failed_attempts for choice in answer.choices)
            found["lost a worker between first and last token"] += any(map(self._was_hit, answer.choices))
            found["lost a worker during a hand-over"] += any(map(self._was_hit_in_handover, answer.choices))
            found["answers with calls"] += any(choice.calls for choice in answer.choices)
            found["answers with reasoning"] += any(choice.reasoning for choice in answer.choices)
        found["documents checked"] = self.num_documents
        found["near-ties"] = len(self.near_ties)
        found["wrong answers"] = len(self.problems)
        return found

    def _was_hit(self, choice: ChoiceAnswer) -> bool:
        """Return whether a worker of the choice was hit between its first and its last token."""
        return self._is_hit(choice, {attempt.worker for attempt in choice.failed_attempts})

    def _was_hit_in_handover(self, choice: ChoiceAnswer) -> bool:
        """Return whether a hand-over of the choice failed, or its prefill worker was hit after the first token, before
        decode had all blocks: a later loss of that worker doesn't concern the choice."""
        lost = {attempt.worker for attempt in choice.failed_attempts if attempt.reason == LOST}
        is_failed = any(attempt.reason == HANDOVER for attempt in choice.failed_attempts)
        return is_failed or self._is_hit(choice, {worker for worker in lost if worker.startswith("prefill")})

    def _is_hit(self, choice: ChoiceAnswer, workers: set[str]) -> bool:
        names = {worker.partition("@")[0] for worker in workers}
        first, last = (choice.arrivals[0], choice.arrivals[-1]) if choice.arrivals else (0.0, 0.0)
        return any(fault.worker in names and first <= fault.at <= last for fault in self.faults)

    def compare(self, expected: dict[str, StormAnswer], referee: StormReferee) -> None:
        """Compare all answers with those of the undisturbed worker, and check their documents."""
        for answer in self.answers:
            case, quiet = self.cases[answer.case], expected[answer.case]
            if answer.error or answer.usage["prompt_tokens"] != quiet.usage["prompt_tokens"]:
                self._note(answer, 0, answer.error or f"its usage is {answer.usage} instead of {quiet.usage}")
                continue
            for number, (choice, other) in enumerate(zip(answer.choices, quiet.choices, strict=True)):
                if difference := choice.difference(other):
                    self._judge(answer, number, difference, choice.first_difference(other), referee)
                self._check_documents(case, answer, number)

    def _judge(
        self, answer: StormAnswer, number: int, difference: str, first: int | None, referee: StormReferee
    ) -> None:
        """Note a difference: as a near-tie if the referee accepts the tokens from ``first`` on."""
        case, choice = self.cases[answer.case], answer.choices[number]
        if first is None or referee.problem(case, number, choice, first):
            self._note(answer, number, difference)
        else:
            self.near_ties.append(f"{answer.case}, choice {number}: {difference}")

    def _check_documents(self, case: StormCase, answer: StormAnswer, number: int) -> None:
        try:
            self.num_documents += check_documents(case, answer.choices[number])
        except (ValueError, AssertionError, jsonschema.ValidationError) as error:
            self._note(answer, number, f"invalid document: {error}")

    def _note(self, answer: StormAnswer, number: int, problem: str) -> None:
        attempts = [f"{each.worker} {each.reason}" for each in answer.choices[number].failed_attempts]
        body = {name: value for name, value in self.cases[answer.case].body.items() if name != "prompt"}
        self.problems.append(f"{answer.case}, choice {number}: {problem} (failed attempts: {attempts}): {body}")


def undisturbed_answers(model: Path, cases: Sequence[StormCase]) -> dict[str, StormAnswer]:
    """Return the answers of one mixed worker, by case."""
    with quiet_cluster(model, "mixed", max_model_len=1024) as cluster:
        answers = asyncio.run(_ask_all(cluster.url, cases, 4))
    for case, answer in zip(cases, answers, strict=True):
        assert not answer.error, f"on a quiet system {case.name} {answer.error}: {case.body}"
        for choice in answer.choices:
            check_documents(case, choice)
    return {answer.case: answer for answer in answers}


async def _ask_all(url: str, cases: Sequence[StormCase], concurrency: int) -> list[StormAnswer]:
    places = asyncio.Semaphore(concurrency)
    async with new_session() as session:

        async def one(case: StormCase) -> StormAnswer:
            async with places:
                return await ask(session, url, case.path, case.name, case.body)

        return list(await asyncio.gather(*(one(case) for case in cases)))


def answers_in_a_storm(
    model: Path, cases: Sequence[StormCase], shape: str, kinds: Sequence[FaultKind], pause: float
) -> RealStorm:
    """Send all requests while workers are lost."""
    storm, leftovers = RealStorm(cases), Leftovers()
    options = chaos.build_parser().parse_args([*PATIENCE, "--pause-seconds", str(pause)])
    spec = chaos.cluster_spec(options, str(model), **SHAPES[shape])
    cluster = LocalCluster(spec, log_level="error", environment=leftovers.environment)
    with cluster, cluster.supervised():
        leftovers.note_pids(cluster.pids)
        asyncio.run(_storm(cluster, storm, kinds, options, leftovers))
    storm.problems += leftovers.found()
    return storm


async def _storm(
    cluster: LocalCluster,
    storm: RealStorm,
    kinds: Sequence[FaultKind],
    options: argparse.Namespace,
    leftovers: Leftovers,
) -> None:
    left = asyncio.Event()
    async with new_session() as session:

        async def ready() -> set[str]:
            return (await chaos.fetch_metrics(session, cluster.url)).ready

        injector = FaultInjector(
            cluster,
            ready,
            kinds=kinds,
            freeze_seconds=options.lease_seconds + 0.5,
            pause_seconds=options.pause_seconds,
            seed=len(storm.cases),
            before_fault=lambda: leftovers.note_pids(cluster.pids),
        )

        async def disturb() -> None:
            while not left.is_set():
                leftovers.note_pids(cluster.pids)
                storm.faults += await ambush(cluster, ready)
                await injector.run_until(time.monotonic() + options.pause_seconds)

        disturbance = asyncio.create_task(disturb())
        try:
            storm.answers = await _ask_all(cluster.url, list(storm.cases.values()), STREAMS)
            left.set()
            await disturbance
            await injector.finish()
        finally:
            injector.thaw_all()
    storm.faults += injector.faults
    leftovers.note_pids(cluster.pids)


def run_storm(
    model: Path, first: int, count: int, kinds: Sequence[FaultKind], *, shape: str = "2P2D", pause: float = 1.0
) -> RealStorm:
    """Compare the answers in a storm with those of an undisturbed worker."""
    cases = storm_cases(model, first, count)
    expected = undisturbed_answers(model, cases)
    storm = answers_in_a_storm(model, cases, shape, kinds, pause)
    storm.compare(expected, StormReferee(model))
    return storm


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the storm on real processes.")
    parser.add_argument("--requests", type=int, default=100, metavar="N", help="number of requests")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first request")
    parser.add_argument("--shape", choices=[name for name in SHAPES if name != "mixed"], default="2P2D")
    parser.add_argument("--faults", nargs="+", choices=[kind.value for kind in FaultKind], default=list(FaultKind))
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="splitserve-storm-") as directory:
        model = write_storm_model(Path(directory) / "model")
        kinds = [FaultKind(kind) for kind in options.faults]
        storm = run_storm(model, options.first, options.requests, kinds, shape=options.shape)
    figures = dict.fromkeys((f"with {name}" for name in FEATURES), 0) | dict(sorted(storm.figures.items()))
    print(json.dumps(figures | {"seconds": round(time.monotonic() - began, 1)}, indent=2))
    print(*storm.near_ties, *storm.problems, sep="\n")
    if path := os.environ.get("SPLITSERVE_FIGURES"):
        Path(path).write_text(json.dumps(figures | {"near-ties, each": storm.near_ties}))
    is_short = len(storm.answers) < options.requests
    has_many_ties = len(storm.near_ties) > max(1, MAX_NEAR_TIES * options.requests)
    sys.exit(1 if storm.problems or is_short or has_many_ties else 0)


if __name__ == "__main__":
    main()
