"""The router when workers die, fall silent, lie or are slow, and when clients leave."""

import re
import subprocess
import sys
import threading

import msgspec
import pytest

from router_harness import ready
from router_streams import PROMPT, Stream, aborts
from splitserve.benchmarks.router.worker_script import DEFAULT_LAYOUT, Reply, default_script
from splitserve.protocol.config import ProtocolConfig
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.messages.envelope import Envelope
from splitserve.protocol.messages.membership import Heartbeat, Leave, PeerLink
from splitserve.protocol.messages.requests import (
    DecodeRequest,
    FailureCode,
    Introduce,
    LocalRequest,
    PeerGone,
    PeerRef,
    RequestFailed,
    StepTokens,
    TokenDelta,
)
from splitserve.protocol.request import FinishReason, Party, RequestKey, Role
from splitserve.protocol.wire import encode
from waiting import PATIENCE_SECONDS, wait_until

SLOW = default_script(tokens_per_message=1, token_seconds=0.05)
IMPATIENT = ProtocolConfig(no_worker_wait_seconds=0.3, request_deadline_seconds=8.0)


def test_a_stream_whose_worker_process_is_killed_ends_with_an_error_event(serve):
    router, workers = serve(protocol=IMPATIENT)
    prefill = workers.start("p0", Role.PREFILL)
    command = [sys.executable, "-m", "splitserve.benchmarks.router.instant_worker", "--membership", router.membership]
    command += ["--engine-id", "d0", "--role", "decode", "--token-seconds", "0.05", "--tokens-per-message", "1"]
    decode = subprocess.Popen([*command, "--vocab-size", "400"], stdout=subprocess.DEVNULL)
    try:
        ready(router)
        stream = Stream(router)
        stream.read_until("[51]")  # the second token: decode is at work
    finally:
        decode.kill()
        decode.wait()
    error = stream.error()
    assert error["code"] == "deadline" and "d0" in error["message"], "nobody came in its place"
    wait_until(lambda: router.request("GET", "/ready")[0] == 503)
    status, _, answer = router.post("/v1/completions", **PROMPT)
    assert status == 503 and "no decode worker" in answer["error"]["message"]
    assert not aborts(prefill)  # its part was over
    name = 'splitserve_requests_finished_total{actual="failed",intended="disaggregated",reason="deadline"}'
    assert router.metric(name) == 1
    wait_until(lambda: router.metric("splitserve_requests_in_flight") == 0)


def test_when_the_only_prefill_worker_dies_decode_computes_the_prompt(serve):
    router, workers = serve()
    prefill = workers.start("p0", Role.PREFILL, lambda body: [])
    decode = workers.start("d0", Role.DECODE, local_answer)
    ready(router)
    answers = []
    asking = threading.Thread(
        target=lambda: answers.append(router.post("/v1/completions", **PROMPT, return_route=True))
    )
    asking.start()
    wait_until(lambda: prefill.requests and decode.requests)
    workers.stop(prefill, leave=False)
    asking.join(PATIENCE_SECONDS)
    status, _, answer = answers[0]
    assert status == 200 and answer["splitserve"]["mode"] == "local" and answer["splitserve"]["attempts"] == 2
    assert [type(body) for body in decode.requests] == [DecodeRequest, LocalRequest]
    assert aborts(decode)[0].key == decode.requests[0].key, "the attempt that came to nothing is aborted"
    assert router.metric('splitserve_ladder_steps_total{reason="worker_lost",rung="local"}') == 1


def test_without_a_prefill_worker_decode_computes_prompts_and_it_is_counted(serve):
    router, workers = serve()
    workers.start("d0", Role.DECODE, local_answer)
    wait_until(lambda: router.metric('splitserve_worker_ready{role="decode",worker="d0"}') == 1)
    status, _, answer = router.post("/v1/completions", **PROMPT, return_route=True)
    assert status == 200 and answer["splitserve"]["mode"] == "local"
    name = 'splitserve_requests_finished_total{actual="local",intended="disaggregated",reason="no_prefill_worker"}'
    assert router.metric(name) == 1
    assert router.request("GET", "/ready")[0] == 503, "it isn't what was asked for"


