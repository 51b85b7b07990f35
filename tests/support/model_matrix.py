"""Every architecture in every arrangement of workers, with workers killed: greedy tokens are those of transformers.

    python tests/support/model_matrix.py --architecture NAME --backend native|transformers [--arrangements A ...]

A random checkpoint is served in one arrangement after the other. Each answers prompts around the sizes of a block and
the window, of several chunks and with shared prefixes, twice: one after another, then all at once. Then, if the
arrangement has a second worker of each role, long answers are asked for while a decode worker and a prefill worker are
killed. In the arrangement "preempted", 1P1D, memory holds the blocks of some of these answers only.
Exit status 1: some token differs, the second time finds no blocks of the first, or nothing was preempted where memory
is too small. With SPLITSERVE_FIGURES set, numbers of requests, hand-overs, preemptions and kills go to that file.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from serving import Reference, complete_all, greedy_bodies, transformers_greedy, wait_until_quiet, worker_metrics
from splitserve.models.cache_groups import cache_layout
from splitserve.models.config import load_model_config
from splitserve.models.demo.checkpoint import write_demo_model
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig, ProtocolConfig
from transformers_models import WINDOW, write_transformers_model
from waiting import wait_until

BLOCK_SIZE = 16
MAX_TOKENS = 12
LONG_OUTPUT = 100
ARRANGEMENTS: dict[str, dict[str, int]] = {
    "mixed": {"num_mixed": 1},
    "1P1D": {"num_prefill": 1, "num_decode": 1},
    "2P2D": {"num_prefill": 2, "num_decode": 2},
    "1-to-2-ranks": {"num_prefill": 1, "num_decode": 1, "prefill_tp": 1, "decode_tp": 2},
    "2-to-1-ranks": {"num_prefill": 1, "num_decode": 1, "prefill_tp": 2, "decode_tp": 1},
    "preempted": {"num_prefill": 1, "num_decode": 1},
}
ONE_RANK = ("mixed", "1P1D", "2P2D", "preempted")
PROTOCOL = ProtocolConfig(heartbeat_seconds=0.5, dead_after_seconds=5.0, lease_seconds=30.0, read_deadline_seconds=30.0)


def make_prompts() -> list[list[int]]:
    """Return prompts; the last begins as the first does."""
    chosen = random.Random(7)

    def draw(count: int) -> list[int]:
        return [chosen.randrange(300, 1500) for _ in range(count)]

    shared = draw(3 * BLOCK_SIZE)
    lengths = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, WINDOW - 1, WINDOW, WINDOW + 1, 130)
    return [shared + draw(3), *(draw(length) for length in lengths), shared + draw(40)]


PROMPTS = make_prompts()
LONG_PROMPTS = [PROMPTS[8][start : start + 50] for start in range(0, 80, 16)]


def small_memory(model: Path, backend: str) -> int:
    """Return the bytes of KV memory in which one of the long answers fits, but not all: half of their blocks, or where
    every layer has a window, as many as all windows have in two blocks each, and the end of a prompt."""
    cache = cache_layout(load_model_config(str(model), backend), BLOCK_SIZE, "float32")
    num_blocks = 24 if any(not group.window for group in cache.groups) else 2 * len(LONG_PROMPTS) + 2
    return num_blocks * sum(cache.blocks(number).block_bytes for number in range(len(cache.groups)))


class Matrix:
    """One architecture. ``problems``: of all arrangements so far."""

    def __init__(self, model: Path, backend: str) -> None:
        self._model = model
        self._backend = backend
        self._references = transformers_greedy(model, PROMPTS, MAX_TOKENS)
        self.problems: list[str] = []
        self.figures = Counter[str]()

    @cached_property
    def _long_references(self) -> list[Reference]:
        return transformers_greedy(self._model, LONG_PROMPTS, LONG_OUTPUT)

    def run(self, arrangement: str) -> None:
        """Serve in one arrangement."""
        workers = ARRANGEMENTS[arrangement]
        engine = EngineConfig(
            model=str(self._model),
            model_backend=self._backend,
            dtype="float32",
            block_size=BLOCK_SIZE,
            kv_memory_bytes=small_memory(self._model, self._backend) if arrangement == "preempted" else 16 << 20,
            max_num_batched_tokens=64,
            max_num_seqs=16,
            tail_chunk_tokens=16,
            threads=1,
        )
        spec = simple_spec(engine, port=0, protocol=PROTOCOL, **workers)
        with LocalCluster(spec, log_level="error") as running:
            if arrangement == "preempted":
                self._preempt(running)
            else:
                self._ask_twice(running, arrangement)
            if workers.get("num_prefill", 1) > 1:
                self._ask_and_kill(running, arrangement)
        self.figures[f"arrangements: {arrangement}"] += 1

    def _ask_twice(self, running: LocalCluster, arrangement: str) -> None:
        bodies = greedy_bodies(self._model.name, PROMPTS, MAX_TOKENS)
        hits = [0.0]
        for at_once in (False, True):
            answers = complete_all(running.url, bodies, at_once=at_once)
            self._compare(f"{arrangement}, at once: {at_once}", PROMPTS, self._references, answers)
            total = self._total(running, arrangement)
            hits.append(total["prefix_hit_tokens_total"])
        is_found = hits[1] > 0 or arrangement == "2P2D"  # where another worker may get the prompt that begins alike
        if not (is_found and hits[1] < hits[2]):
            self.problems.append(f"{arrangement}: tokens found again, by shared prefixes and by repetition: {hits[1:]}")
        self.figures["hand-overs"] += int(total["handovers_total"])
        self.figures["prefix hit tokens"] += int(hits[1])
        self.figures["hit tokens of repeated prompts"] += int(hits[2] - hits[1])

    def _preempt(self, running: LocalCluster) -> None:
        """Ask for more long answers at once than memory holds."""
        bodies = greedy_bodies(self._model.name, LONG_PROMPTS, LONG_OUTPUT)
        answers = complete_all(running.url, bodies, at_once=True)
        self._compare("preempted", LONG_PROMPTS, self._long_references, answers)
        total = self._total(running, "preempted")
        if not total["preemptions_total"]:
            self.problems.append("preempted: nothing was preempted")
        self.figures["preemptions"] += int(total["preemptions_total"])

    def _total(self, running: LocalCluster, arrangement: str) -> Counter[str]:
        """Return the sums of all workers' metrics, once they are quiet."""
        total = Counter[str]()
        for values in wait_until_quiet(running.url).values():
            total.update(values)
        if total["handover_failures_total"]:
            self.problems.append(f"{arrangement}: {total['handover_failures_total']:.0f} hand-overs failed")
        return total

    def _ask_and_kill(self, running: LocalCluster, arrangement: str) -> None:
        """Kill a decode worker, then a prefill worker, while long answers run."""
        bodies = greedy_bodies(self._model.name, LONG_PROMPTS, LONG_OUTPUT)
        for role in ("decode", "prefill"):
            with ThreadPoolExecutor(1) as executor:
                answers = executor.submit(complete_all, running.url, bodies, at_once=True)
                if role == "decode":
                    victim = f"{role}-{self._busy(running, role)}"
                else:
                    victim = f"{role}-0"
                os.kill(running.pids[victim], signal.SIGKILL)
                self.figures[f"kills: {role}"] += 1
                self._compare(f"{arrangement}, {victim} killed", LONG_PROMPTS, self._long_references, answers.result())

    @staticmethod
    def _busy(running: LocalCluster, role: str) -> int:
        """Return the number of a worker of the role that runs requests, once one does."""
        found: list[int] = []

        def is_one_busy() -> bool:
            metrics = worker_metrics(running.url)
            found[:] = [index for index in (0, 1) if metrics.get(f"{role}-{index}", {}).get("num_running", 0) > 0]
            return bool(found)

        wait_until(is_one_busy, "a worker runs requests")
        return found[0]

    def _compare(
        self, what: str, prompts: Sequence[list[int]], references: list[Reference], answers: list[dict[str, Any]]
    ) -> None:
        for prompt, reference, answer in zip(prompts, references, answers, strict=True):
            self.figures["requests"] += 1
            if answer["status"] != 200:
                self.problems.append(f"{what}, prompt of {len(prompt)}: {answer}")
            elif not reference.agrees(tokens := answer["choices"][0]["token_ids"]):
                self.problems.append(f"{what}, prompt of {len(prompt)}: {tokens} instead of {reference.token_ids}")
            self.figures["with several attempts"] += answer.get("splitserve", {}).get("attempts", 1) > 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--architecture", required=True)
    parser.add_argument("--backend", choices=("native", "transformers"), required=True)
    parser.add_argument("--arrangements", nargs="+", choices=tuple(ARRANGEMENTS))
    options = parser.parse_args()
    arrangements = options.arrangements or (ONE_RANK if options.backend == "transformers" else tuple(ARRANGEMENTS))
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_demo_model(Path(folder) / "demo", architecture="llama")
        model = write_transformers_model(Path(folder) / "model", options.architecture, tokenizer)
        matrix = Matrix(model, options.backend)
        for arrangement in arrangements:
            matrix.run(arrangement)
    for problem in matrix.problems:
        print(f"model_matrix: {options.architecture}, {options.backend}: {problem}", file=sys.stderr)
    figures = os.environ.get("SPLITSERVE_FIGURES")
    if figures:
        Path(figures).write_text(json.dumps(matrix.figures))
    print(f"model_matrix: {options.architecture}, {options.backend}: {dict(matrix.figures)}")
    return 1 if matrix.problems else 0


if __name__ == "__main__":
    sys.exit(main())
