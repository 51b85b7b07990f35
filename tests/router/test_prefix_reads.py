"""Prefixes that prefill reads instead of computing them: when a placement names their source, and which one."""

from array import array
from dataclasses import replace

import pytest

from router_core import DECODE, PREFILL, Core
from splitserve.protocol.block_hash import root_hash
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.kv_event_batch import KVEvent, KVEventBatch
from splitserve.protocol.messages.membership import PeerLink
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Party, Role, SamplingParams
from splitserve.router.links.membership import Membership
from splitserve.router.placement.cost import cost
from splitserve.router.placement.placer import Placer
from splitserve.router.placement.policies import (
    Disaggregated,
    Local,
    PrefixSource,
    RequestShape,
    Snapshot,
    least_loaded,
)
from splitserve.router.placement.prefix_view import PrefixView, PromptHashes
from splitserve.router.placement.simple import session
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.events import Submit
from splitserve.router.requests.ladder import next_step
from splitserve.router.requests.objectives import Objectives
from splitserve.router.requests.state import FailedAttempt, Failure, FailureReason
from worker_views import info, view

MODEL = StepModel(base=5e-3, per_decode=2e-5, per_context=3e-8, per_token=3e-5, per_pair=0.0, num_steps=1000)
SIZES = {"max_model_len": 10_000, "kv_capacity_tokens": 100_000, "max_num_seqs": 64, "step_model": MODEL}
LONG = RequestShape(8000, 100, session="s")
POLICIES = [cost, least_loaded, session]


def worker(name, role, **fields):
    short = {"max_model_len": 8050} if role is Role.PREFILL else {}  # no room to decode
    link = {"chunk_tokens": 512, "token_bytes": 1 << 17, "link_rates": dict.fromkeys(["d", "p", "p0", "p1"], 1e11)}
    return view(name, role, **(SIZES | short | link | fields))


def place(policy, prefill, decode, num_tokens, shape=LONG):
    snapshot = Snapshot((prefill, decode), Objectives(0.5, 0.02), prefix_source=PrefixSource(decode.party, num_tokens))
    placement = policy(snapshot, shape)
    assert isinstance(placement, Disaggregated), "decode is too busy to compute a long prompt"
    return placement


BUSY = worker("d", Role.DECODE, num_requests=32, num_decoding=32)  # its own match would make it the only worker


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_prefix_is_read_from_the_worker_that_wrote_it(policy):
    placement = place(policy, worker("p", Role.PREFILL, prefix_match_tokens=1000), BUSY, 6000)
    assert placement.prefix == BUSY.party and placement.matched_tokens == 6000


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("prefill", "num_tokens"),
    [
        ({"link_rates": {"d": 1e9}}, 6000),  # a second by the link, a quarter of it to compute
        ({"link_rates": {}}, 6000),  # not known: as slow as usual
        ({"prefix_match_tokens": 6000}, 6000),
        ({"prefix_match_tokens": 5990}, 6000),  # a round trip for ten tokens
        ({"step_model": StepModel()}, 6000),
        ({"reads_prefixes": False}, 6000),
    ],
)
def test_what_is_sooner_computed_is_computed(policy, prefill, num_tokens):
    assert place(policy, worker("p", Role.PREFILL, **prefill), BUSY, num_tokens).prefix is None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("rate", "is_read"), [(1e11, True), (1e9, False)])
def test_the_rate_of_hand_overs_counts_until_prefill_has_read_from_decode(policy, rate, is_read):
    prefill = worker("p", Role.PREFILL, prefix_match_tokens=1000, link_rates={})
    source = PrefixSource(BUSY.party, 6000, {"p": rate, "p1": 1e12})
    placement = policy(Snapshot((prefill, BUSY), Objectives(0.5, 0.02), prefix_source=source), LONG)
    assert (placement.prefix == BUSY.party) is is_read


def test_the_prediction_has_the_read_in_it():
    prefill = worker("p", Role.PREFILL)
    read, computed = place(cost, prefill, BUSY, 7000), place(cost, prefill, BUSY, 0)
    own = MODEL.prefill_seconds(7000, 1000, 512)
    assert read.ttft_seconds == pytest.approx(own + 3e-3 + 7000 * (1 << 17) / 1e11)
    assert read.ttft_seconds < computed.ttft_seconds / 4


def test_a_worker_with_a_queue_loses_its_prefix_to_one_that_reads_it():
    queued = worker("p0", Role.PREFILL, prefix_match_tokens=7500, queue_seconds=1.0)
    idle = worker("p1", Role.PREFILL)
    snapshot = Snapshot((queued, idle, BUSY), Objectives(0.5, 0.02), prefix_source=PrefixSource(BUSY.party, 7000))
    placement = cost(snapshot, LONG)
    assert (placement.prefill, placement.prefix) == (idle.party, BUSY.party)


def test_a_worker_that_failed_the_request_is_no_source():
    prefill, other = worker("p", Role.PREFILL), worker("d1", Role.DECODE)
    snapshot = Snapshot((prefill, BUSY, other), prefix_source=PrefixSource(BUSY.party, 7000))
    failed = FailedAttempt(
        placement=Disaggregated(prefill.party, BUSY.party),
        culprit=BUSY.party,
        failure=Failure(FailureReason.HANDOVER, "a read failed"),
    )
    step = next_step(snapshot, LONG, least_loaded, [failed])
    assert step.placement == Disaggregated(prefill.party, other.party) and step.placement.prefix is None
    kept = next_step(snapshot, LONG, least_loaded, [replace(failed, culprit=other.party)])
    assert kept.placement.prefix == BUSY.party