def local_answer(body):
    """A worker that answers what it computes by itself, and leaves hand-overs hanging."""
    if not isinstance(body, LocalRequest):
        return []
    delta = TokenDelta(body.key, len(body.output_ids), [50], finish_reason=FinishReason.STOP)
    return [Reply(StepTokens([delta]))]


def test_a_stream_goes_on_where_its_dead_decode_worker_stopped(serve):
    router, workers = serve()
    num_tokens = 60  # seconds, in which the second worker becomes ready
    workers.start("p0", Role.PREFILL)
    first = workers.start("d0", Role.DECODE, SLOW)
    ready(router)
    stream = Stream(router, max_tokens=num_tokens, return_token_ids=True)
    stream.read_until("[51]")
    second = workers.start("d1", Role.DECODE, SLOW)
    wait_until(lambda: router.metric('splitserve_worker_ready{role="decode",worker="d1"}') == 1)
    workers.stop(first, leave=False)
    stream.read_until("[DONE]")
    assert "error" not in stream.text and '"finish_reason":"length"' in stream.text
    ids = [token for part in re.findall(r'"token_ids":\[([\d,]*)\]', stream.text) for token in part.split(",") if token]
    assert len(ids) == num_tokens
    delivered = second.requests[0].output_ids
    assert 2 <= len(delivered) < num_tokens and [str(each) for each in delivered] == ids[: len(delivered)]


def test_a_prefill_worker_may_leave_once_decode_is_at_work(serve):
    router, workers = serve()
    prefill = workers.start("p0", Role.PREFILL)
    workers.start("d0", Role.DECODE, SLOW)
    ready(router)
    stream = Stream(router, max_tokens=12)
    stream.read_until("[51]")
    workers.stop(prefill)
    stream.read_until("[DONE]")
    assert "error" not in stream.text and '"finish_reason":"length"' in stream.text


def test_a_silent_worker_is_dead_after_the_limit_and_used_again_when_heard(serve):
    router, workers = serve(protocol=ProtocolConfig(dead_after_seconds=3.0, request_deadline_seconds=6.0))
    worker = workers.start("m0", Role.MIXED, lambda body: [], heartbeat_seconds=3600)
    ready(router)
    status, _, answer = router.post("/v1/completions", **PROMPT)
    assert status == 504 and "no heartbeat" in answer["error"]["message"]
    assert router.request("GET", "/ready")[0] == 503
    assert router.metric('splitserve_worker_ready{role="mixed",worker="m0"}') == 0
    worker.say(Heartbeat(WorkerLoad(steps=7, undeliverable_messages=8, malformed_messages=9)))
    ready(router)
    wait_until(lambda: router.metric('splitserve_worker_steps_total{role="mixed",worker="m0"}') == 7)
    assert router.metric('splitserve_worker_undeliverable_messages_total{role="mixed",worker="m0"}') == 8
    assert router.metric('splitserve_worker_malformed_messages_total{role="mixed",worker="m0"}') == 9


@pytest.mark.parametrize(("error", "num_lost"), [("", 0), ("mixed-0 rank 1 was ended by SIGKILL", 1)])
def test_a_worker_that_leaves_in_order_is_not_lost(serve, error: str, num_lost: int):
    router, workers = serve()
    worker = workers.start("m0", Role.MIXED)
    ready(router)
    worker.say(Leave(error))
    wait_until(lambda: router.request("GET", "/ready")[0] == 503)
    assert router.metric("splitserve_workers_lost_total") == num_lost


