"""Real workers: decode drops its connection to a prefill worker that was killed, and connects to its successor."""

import os
import signal
from pathlib import Path

from serving import complete_all, worker_metrics
from small_clusters import body, cluster
from waiting import PATIENCE_SECONDS, wait_until


def test_decode_drops_a_prefill_worker_that_was_killed_while_idle(tiny_qwen3: Path) -> None:
    with cluster(tiny_qwen3, "1P1D") as running:

        def peers_ready() -> float:
            return worker_metrics(running.url)["decode-0"]["peers_ready"]

        assert peers_ready() == 1
        killed = running.pids["prefill-0"]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: peers_ready() == 0)
        with running.supervised():
            wait_until(lambda: running.pids.get("prefill-0", killed) != killed)
            assert running.wait_ready("prefill-0", PATIENCE_SECONDS)
            wait_until(lambda: peers_ready() == 1)
            asked = body(tiny_qwen3, list(range(300, 364)))
            [answer] = complete_all(running.url, [asked], at_once=False)
            assert answer["status"] == 200 and answer["splitserve"]["mode"] == "disaggregated"
