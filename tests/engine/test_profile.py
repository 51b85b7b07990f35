"""Profiles of a running worker: the union of spans, the recorder, and the whole path from POST /admin/profile."""

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splitserve.benchmarks.serving import serve as bench_serve
from splitserve.engine.profiling import step_profiler
from splitserve.engine.profiling.step_profiler import NoProfiler, ProfiledLaunchingRunner, ProfiledRunner, StepProfiler
from splitserve.engine.profiling.trace import NOT_BUSY, busy_of, read_busy
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.cluster_spec import SecretRef, SecretsSpec
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.step import SampleSpec, ScheduledChunk, StepOutput, StepPlan
from waiting import PATIENCE_SECONDS, wait_until

PLAN = StepPlan([ScheduledChunk([1], 3, [0], SampleSpec(0.0, 0, 1.0, 0, 0, 4))])
KEY = "key-of-this-test"


class TestUnionOfSpans:
    @given(spans=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), min_size=1, max_size=12))
    def test_each_moment_counts_once(self, spans: list[tuple[int, int]]) -> None:
        busy = busy_of([float(begin) for begin, _ in spans], [float(length) for _, length in spans])
        moments = {moment for begin, length in spans for moment in range(begin, begin + length)}
        first, last = min(begin for begin, _ in spans), max(begin + length for begin, length in spans)
        assert busy.busy_seconds == pytest.approx(len(moments))
        assert busy.seconds == pytest.approx(last - first)
        assert busy.long_gap_seconds == pytest.approx(last - first - len(moments))
        assert busy.num_spans == len(spans)

    def test_short_gaps_are_no_long_ones(self) -> None:
        busy = busy_of([0.0, 10e-6, 100e-6], [5e-6, 50e-6, 10e-6])
        assert busy.seconds == pytest.approx(110e-6)
        assert busy.busy_seconds == pytest.approx(65e-6)
        assert busy.long_gap_seconds == pytest.approx(40e-6)
        assert str(busy) == "device busy 59.09% of 0.000 s, 36.36% in gaps of over 20 us"

    def test_nothing_at_all(self) -> None:
        assert busy_of([], []) == NOT_BUSY and NOT_BUSY.share == 0.0


def event(kind: str, begin_us: float, length_us: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": "n", "ts": begin_us, "dur": length_us, "args": {"x": [1]}, **more}


class TestTrace:
    def busy(self, folder: Path, events: list[dict[str, Any]]) -> Any:
        path = folder / "trace.json"
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events, "traceName": "t"}))
        return read_busy(path)

    def test_what_began_before_the_steps_settled_is_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.json"
        events = [event("kernel", 10, 5), event("kernel", 1000, 50), event("kernel", 1050, 50)]
        path.write_text(json.dumps({"baseTimeNanoseconds": 7_000_000, "traceEvents": events}))
        assert read_busy(path, 7_100_000).share == pytest.approx(1.0)
        assert read_busy(path).num_spans == 3

    def test_kernels_and_copies_count_and_the_host_does_not(self, tmp_path: Path) -> None:
        events = [
            {"ph": "M", "name": "process_name", "ts": 0, "args": {"name": "python"}},
            event("cpu_op", 0, 1000),
            event("cuda_runtime", 5, 500),
            event("kernel", 100, 50),
            event("gpu_memcpy", 130, 40),
            event("gpu_memset", 180, 20),
            event("overhead", 0, 2000),
            event("kernel", 300, 100, ph="i"),
        ]
        busy = self.busy(tmp_path, events)
        assert (busy.num_spans, busy.seconds) == (3, pytest.approx(100e-6))
        assert busy.share == pytest.approx(0.9)

    def test_without_a_gpu_the_hosts_operators_count(self, tmp_path: Path) -> None:
        busy = self.busy(tmp_path, [event("cpu_op", 0, 60), event("cpu_op", 10, 20), event("cpu_op", 80, 20)])
        assert (busy.num_spans, busy.share) == (3, pytest.approx(0.8))


class Adding:
    """A runner with a few operators."""

    queued_at = 0.0

    def run(self, plan: StepPlan) -> StepOutput:
        numbers = torch.ones(64, 64)
        for _ in range(4):
            numbers = numbers @ numbers
        return StepOutput.of([1])

    def launch(self, plan: StepPlan) -> "Adding":
        self.run(plan)
        return self

    def wait(self) -> StepOutput:
        return StepOutput.of([1])


