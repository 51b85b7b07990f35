"""The storm on real processes: requests with random mixes of features, while workers are killed, frozen and drained.

    python tests/support/real_storm.py --requests 100 [--first N] [--faults kill freeze drain]

One mixed worker answers all requests undisturbed; then two prefill and two decode workers answer them in a storm: every
token and every text must be equal. With SPLITSERVE_FIGURES set, figures of the run go to that file.
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

from small_clusters import cluster as quiet_cluster
from splitserve.benchmarks.chaos import chaos
from splitserve.benchmarks.chaos.checks import Leftovers
from splitserve.benchmarks.chaos.faults import Fault, FaultInjector, FaultKind
from splitserve.benchmarks.chaos.load import Answer, ask, ask_all, new_session
from splitserve.models.demo.checkpoint import write_demo_model
from splitserve.orchestration.cluster.launcher import LocalCluster
from storm_requests import StormCase, check_document, storm_cases

STREAMS = 8
PATIENCE = ("--lease-seconds", "3", "--read-deadline-seconds", "3", "--dead-after-seconds", "3", "--drain-seconds", "5")


class RealStorm:
    """The outcome of a storm. ``problems`` describes every answer that isn't the undisturbed worker's."""

    def __init__(self, cases: Sequence[StormCase]) -> None:
        self.cases = cases
        self.answers: list[Answer] = []
        self.faults: list[Fault] = []
        self.problems: list[str] = []

    @property
    def figures(self) -> Counter[str]:
        """Numbers of requests by feature and by what they lived through, and of faults by kind and role."""
        found = Counter(f"with {name}" for case in self.cases for name in case.features)
        found.update(f"faults: {fault.kind.value} {fault.role}" for fault in self.faults)
        for answer in self.answers:
            found["requests"] += 1
            found["tokens"] += len(answer.token_ids)
            found["lost a worker"] += bool(answer.failed_attempts)
            found["lost a worker between first and last token"] += self._was_hit(answer, 0, len(answer.arrivals) - 1)
            found["lost a worker during a hand-over"] += self._was_hit(answer, -1, 1)
        found["wrong answers"] = len(self.problems)
        return found

    def _was_hit(self, answer: Answer, first: int, last: int) -> bool:
        """Return whether a worker of the answer was hit between two of its tokens; -1 stands for its sending."""
        if not answer.failed_attempts or not first < last < len(answer.arrivals):
            return False
        begin = answer.sent_at if first < 0 else answer.arrivals[first]
        lost = {attempt.worker.partition("@")[0] for attempt in answer.failed_attempts}
        return any(fault.worker in lost and begin <= fault.at <= answer.arrivals[last] for fault in self.faults)


def undisturbed_answers(model: Path, cases: Sequence[StormCase]) -> dict[str, Answer]:
    """Return the answers of one mixed worker, by case."""
    with quiet_cluster(model, "mixed", max_model_len=1024) as cluster:
        answers = asyncio.run(ask_all(cluster.url, [case.case for case in cases], 4))
    for case, answer in zip(cases, answers, strict=True):
        check_document(case.case, answer)
    return {answer.case: answer for answer in answers}


def answers_in_a_storm(model: Path, cases: Sequence[StormCase], kinds: Sequence[FaultKind], pause: float) -> RealStorm:
    """Send all requests while workers are lost."""
    storm, leftovers = RealStorm(cases), Leftovers()
    options = chaos.build_parser().parse_args([*PATIENCE, "--pause-seconds", str(pause)])
    cluster = LocalCluster(
        chaos.cluster_spec(options, str(model)), log_level="error", environment=leftovers.environment
    )
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
    left, places = asyncio.Event(), asyncio.Semaphore(STREAMS)
    async with new_session() as session:

        async def one(case: StormCase) -> None:
            async with places:
                storm.answers.append(await ask(session, cluster.url, case.case))

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
                await injector.run_until(time.monotonic() + 1.0)

        disturbance = asyncio.create_task(disturb())
        try:
            await asyncio.gather(*(one(case) for case in storm.cases))
            left.set()
            await disturbance
            await injector.finish()
        finally:
            injector.thaw_all()
    storm.faults = injector.faults
    leftovers.note_pids(cluster.pids)


def run_storm(model: Path, first: int, count: int, kinds: Sequence[FaultKind], pause: float = 1.0) -> RealStorm:
    """Compare the answers in a storm with those of an undisturbed worker."""
    cases = storm_cases(model.name, first, count)
    expected = undisturbed_answers(model, cases)
    storm = answers_in_a_storm(model, cases, kinds, pause)
    bodies = {case.case.name: case.case.body for case in cases}
    for answer in storm.answers:
        if difference := answer.difference(expected[answer.case]):
            attempts = ", ".join(f"{attempt.worker} {attempt.reason}" for attempt in answer.failed_attempts)
            options = {name: value for name, value in bodies[answer.case].items() if name != "prompt"}
            storm.problems.append(f"{answer.case}: {difference} (failed attempts: {attempts or 'none'}): {options}")
    return storm


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the storm on real processes.")
    parser.add_argument("--requests", type=int, default=100, metavar="N", help="number of requests")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first request")
    parser.add_argument("--faults", nargs="+", choices=[kind.value for kind in FaultKind], default=list(FaultKind))
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="splitserve-storm-") as directory:
        model = write_demo_model(Path(directory) / "model", architecture="qwen3")
        storm = run_storm(model, options.first, options.requests, [FaultKind(kind) for kind in options.faults])
    figures = dict(sorted(storm.figures.items()))
    print(json.dumps(figures | {"seconds": round(time.monotonic() - began, 1)}, indent=2))
    print(*storm.problems, sep="\n")
    if path := os.environ.get("SPLITSERVE_FIGURES"):
        Path(path).write_text(json.dumps(figures))
    sys.exit(1 if storm.problems or len(storm.answers) < options.requests else 0)


if __name__ == "__main__":
    main()
