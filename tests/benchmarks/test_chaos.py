"""The chaos bench: a short storm on real processes, and whether its checks see what they are there to see."""

import mmap
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from splitserve.benchmarks.chaos.checks import HELD_GAUGES, Leftovers, Metrics, ProcessState, growth
from splitserve.benchmarks.chaos.faults import Fault, FaultKind
from splitserve.benchmarks.chaos.load import Answer, FailedAttempt, make_cases, with_stop_string
from splitserve.benchmarks.chaos.recovery import recovery, stall_seconds
from waiting import PATIENCE_SECONDS, wait_until

SHORT_TIMES = {"lease": 3, "dead-after": 2, "heartbeat": 0.25, "read-deadline": 2}
SHARED_MEMORY = Path("/dev/shm")


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_short_storm_changes_no_answer_and_leaves_nothing(transport: str) -> None:
    times = [text for name, seconds in SHORT_TIMES.items() for text in (f"--{name}-seconds", str(seconds))]
    command = [sys.executable, "-m", "splitserve.orchestration.cli.main", "bench", "chaos", "--transport", transport]
    command += ["--duration", "3", "--warm-up", "0", "--cases", "6", "--streams", "8", "--pause-seconds", "0.4"]
    command += ["--seed", "2", "--no-check-times", *times]  # which kills, drains and freezes a worker
    if transport == "tcp":
        # A frozen process that goes on may be aborted by UCX's own time-out. In so short a storm that can hit the last
        # worker of a pool, whose new requests then get 503; the long form, with its pauses, freezes over TCP too.
        command += ["--faults", "kill", "drain"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "ok   all requests complete with the quiet run's tokens" in done.stdout
    assert "ok   answers repeat on a quiet system" in done.stdout and "0 answers differ by near-ties" in done.stdout
    assert re.search(r"reads of KV .*: [1-9]\d* direct; links: \S+", done.stdout), done.stdout


def test_sigterm_in_a_storm_leaves_no_frozen_worker() -> None:
    """A process that is stopped hears of nothing, not even of its parent's end."""
    command = [sys.executable, "-m", "splitserve.orchestration.cli.main", "bench", "chaos", "--faults", "freeze"]
    command += ["--duration", "60", "--warm-up", "0", "--cases", "1", "--streams", "2", "--pause-seconds", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as bench:
        started = time.monotonic()
        workers: list[psutil.Process] = []
        while psutil.STATUS_STOPPED not in [worker.status() for worker in workers]:
            assert bench.poll() is None and time.monotonic() < started + 300, "no worker was frozen"
            time.sleep(0.05)
            workers = psutil.Process(bench.pid).children(recursive=True)
        bench.terminate()
        status = bench.wait(120)
    gone, left = psutil.wait_procs(workers, timeout=PATIENCE_SECONDS)
    for worker in left:
        worker.kill()
    assert gone and not left
    assert status == 130


def answer(**fields: object) -> Answer:
    values = {"case": "greedy-0", "sent_at": 1.0, "ended_at": 9.0, "token_ids": [1, 2, 3], "text": "abc"}
    return Answer(**{**values, "finish_reason": "length", "prompt_tokens": 4, "completion_tokens": 3, **fields})


class TestAnswers:
    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"token_ids": [1, 2, 4]}, "token 2 is 4 instead of 3"),
            ({"token_ids": [1, 2]}, "token 2 is None instead of 3"),
            ({"token_ids": [1, 2, 3, 3]}, "token 3 is 3 instead of None"),
            ({"text": "abd"}, "text is 'abd'"),
            ({"finish_reason": "stop"}, "finish_reason"),
            ({"completion_tokens": 4}, "completion_tokens is 4 instead of 3"),
            ({"error": "HTTP 503"}, "failed: HTTP 503"),
        ],
    )
    def test_every_difference_is_seen(self, fields: dict[str, object], words: str) -> None:
        assert words in answer(**fields).difference(answer())

    def test_the_same_answer_at_another_time_is_the_same(self) -> None:
        assert answer(sent_at=5.0, arrivals=[6.0], failed_attempts=[FailedAttempt("d", "x")]).difference(answer()) == ""

    def test_cases_differ_and_are_the_same_each_time(self) -> None:
        cases = make_cases("m", 24, seed=1)
        assert cases == make_cases("m", 24, seed=1) != make_cases("m", 24, seed=2)
        assert len({case.name for case in cases}) == 24
        assert {case.body["temperature"] for case in cases} == {0, 0.9}
        assert with_stop_string(cases[0], answer(text="0123456789abcdef")).body["stop"] == ["89abcd"]


class TestRecovery:
    def hit(self, **fields: object) -> Answer:
        return answer(arrivals=[2.0, 3.0, 3.1, 5.0, 5.1], failed_attempts=[FailedAttempt("decode-0", "lost")], **fields)

    def test_the_gap_is_the_one_that_the_fault_tore(self) -> None:
        fault = Fault(FaultKind.KILL, "decode-0", 3.05)
        assert stall_seconds(self.hit(), fault) == pytest.approx(1.95), "a token was on its way"

    def test_requests_that_it_did_not_hit_do_not_count(self) -> None:
        fault = Fault(FaultKind.KILL, "decode-0", 3.05)
        assert stall_seconds(answer(arrivals=[2.0, 8.0]), fault) is None
        assert stall_seconds(self.hit(sent_at=3.06), fault) is None
        assert stall_seconds(self.hit(ended_at=3.04), fault) is None
        assert stall_seconds(self.hit(), Fault(FaultKind.KILL, "decode-1", 3.05)) is None
        two = self.hit()
        two.failed_attempts = [*two.failed_attempts, FailedAttempt("prefill-1", "lost")]
        assert stall_seconds(two, fault) is None

    def test_figures_by_kind_and_role(self) -> None:
        faults = [Fault(FaultKind.KILL, "decode-0", 3.05), Fault(FaultKind.FREEZE, "prefill-1", 4.0)]
        figures = recovery([self.hit()], faults)
        assert figures["kill decode"] == {
            "faults": 1,
            "requests": 1,
            "p50_ms": pytest.approx(1950.0),
            "p99_ms": pytest.approx(1950.0),
        }
        assert figures["freeze prefill"] == {"faults": 1, "requests": 0}