class AddingInTwoParts(Adding):
    """Launches forward passes apart, and counts rehearsals."""

    num_rehearsals = 0

    def launch_forward(self, plan: StepPlan) -> "AddingInTwoParts":
        return self

    def launch_draws(self) -> "Adding":
        return self.launch(PLAN)

    def rehearse(self) -> None:
        self.num_rehearsals += 1


class TestRecorder:
    @pytest.fixture
    def woken(self) -> threading.Semaphore:
        return threading.Semaphore(0)

    @pytest.fixture
    def profiler(self, tmp_path: Path, woken: threading.Semaphore) -> StepProfiler:
        return StepProfiler(tmp_path / "profiles", "mixed.mixed-0", torch.device("cpu"), woken.release)

    @pytest.mark.parametrize("overlapped", [False, True])
    def test_it_records_the_steps_that_were_asked_for(
        self, profiler: StepProfiler, woken: threading.Semaphore, tmp_path: Path, overlapped: bool
    ) -> None:
        if overlapped:
            launching = ProfiledLaunchingRunner(Adding(), profiler)
            step: Callable[[], StepOutput] = lambda: launching.launch(PLAN).wait()  # noqa: E731
        else:
            runner = ProfiledRunner(Adding(), profiler)
            step = lambda: runner.run(PLAN)  # noqa: E731
        step()
        assert not (tmp_path / "profiles").exists()
        assert profiler.begin(3, 60.0) == ""
        for _ in range(5):
            assert step() == StepOutput.of([1])
        assert woken.acquire(timeout=PATIENCE_SECONDS)
        result = profiler.result()
        assert result is not None and (result.error, result.num_steps) == ("", 3)
        assert 0.0 < result.busy.share <= 1.0
        trace = json.loads(Path(result.trace).read_text())
        products = [entry for entry in trace["traceEvents"] if entry.get("name") == "aten::mm"]
        assert len(products) == 3 * 4, "of these steps, and of no other"
        assert Path(result.trace).name.startswith("mixed.mixed-0-")
        assert profiler.result() is None

    def test_recorded_steps_are_launched_as_a_whole(self, profiler: StepProfiler, woken: threading.Semaphore) -> None:
        assert ProfiledLaunchingRunner(Adding(), profiler).launch_forward(PLAN) is None
        runner = AddingInTwoParts()
        launching = ProfiledLaunchingRunner(runner, profiler)
        for num_rehearsals in (1, 2):
            forward = launching.launch_forward(PLAN)
            assert forward is not None and forward.launch_draws().wait() == StepOutput.of([1])
            launching.rehearse()
            assert runner.num_rehearsals == num_rehearsals
            if num_rehearsals == 1:
                assert profiler.begin(2, 60.0) == ""
                for _ in range(2):
                    assert launching.launch_forward(PLAN) is None
                    launching.rehearse()
                    launching.launch(PLAN).wait()
                assert woken.acquire(timeout=PATIENCE_SECONDS)
                result = profiler.result()
                assert result is not None and (result.error, result.num_steps) == ("", 2)
                assert runner.num_rehearsals == 1

    def test_one_at_a_time(self, profiler: StepProfiler, woken: threading.Semaphore) -> None:
        runner = ProfiledRunner(Adding(), profiler)
        assert profiler.begin(2, 60.0) == ""
        assert profiler.begin(1, 60.0) == "another profile is being recorded"
        runner.run(PLAN)
        assert profiler.begin(1, 60.0) == "another profile is being recorded"
        runner.run(PLAN)
        assert woken.acquire(timeout=PATIENCE_SECONDS)
        assert profiler.begin(1, 60.0) == ""

    def test_it_gives_up_when_no_step_comes(self, profiler: StepProfiler, tmp_path: Path) -> None:
        assert profiler.begin(2, 60.0) == ""
        assert profiler.result() is None
        profiler._deadline = 0.0  # time flies
        result = profiler.result()
        assert result is not None and result.error == "no step ran in time"
        ProfiledRunner(Adding(), profiler).run(PLAN)
        assert not (tmp_path / "profiles").exists()
        assert profiler.begin(2, 1.0) == ""

    def test_it_ends_early_when_steps_are_slow(self, profiler: StepProfiler, woken: threading.Semaphore) -> None:
        runner = ProfiledRunner(Adding(), profiler)
        profiler.begin(1000, 60.0)
        runner.run(PLAN)
        profiler._deadline = 0.0  # time flies
        runner.run(PLAN)
        assert woken.acquire(timeout=PATIENCE_SECONDS)
        result = profiler.result()
        assert result is not None and (result.error, result.num_steps) == ("", 1)

    def test_a_recorder_that_fails_fails_no_step(
        self, profiler: StepProfiler, woken: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_permission(_self: object) -> None:
            raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

        monkeypatch.setattr(step_profiler.profile, "start", no_permission)
        profiler.begin(2, 60.0)
        assert ProfiledRunner(Adding(), profiler).run(PLAN) == StepOutput.of([1])
        assert woken.acquire(timeout=PATIENCE_SECONDS)
        result = profiler.result()
        assert result is not None and "INSUFFICIENT_PRIVILEGES" in result.error
        assert profiler.begin(1, 60.0) == ""

    def test_off(self) -> None:
        assert "--profile-dir" in NoProfiler().begin(1, 1.0)
        assert NoProfiler().result() is None


def post(url: str, body: Any, key: str = "") -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{url}/admin/profile", json.dumps(body).encode(), headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.fixture(scope="module")
def cluster(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    engine = EngineConfig(
        model=str(tiny_qwen3),
        dtype="float32",
        kv_memory_bytes=16 << 20,
        profile_dir=str(tmp_path_factory.mktemp("profiles")),
    )
    key_file = tmp_path_factory.mktemp("key") / "key"
    key_file.write_text(KEY)
    spec = simple_spec(engine, num_mixed=1, port=0, secrets=SecretsSpec(api_key=SecretRef(file=str(key_file))))
    with LocalCluster(spec, log_level="warning") as cluster:
        yield cluster


def test_bench_serve_takes_a_profile_through_the_endpoint(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    arguments = ["--base-url", cluster.url, "--model", cluster.spec.served_model_name, "--num-requests", "8"]
    arguments += ["--request-rate", "inf", "--input-len", "20", "--output-len", "200", "--result-dir", str(tmp_path)]
    assert bench_serve.main([*arguments, "--profile-steps", "20", "--profile-after", "0.1"]) == 0
    [path] = tmp_path.iterdir()
    report = json.loads(path.read_text())["figures"]["profile"]["mixed-0"]
    assert report["steps"] == 20 and 0.0 < report["device_busy_share"] <= 1.0
    assert Path(report["trace"]).name.startswith("mixed.mixed-0-") and Path(report["trace"]).is_file()
    assert "device busy, mixed-0, 20 steps, %" in capsys.readouterr().out


def test_the_endpoint_wants_the_key_and_a_sound_body(cluster: LocalCluster) -> None:
    for key in ("", "another"):
        status, answer = post(cluster.url, {}, key)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    for body in ({"num_steps": 0}, {"num_steps": 10**9}, {"directory": "/tmp"}, {"timeout_seconds": -1}, [], "x"):
        status, answer = post(cluster.url, body, KEY)
        assert status == 400 and "body" in answer["error"]["message"]


def test_a_recording_ends_in_time_although_steps_stop(cluster: LocalCluster) -> None:
    body = {"model": cluster.spec.served_model_name, "prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
    reports: list[tuple[int, Any]] = []

    def record() -> None:
        reports.append(post(cluster.url, {"num_steps": 50, "timeout_seconds": 2.0}, KEY))

    request = urllib.request.Request(
        f"{cluster.url}/v1/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
    )

    def steps_were_recorded() -> bool:
        """Unless the request was over before the recording began, or began too late."""
        profile = threading.Thread(target=record)
        profile.start()
        time.sleep(0.2)
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
            assert response.status == 200
        profile.join(PATIENCE_SECONDS)
        status, answer = reports[-1]
        assert status == 200
        return "steps" in answer["workers"]["mixed-0"]

    wait_until(steps_were_recorded)
    assert 1 <= reports[-1][1]["workers"]["mixed-0"]["steps"] <= 4


def test_without_requests_there_is_nothing_to_record(cluster: LocalCluster) -> None:
    status, answer = post(cluster.url, {"num_steps": 3, "timeout_seconds": 0.2}, KEY)
    assert (status, answer) == (200, {"workers": {"mixed-0": {"error": "no step ran in time"}}})
