"""Hostile messages: no exception, no leak, no growth, and the next good request is served.

``SPLITSERVE_FUZZ_MESSAGES`` sets how many there are (``scripts/long-tests messages`` takes 100,000),
``SPLITSERVE_FUZZ_SEED`` where they begin.
"""

import os

import pytest

from core_driver import DECODE, PROMPT, grant, of, prefill_request, sent
from fuzzing import REGION, ROUTER, FuzzedWorker
from splitserve.engine.effects import Connect, StartRead
from splitserve.kvconnector.transfer.connector import PeerConnected
from splitserve.protocol.handover.reads import ReadResult
from splitserve.protocol.memory_records import RankMemory
from splitserve.protocol.messages.handover import Offer, OfferedBlock, OfferedSpan, PeerWelcome, Release
from splitserve.protocol.messages.requests import DecodeRequest, LocalRequest, PeerRef, StepTokens
from splitserve.protocol.request import FinishReason, Party, RequestKey, Role, SamplingParams
from splitserve.simulation.model import LAYOUT, PROTOCOL

NUM_MESSAGES = int(os.environ.get("SPLITSERVE_FUZZ_MESSAGES", "6000"))
FIRST_SEED = int(os.environ.get("SPLITSERVE_FUZZ_SEED", "0"))
PER_WORKER = 1000
NEWCOMER = Party("prefill-9", 99)


def serves_prefill(fuzzed: FuzzedWorker) -> None:
    worker, key = fuzzed.worker, RequestKey("good")
    worker.hear(ROUTER, prefill_request(key))
    worker.hear(DECODE, grant(key))
    effects = worker.run()
    assert sent(effects, Offer)[-1].last and sent(effects, StepTokens)
    worker.hear(DECODE, Release(key, True))


def serves_alone(fuzzed: FuzzedWorker) -> None:
    worker = fuzzed.worker
    effects = worker.hear(ROUTER, LocalRequest(RequestKey("good alone"), PROMPT, SamplingParams(max_tokens=3), 60.0))
    effects += worker.run()
    assert sent(effects, StepTokens)[-1].deltas[0].finish_reason is FinishReason.LENGTH


def serves_decode(fuzzed: FuzzedWorker) -> None:
    worker, key = fuzzed.worker, RequestKey("good pair")
    prompt = [7, *PROMPT[1:]]
    request = DecodeRequest(key, prompt, SamplingParams(max_tokens=3), PeerRef(NEWCOMER, "tcp://127.0.0.1:9"), 60.0)
    worker.hear(ROUTER, request)
    effects = worker.hear(NEWCOMER, PeerWelcome(LAYOUT, "sim", [1 << 20], [RankMemory(b"x", [REGION])]))
    assert of(effects, Connect)
    worker.event(PeerConnected(NEWCOMER, None))
    offer = Offer(key, [OfferedSpan(0, 0, [OfferedBlock(index, 50 + index) for index in range(3)])], 10, True, [3])
    effects = worker.hear(NEWCOMER, offer)
    (read,) = of(effects, StartRead)
    effects = worker.event(ReadResult(read.command.read_id, None, [50, 51, 52]))
    effects += worker.run()
    assert sent(effects, StepTokens)[-1].deltas[0].finish_reason is FinishReason.LENGTH


@pytest.mark.timeout(300 + NUM_MESSAGES // 50)
@pytest.mark.parametrize("role", list(Role))
def test_no_message_harms_a_core(role: Role) -> None:
    num_left, seed, num_handovers = NUM_MESSAGES // len(Role), FIRST_SEED, 0
    while num_left > 0:
        fuzzed = FuzzedWorker(seed, role)
        try:
            fuzzed.run(min(num_left, PER_WORKER))
            fuzzed.calm_down()
            num_handovers += fuzzed.core.state.counters.handovers
            serves_prefill(fuzzed)
            if role is not Role.PREFILL:
                serves_alone(fuzzed)
                serves_decode(fuzzed)
            fuzzed.worker.wait(PROTOCOL.lease_seconds)
            fuzzed.worker.end_copies()
            fuzzed.worker.assert_idle()
        except BaseException as error:
            error.add_note(f"replay: SPLITSERVE_FUZZ_SEED={seed} SPLITSERVE_FUZZ_MESSAGES=3000, role {role}")
            raise
        num_left, seed = num_left - PER_WORKER, seed + 1
    assert num_handovers or role is Role.PREFILL or NUM_MESSAGES < 6000, "the fuzzer never got anywhere"