def test_a_new_incarnation_replaces_one_that_fell_silent(serve):
    router, workers = serve(protocol=ProtocolConfig(dead_after_seconds=1.0))
    workers.start("m0", Role.MIXED, SLOW, heartbeat_seconds=3600)
    ready(router)
    stream = Stream(router, max_tokens=100)
    stream.read_until("[50]")
    wait_until(lambda: router.metric("splitserve_workers_lost_total") == 1)
    new = workers.start("m0", Role.MIXED)
    stream.read_until("[DONE]")
    assert "error" not in stream.text and new.requests[0].output_ids, "its stream goes on with the new one"
    ready(router)
    assert router.post("/v1/completions", **PROMPT)[0] == 200
    assert new.requests


def test_decode_workers_learn_of_prefill_workers_before_the_first_request(serve):
    _, workers = serve()
    first = workers.start("d0", Role.DECODE)
    prefill = workers.start("p0", Role.PREFILL)
    second = workers.start("d1", Role.DECODE)
    introduction = Introduce(PeerRef(prefill.party, prefill.endpoint))
    wait_until(lambda: introduction in first.received and introduction in second.received)
    assert not prefill.received


def test_a_worker_that_is_lost_or_leaves_is_gone_for_all_others_until_it_is_back(serve):
    _, workers = serve(protocol=ProtocolConfig(dead_after_seconds=1.0))
    decode = workers.start("d0", Role.DECODE)
    silent = workers.start("p0", Role.PREFILL, heartbeat_seconds=3600)
    leaver = workers.start("p1", Role.PREFILL)
    introductions = [Introduce(PeerRef(each.party, each.endpoint)) for each in (silent, leaver)]
    wait_until(lambda: all(each in decode.received for each in introductions))
    wait_until(lambda: PeerGone(silent.party) in decode.received and PeerGone(silent.party) in leaver.received)
    late = workers.start("d1", Role.DECODE)
    wait_until(lambda: introductions[1] in late.received)
    assert introductions[0] not in late.received, "a worker was introduced to one that is lost"
    silent.say(Heartbeat(WorkerLoad()))
    wait_until(lambda: introductions[0] in late.received and decode.received.count(introductions[0]) >= 2)
    workers.stop(leaver)
    wait_until(lambda: PeerGone(leaver.party) in decode.received and PeerGone(leaver.party) in late.received)


def test_a_peer_that_was_lost_while_the_router_was_down_is_gone_once_it_is_back(serve):
    _, workers = serve(protocol=ProtocolConfig(dead_after_seconds=0.5))
    decode = workers.start("d0", Role.DECODE, heartbeat_seconds=3600)
    prefill = workers.start("p0", Role.PREFILL, heartbeat_seconds=0.1)
    links = [PeerLink("p0", "cma", 1e9, incarnation=prefill.party.incarnation)]
    lost = [Party("p0", prefill.party.incarnation - 1), Party("p1", 7)]
    links += [PeerLink(party.engine_id, "cma", 1e9, incarnation=party.incarnation) for party in lost]

    def is_told() -> bool:
        decode.say(Heartbeat(WorkerLoad(), links))
        return all(PeerGone(party) in decode.received for party in lost)

    wait_until(is_told)
    assert PeerGone(prefill.party) not in decode.received


def test_workers_of_another_model_are_refused(serve):
    router, workers = serve()
    workers.start("p0", Role.PREFILL)
    other = msgspec.structs.replace(DEFAULT_LAYOUT, num_layers=2)
    refused = workers.start("d0", Role.DECODE, layout=other, wait=False)
    wait_until(lambda: router.metric("splitserve_workers_refused_total") == 1)
    assert not refused.registered.is_set() and router.request("GET", "/ready")[0] == 503
    workers.close()
    _, _, log = router.stop()
    assert "num_layers: 2 against 1" in log


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (FailureCode.INVALID, 400),
        (FailureCode.OVERLOADED, 503),
        (FailureCode.DEADLINE, 504),
        (FailureCode.HANDOVER, 502),
        (FailureCode.INTERNAL, 502),
    ],
)
def test_failures_that_workers_report(serve, code, status):
    def fail(body):
        return [Reply(RequestFailed(body.key, code, "so it is"))]

    router, workers = serve()
    prefill = workers.start("p0", Role.PREFILL, lambda body: [])
    workers.start("d0", Role.DECODE, fail)
    ready(router)
    got, headers, answer = router.post("/v1/completions", **PROMPT)
    assert got == status and "so it is" in answer["error"]["message"] and answer["error"]["code"] == code
    assert ("retry-after" in headers) == (status == 503)
    wait_until(lambda: aborts(prefill))


