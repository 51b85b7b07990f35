"""Figures of the overview: of workers, prompts and transports, by hand; and the whole of it from a real router."""

import socket
import time
from array import array
from pathlib import Path

import msgspec
import pytest

from router_harness import ready, served_router, write_model_dir
from splitserve.benchmarks.router.worker_script import default_script
from splitserve.protocol.counters import Distribution, TierLoad, WorkerLoad
from splitserve.protocol.messages.membership import PeerLink, WorkerSetup
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.reports.overview import Overview
from splitserve.protocol.request import Role
from splitserve.router.admin.overview.request_figures import FirstToken, prompt_figures, times_of
from splitserve.router.admin.overview.samples import WINDOW_SECONDS, HeardLoad, LoadSample, RouterSample, Samples
from splitserve.router.admin.overview.worker_figures import link_problems, tier_hits, worker_figures
from splitserve.router.links.membership import WorkerState
from splitserve.router.links.worker_record import WorkerRecord
from splitserve.router.placement.prefix_view import PromptHashes
from splitserve.router.placement.seen_prefixes import SeenPrefixes
from waiting import wait_until
from worker_views import info

NOW = 100.0
BEFORE = NOW - 20


def record(name: str, role: Role = Role.PREFILL, load: WorkerLoad | None = None, **fields: object) -> WorkerRecord:
    made = WorkerRecord(info(name, role=role, num_blocks=100, **fields), last_heard=NOW, state=WorkerState.READY)
    made.load = load or WorkerLoad()
    return made


def samples_of(*records: WorkerRecord, before: WorkerLoad | None = None) -> Samples:
    """Return samples in which each worker's load was ``before`` 20 s ago."""
    samples = Samples()
    loads = {each.info.party: HeardLoad(BEFORE, before or WorkerLoad()) for each in records}
    samples.add_loads(LoadSample(BEFORE, loads))
    return samples


def test_rates_and_shares_of_a_worker_are_those_since_the_oldest_sample() -> None:
    load = WorkerLoad(
        steps=110,
        step_seconds=15.0,
        prompt_tokens=5000,
        step_sequences=Distribution([], 300),
        blocks_referenced=40,
        blocks_quarantined=10,
        blocks_reserved=15,
        blocks_cached=20,
    )
    before = WorkerLoad(steps=10, step_seconds=5.0, prompt_tokens=1000, blocks_referenced=90)
    one = record("prefill-0", load=load)
    (found,) = worker_figures([one], samples_of(one, before=before), [], NOW)
    assert found.busy_share == pytest.approx(0.5) and found.step_seconds == pytest.approx(0.1)
    assert found.prompt_tokens_per_second == pytest.approx(200.0) and found.step_sequences == pytest.approx(3.0)
    assert (found.blocks_used, found.blocks_reserved, found.blocks_cached) == (35, 15, 20)
    assert found.max_used_share == pytest.approx(0.9) and found.breaker == "closed"


def test_a_worker_is_compared_with_the_others_of_its_role_by_its_work() -> None:
    """One has longer prompts, which is no sickness; the other takes three times as long for the same."""
    model = StepModel(base=0.01, per_token=1e-4)
    usual = WorkerLoad(steps=100, prompt_tokens=10_000, step_seconds=2.0)
    longer = WorkerLoad(steps=100, prompt_tokens=40_000, step_seconds=5.0)
    slow = WorkerLoad(steps=100, prompt_tokens=10_000, step_seconds=6.0)
    records = [record(f"prefill-{number}", load=load) for number, load in enumerate((usual, longer, slow))]
    records.append(record("decode-0", Role.DECODE, usual))
    for each in records:
        each.own_model = model
    found = {each.engine_id: each.slowness for each in worker_figures(records, samples_of(*records), [], NOW)}
    assert found["prefill-2"] == pytest.approx(3.0) and found["prefill-1"] == pytest.approx(0.5)
    assert found["prefill-0"] == pytest.approx(0.5) and found["decode-0"] == 0.0, "there is no other decode worker"


def test_an_open_breaker_and_the_order_of_workers() -> None:
    records = [record("prefill-10"), record("prefill-2"), record("decode-0", Role.DECODE)]
    records[0].breaker.open_until = NOW + 5
    found = worker_figures(records, Samples(), [], NOW)
    assert [each.engine_id for each in found] == ["prefill-2", "prefill-10", "decode-0"]
    assert found[1].breaker == "open" and found[1].breaker_seconds == pytest.approx(5.0)


def test_hits_by_tier_are_counted_where_prompts_are_computed() -> None:
    load = WorkerLoad(prefix_hit_tokens=1000, tiers=[TierLoad(name="host", loaded_blocks=12)])
    before = WorkerLoad(prefix_hit_tokens=200, tiers=[TierLoad(name="host", loaded_blocks=2)])
    one, other = record("prefill-0", load=load), record("decode-0", Role.DECODE, load)
    found = {each.tier: each.tokens for each in tier_hits([one, other], samples_of(one, other, before=before))}
    assert found == {"host": 10 * 16, "device": 800 - 160}


def test_a_link_by_another_transport_than_expected_is_a_problem() -> None:
    setup = WorkerSetup(machine="here", device="cpu")
    source, sink = record("prefill-0", setup=setup), record("decode-0", Role.DECODE, setup=setup)
    sink.links = [PeerLink("prefill-0", "cma", 1e9)]
    assert not link_problems([source, sink])
    sink.links = [PeerLink("prefill-0", "tcp", 1e9)]
    assert "where shared memory is expected" in link_problems([source, sink])["tcp"]