class TestMetrics:
    def page(self, **held: int) -> str:
        gauges = {"ready": 1, "blocks_free": 5, "blocks_cached": 3, **dict.fromkeys(HELD_GAUGES, 0), **held}
        lines = [f'splitserve_worker_{n}{{role="decode",worker="decode-0"}} {v:.1f}' for n, v in gauges.items()]
        lines += [
            'splitserve_ladder_steps_total{reason="worker_lost",rung="local"} 2.0',
            "splitserve_requests_in_flight 0.0",
        ]
        return "\n".join(["# HELP splitserve_x y", *lines])

    def test_a_quiet_page(self) -> None:
        metrics = Metrics.parse(self.page())
        assert metrics.held() == [] and metrics.ready == {"decode-0"} and metrics.free_or_cached() == {"decode-0": 8}
        assert metrics.labelled("ladder_steps_total") == {"reason=worker_lost,rung=local": 2.0}
        assert metrics.reads_by_path() == {} and metrics.transports() == []

    def test_paths_of_reads(self) -> None:
        link = 'splitserve_link_bytes_per_second{peer="prefill-0",role="decode",transport="cma",worker="decode-0"} 2e9'
        metrics = Metrics.parse(self.page(reads_direct_total=3, reads_mapped_total=0, reads_in_flight=1) + "\n" + link)
        assert metrics.reads_by_path() == {"direct": 3} and metrics.transports() == ["cma"]

    @pytest.mark.parametrize("gauge", HELD_GAUGES)
    def test_whatever_is_held_is_seen(self, gauge: str) -> None:
        assert Metrics.parse(self.page(**{gauge: 2})).held() == [f"decode-0: {gauge} 2"]

    def test_requests_in_flight_in_the_router_are_seen(self) -> None:
        page = self.page().replace("requests_in_flight 0.0", "requests_in_flight 1.0")
        assert Metrics.parse(page).held() == ["router: requests_in_flight 1"]


class TestLeftovers:
    @pytest.fixture
    def leftovers(self) -> Leftovers:
        found = Leftovers()
        found.note_pids({"me": os.getpid()})
        return found

    def test_nothing(self, leftovers: Leftovers) -> None:
        assert leftovers.found() == []

    def test_a_process_that_has_another_parent(self, leftovers: Leftovers) -> None:
        program = "import subprocess, sys; print(subprocess.Popen(['sleep', '60'], stdout=-3).pid)"
        environment = {**os.environ, **leftovers.environment}
        started = subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, check=True)
        pid = int(started.stdout)
        process = psutil.Process(pid)
        try:
            # Its parent is told so a moment before the kernel has given it its name and environment.
            wait_until(lambda: process.name() == "sleep" and process.environ(), "the program didn't start")
            assert any(f"process {pid} (sleep)" in text for text in leftovers.found())
        finally:
            process.kill()

    def test_threads_and_handles(self, leftovers: Leftovers) -> None:
        end = threading.Event()
        thread = threading.Thread(target=end.wait, name="forgotten")
        thread.start()
        with open(os.devnull):
            assert leftovers.found() == ["thread forgotten", "1 handles of this process"]
        end.set()
        thread.join()
        assert leftovers.found() == []

    @pytest.fixture
    def segment(self) -> Iterator[Path]:
        path = SHARED_MEMORY / f"ucx_shm_posix_test_{os.getpid()}"
        yield path
        path.unlink(missing_ok=True)

    def test_shared_memory_that_nobody_has_mapped(self, leftovers: Leftovers, segment: Path) -> None:
        segment.write_bytes(bytes(4096))
        assert leftovers.found() == [f"shared memory {segment}"]
        with open(segment, "r+b") as file, mmap.mmap(file.fileno(), 4096):
            assert not [text for text in leftovers.found() if "shared memory" in text], "somebody living uses it"


def test_growth_is_seen_beyond_its_bounds() -> None:
    before = {"decode-0": ProcessState(1, 100 << 20, 9, 40), "decode-1": ProcessState(2, 110 << 20, 10, 44)}
    same = {"decode-1": ProcessState(3, 120 << 20, 10, 47)}
    assert growth(before, same, memory_bytes=16 << 20, handles=4) == []
    more = {"decode-0": ProcessState(1, 130 << 20, 11, 49)}
    assert growth(before, more, memory_bytes=16 << 20, handles=4) == [
        "decode-0: 130 resident MiB, at most 126",
        "decode-0: 11 threads, at most 10",
        "decode-0: 49 handles, at most 48",
    ]


def test_a_process_is_looked_at_from_outside() -> None:
    state = ProcessState.of(os.getpid())
    assert state.resident_bytes > 1 << 20 and state.threads >= 1 and state.handles >= 3