ROLES = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "m0": Role.MIXED}
PROMPT = PromptHashes(array("i", range(500)))


class Known:
    """A placer whose workers are ready, and the prefix view."""

    def __init__(self):
        self.members = Membership(5.0, 60.0)
        self.prefixes = PrefixView()
        for name, role in ROLES.items():
            self.members.register(Party(name, 1), info(name, role=role, num_blocks=100), 0.0)
            self.members.link_up(Party(name, 1))
        self.placer = Placer(least_loaded, self.members, self.prefixes)

    def send(self, name, prompt=PROMPT):
        self.placer.note_sent([Party(name, 1)], prompt)

    def announce(self, name, num_blocks):
        layout = self.members.get(Party(name, 1)).info.layout
        chain = list(PROMPT.chain(root_hash(layout), layout.block_size))[:num_blocks]
        stored = [KVEvent("stored", "device", chain)]
        self.prefixes.apply(KVEventBatch(name, 1, 1, layout.block_size, root_hash(layout), True, stored))

    @property
    def source(self):
        found = self.placer.snapshot(PROMPT, 1.0).prefix_source
        return None if found is None else (found.party.engine_id, found.num_tokens)


def test_what_prefill_was_sent_may_wait_there_until_it_is_announced():
    known = Known()
    size = known.members.get(Party("p0", 1)).info.layout.block_size
    assert known.source is None
    known.send("p0")
    assert known.source is None
    known.announce("p0", 3)
    assert known.source == ("p0", 3 * size)
    known.send("d0", PromptHashes(array("i", range(4 * size + 1))))
    assert known.source == ("d0", 4 * size)
    known.send("m0")
    assert known.source == ("m0", (500 - 1) // size * size)


def test_a_source_comes_with_the_rates_of_its_own_reads():
    known = Known()
    known.send("d0")
    links = [PeerLink("p0", "cuda_ipc", 2e11), PeerLink("p1", "cuda_ipc", 0.0)]
    known.members.heartbeat(Party("d0", 1), WorkerLoad(), 0.0, links)
    assert known.placer.snapshot(PROMPT, 1.0).prefix_source.link_rates == {"p0": 2e11}


def test_what_prefill_has_computed_can_be_read_without_events():
    """Its blocks are those of prompts whose first token is out, as long as it is taken to have them."""
    known = Known()
    size = known.members.get(Party("p0", 1)).info.layout.block_size
    first, other = PromptHashes(array("i", range(6 * size + 1))), PromptHashes(array("i", range(9000, 9000 + 5 * size)))
    known.send("p0", first)
    known.send("p0")
    assert known.source is None
    known.prefixes.note_computed(Party("p0", 1), first)
    assert known.source == ("p0", 6 * size), "the rest is a longer prompt's, which may wait"
    known.prefixes.note_computed(Party("p0", 1), other)
    assert known.source == ("p0", 6 * size)
    known.prefixes.note_computed(Party("p0", 1), PROMPT)
    assert known.source == ("p0", (500 - 1) // size * size)
    known.announce("p0", 2)
    assert known.source == ("p0", 2 * size), "it tells more itself"


def test_the_first_token_tells_that_a_prompt_is_computed():
    core = Core(PREFILL, DECODE)
    request = ActiveRequest.new("first", list(range(100)), SamplingParams(max_tokens=5), core.now)
    core.handle(Submit(request))
    longer = PromptHashes(array("i", range(200)))
    before = core.core.placer.snapshot(longer, core.now)
    matched = {worker.party: worker.prefix_match_tokens for worker in before.workers}
    assert before.prefix_source is None, "decode still waits for it, too"
    assert matched[DECODE] == 0 < matched[PREFILL], "a second request has something to wait for at prefill alone"
    core.tokens(PREFILL, request.state.key, 0, 7)
    after = core.core.placer.snapshot(longer, core.now)
    matched = {worker.party: worker.prefix_match_tokens for worker in after.workers}
    assert after.prefix_source.party == PREFILL
    assert matched[DECODE] == matched[PREFILL] > 0
    core.core.placer.unreset[PREFILL] = None
    assert core.core.placer.snapshot(longer, core.now).prefix_source.party == DECODE


def test_no_source_may_have_content_from_before_a_reset_or_be_gone():
    known = Known()
    known.send("d0")
    known.placer.unreset[Party("d0", 1)] = None
    assert known.source is None
    known.placer.unreset.clear()
    assert known.source is not None
    known.members.lose(Party("d0", 1))
    assert known.source is None


def test_workers_that_could_read_a_prefix_do_not_hide_the_one_that_has_it():
    """On one worker nothing is read: where decode elsewhere costs more than a short queue, the prefix decides."""
    idle = [worker(f"p{number}", Role.PREFILL, max_model_len=10_000, link_rates={"p9": 1e12}) for number in range(5)]
    own = {"prefix_match_tokens": 7900, "queue_seconds": 0.05, "max_model_len": 10_000}
    holder = worker("p9", Role.PREFILL, **own)
    full = worker("d", Role.DECODE, num_requests=128, num_decoding=64)
    snapshot = Snapshot((*idle, holder, full), Objectives(0.0, 0.0), prefix_source=PrefixSource(holder.party, 7900))
    assert cost(snapshot, LONG) == Local(holder.party)