def test_samples_forget_what_is_older_than_the_window() -> None:
    samples = Samples()
    for second in range(100):
        samples.add(RouterSample(float(second), 0.25 * second, 0.5 * second, 0.001 * second))
    assert len(samples.router) == WINDOW_SECONDS + 1 and samples.shares() == (0.25, 0.5)
    assert samples.lag_seconds() == pytest.approx(0.099)
    assert samples.wants_loads(10, 0.0)
    samples.add_loads(LoadSample(0.0, {}))
    assert not samples.wants_loads(640, 5.0) and samples.wants_loads(640, 10.0) and samples.wants_loads(10, 1.0)


def first_token(computed: int, wait: float, *, cached: int = 0, known: int | None = 0) -> FirstToken:
    stages = {"dispatch": wait / 2, "prefill_queue": wait / 2, "prefill": 0.1}
    return FirstToken(stages, wait + 0.1, computed + cached, cached, known, is_sibling=False)


def test_figures_of_prompts() -> None:
    found = prompt_figures([*(first_token(100, 0.2, cached=20, known=40) for _ in range(9)), first_token(900, 0.0)])
    assert (found.num, found.tokens, found.cached_tokens, found.known_tokens) == (10, 1980, 180, 360)
    assert found.long_share == pytest.approx(0.5) and found.longest_tokens == 900 and found.median_tokens == 100
    assert found.short_wait.mean == pytest.approx(0.2) and found.short_prefill_seconds == pytest.approx(0.1)
    assert prompt_figures([first_token(100, 0.0, known=None)]).known_tokens is None
    assert times_of([]).num == 0 and times_of(range(1, 101)).p99 == 100


# ---- seen prefixes ----


def hashed(token_ids: list[int]) -> PromptHashes:
    prompt = PromptHashes(token_ids)
    prompt.chain(b"root", 4)
    return prompt


def test_a_prefix_is_seen_once_a_prompt_began_with_it() -> None:
    seen = SeenPrefixes()
    assert seen.note(PromptHashes([1, 2, 3])) is None, "its blocks were not hashed"
    assert seen.note(hashed(list(range(17)))) == 0
    assert seen.note(hashed(list(range(17)))) == 16
    assert seen.note(hashed([*range(8), 99, 99, 99, 99, 99])) == 8
    assert seen.note(hashed([*range(8), 99, 99, 99, 99, 98])) == 12


def test_seen_prefixes_are_bounded_and_used_ones_stay() -> None:
    seen = SeenPrefixes(max_blocks=8)
    shared = list(range(17))
    seen.note(hashed(shared))
    for number in range(50):
        assert seen.note(hashed([*shared, 1000 + number, 0, 0, 0, 0])) >= 16
        seen.note(hashed([2000 + number, 0, 0, 0, 0]))
    assert len(seen._new) + len(seen._old) <= 2 * (8 + 5)
    assert seen.note(hashed([2000, 0, 0, 0, 0])) == 0, "it came too long ago"


# ---- a real router ----


def test_the_overview_of_a_real_router(tmp_path: Path) -> None:
    write_model_dir(tmp_path / "tiny")
    with served_router(tmp_path / "tiny", ttft_objective_ms=1e5) as (router, workers):
        workers.start("prefill-0", Role.PREFILL)
        workers.start("decode-0", Role.DECODE, default_script(token_seconds=0.01, tokens_per_message=1))
        ready(router)
        for _ in range(4):
            router.post("/v1/completions", prompt="Hello, how are you? " * 10, max_tokens=4)
        time.sleep(1.1)  # an overview is given for a second
        body = router.request("GET", "/admin/overview")[2]
        found = msgspec.convert(body, Overview)
        assert found.ttft.num == 4 and found.diagnosis.state == "healthy", found.diagnosis
        assert {path.actual: path.num for path in found.paths} == {"disaggregated": 4}
        assert found.prompts.known_tokens is not None and found.prompts.known_tokens >= 0.5 * found.prompts.tokens
        (objective,) = found.objectives
        assert (objective.name, objective.num, objective.num_met) == ("ttft", 4, 4)
        assert [worker.engine_id for worker in found.workers] == ["prefill-0", "decode-0"]
        assert found.workers[0].num_requests == 4 and found.router.is_ready
        assert len(found.slowest) == 4 and found.slowest[0].spans[0].name == "request"
        assert router.request("GET", "/admin/overview", Origin="http://evil.example")[0] == 403
        assert router.request("GET", "/dashboard", Host="evil.example")[0] == 403


def test_clients_that_do_not_read_are_counted(tmp_path: Path) -> None:
    """The client asks until what it doesn't read fills all buffers on the way."""
    write_model_dir(tmp_path / "tiny")
    with served_router(tmp_path / "tiny") as (router, _):

        def num_unread() -> int:
            return int(router.request("GET", "/admin/overview")[2]["router"]["num_unread"])

        with socket.create_connection(router.address) as made:

            def is_full() -> bool:
                made.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 8)
                time.sleep(0.1)
                return num_unread() == 1

            wait_until(is_full, "the client that does not read isn't counted")
        wait_until(lambda: num_unread() == 0, "a client that is gone is still counted")


def test_tokens_fit_an_array() -> None:
    """Prompts are arrays in the router; their hashes are those of lists."""
    assert hashed(array("i", range(9))).longest_computed() == hashed(list(range(9))).longest_computed()
