"""Routers over other workers than one for prefill and one for decode."""

import json

from router_harness import RouterProcess, Workers
from splitserve.protocol.config import ProtocolConfig
from splitserve.protocol.messages.requests import LocalRequest
from splitserve.protocol.request import Role
from waiting import wait_until


def test_mixed_workers_get_local_requests(model_dir):
    router = RouterProcess(model_dir, protocol=ProtocolConfig(no_worker_wait_seconds=0.2))
    workers = Workers(router.membership)
    try:
        assert router.request("GET", "/ready")[::2] == (503, {"status": "not ready", "reason": "no worker is ready"})
        status, headers, answer = router.post("/v1/completions", prompt="a")
        assert status == 503 and "retry-after" in headers and answer["error"]["code"] == "no_worker"
        worker = workers.start("m0", Role.MIXED)
        wait_until(lambda: router.request("GET", "/ready")[0] == 200)
        status, _, answer = router.post("/v1/completions", prompt=[5, 6], max_tokens=3, return_route=True)
        assert status == 200 and answer["splitserve"]["mode"] == "local" and answer["splitserve"]["decode"] == "m0"
        assert isinstance(worker.requests[0], LocalRequest)
        name = 'splitserve_requests_finished_total{actual="local",intended="local",reason="ok"}'
        assert router.metric(name) == 1
    finally:
        workers.close()
        status, out, _ = router.stop()
    assert status == 0
    assert json.loads(out)[1]["torch"] == "False"


def test_workers_with_different_contexts_serve_together(model_dir):
    router = RouterProcess(model_dir)
    workers = Workers(router.membership)
    try:
        workers.start("p0", Role.PREFILL, max_model_len=150)
        small, large = (workers.start(f"d{size}", Role.DECODE, max_model_len=size) for size in (100, 200))
        wait_until(lambda: router.metric('splitserve_worker_ready{role="prefill",worker="p0"}') == 1)
        wait_until(lambda: router.metric('splitserve_worker_ready{role="decode",worker="d100"}') == 1)
        wait_until(lambda: router.metric('splitserve_worker_ready{role="decode",worker="d200"}') == 1)
        for content in "xy":  # a prompt whose KV a worker has would go there again
            messages = [{"role": "user", "content": content}]
            _, _, answer = router.post("/v1/chat/completions", messages=messages, ignore_eos=True)
            assert answer["usage"]["total_tokens"] == 100
        assert len(small.requests) == len(large.requests) == 1
        _, _, answer = router.post("/v1/completions", prompt=[5] * 20, max_tokens=130)
        assert answer["usage"]["total_tokens"] == 150
        status, _, answer = router.post("/v1/completions", prompt=[5] * 20, max_tokens=131)
        assert status == 400 and "150" in answer["error"]["message"]
    finally:
        workers.close()
        router.stop()


def test_a_router_stays_ready_without_prefill_workers_but_does_not_begin_so(model_dir):
    router = RouterProcess(model_dir)
    workers = Workers(router.membership)
    reason = "no prefill worker is ready"
    try:
        decode = workers.start("d0", Role.DECODE)
        wait_until(lambda: router.metric('splitserve_worker_ready{role="decode",worker="d0"}') == 1)
        assert router.request("GET", "/ready")[::2] == (503, {"status": "not ready", "reason": reason})
        prefill = workers.start("p0", Role.PREFILL)
        wait_until(lambda: router.request("GET", "/ready")[::2] == (200, {"status": "ready"}))
        prefill.stop()
        wait_until(lambda: router.request("GET", "/ready")[::2] == (200, {"status": "ready", "reason": reason}))
        status, _, answer = router.post("/v1/completions", prompt=[5, 6], max_tokens=3, return_route=True)
        assert status == 200 and answer["splitserve"]["mode"] == "local"
        decode.stop()
        wait_until(lambda: router.request("GET", "/ready")[0] == 503)
    finally:
        workers.close()
        router.stop()
