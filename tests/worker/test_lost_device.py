"""A worker whose device is lost, in a real cluster: its requests go on elsewhere, and it comes back by itself."""

import random
from pathlib import Path

import pytest

from lost_device_worker import ERROR, FAILS_AT
from serving import complete_all, transformers_greedy
from splitserve.orchestration.cluster.launcher import Entries, LocalCluster
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig
from waiting import wait_until


def test_requests_go_on_and_the_worker_comes_back(
    tiny_qwen3: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    chosen = random.Random(7)
    prompts = [[chosen.randrange(300, 1500) for _ in range(20 + index)] for index in range(4)]
    max_tokens = 24
    marker = tmp_path / "lost"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
    monkeypatch.setenv("LOST_DEVICE_MARKER", str(marker))
    engine = EngineConfig(model=str(tiny_qwen3), dtype="float32", kv_memory_bytes=32 << 20)
    spec = simple_spec(engine, port=0, num_mixed=2)
    entries = Entries(worker="lost_device_worker:run_worker")
    with LocalCluster(spec, log_level="warning", entries=entries) as cluster, cluster.supervised():
        before = cluster.pids
        body = {
            "model": tiny_qwen3.name,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answers = complete_all(cluster.url, [{**body, "prompt": prompt} for prompt in prompts], at_once=True)
        assert marker.exists(), "the device was never lost"
        wait_until(lambda: len(cluster.ready) == 2 and cluster.pids.keys() == before.keys() and cluster.pids != before)
        [lost] = [name for name, pid in cluster.pids.items() if pid != before[name]]
    assert [answer["status"] for answer in answers] == [200] * len(prompts)
    for answer, reference in zip(answers, transformers_greedy(tiny_qwen3, prompts, max_tokens), strict=True):
        assert reference.agrees(answer["choices"][0]["token_ids"])
    assert capfd.readouterr().err.count("Traceback") == 1, "the first error, once"
    assert f"the device can't go on after step {FAILS_AT} (RuntimeError: {ERROR}): {lost} ends" in caplog.text