def test_the_deadline_is_the_routers_own(serve):
    router, workers = serve(protocol=ProtocolConfig(request_deadline_seconds=1.0))
    silent = [workers.start(f"{role[0]}0", role, lambda body: []) for role in (Role.PREFILL, Role.DECODE)]
    ready(router)
    status, _, answer = router.post("/v1/completions", **PROMPT)
    assert status == 504 and answer["error"]["code"] == "deadline"
    for worker in silent:
        wait_until(lambda worker=worker: aborts(worker))


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_disconnects_aborts_its_request_everywhere(serve, streamed):
    router, workers = serve()
    prefill = workers.start("p0", Role.PREFILL)
    decode = workers.start("d0", Role.DECODE, lambda body: [])
    ready(router)
    stream = Stream(router, stream=streamed)
    if streamed:
        stream.read_until("[50]")
    wait_until(lambda: decode.requests)
    stream.socket.close()
    wait_until(lambda: aborts(prefill) and aborts(decode))
    wait_until(lambda: router.metric("splitserve_requests_in_flight") == 0)
    name = 'splitserve_requests_finished_total{actual="cancelled",intended="disaggregated",reason="cancelled"}'
    assert router.metric(name) == 1


def test_lost_repeated_and_foreign_messages_do_not_reach_the_client(serve):
    def messy(body):
        if not isinstance(body, DecodeRequest):
            return []

        def tokens(position, ids, key=body.key, finish=None):
            return Reply(StepTokens([TokenDelta(key, position, ids, finish_reason=finish)]))

        return [
            tokens(1, [61, 62]),  # before the first
            tokens(0, [60]),
            tokens(0, [60, 61]),  # again
            tokens(3, [99], key=RequestKey(body.key.request_id, 5)),  # another attempt
            tokens(3, [99], key=RequestKey("nobody", 0)),
            Reply(encode(Envelope(Party("d0", 1), None, StepTokens([TokenDelta(body.key, 3, [99])])))),
            Reply(b"junk"),
            Reply(encode(Envelope(Party("x", 1), Party("router", 1), Heartbeat(WorkerLoad())))),
            tokens(3, [63], finish=FinishReason.LENGTH),
            tokens(3, [63], finish=FinishReason.LENGTH),  # after the end
        ]

    router, workers = serve()
    workers.start("p0", Role.PREFILL, lambda body: [])
    workers.start("d0", Role.DECODE, messy)
    ready(router)
    status, _, answer = router.post("/v1/completions", **PROMPT, max_tokens=4)
    assert status == 200 and answer["choices"][0]["token_ids"] == [60, 61, 62, 63]
    wait_until(lambda: router.metric("splitserve_stale_messages_total") == 5)
    wait_until(lambda: router.metric("splitserve_wire_errors_total") == 1)


def test_workers_that_contradict_each_other_never_give_a_200(serve):
    router, workers = serve()
    workers.start("p0", Role.PREFILL, default_script(lambda prompt: iter([1, 2, 3] * 50)))
    workers.start(
        "d0", Role.DECODE, default_script(lambda prompt: iter([5, 6, 7] * 50), tokens_per_message=1, token_seconds=0.05)
    )
    ready(router)
    status, _, answer = router.post("/v1/completions", prompt=[50], ignore_eos=True, max_tokens=9)
    assert status == 502 and answer["error"]["code"] == "contradiction"
