"""The twin: production cores under virtual time, with times worked out by hand."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from splitserve.protocol.config import EngineConfig, ProtocolConfig
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Role
from splitserve.router.requests.effects import Ended
from splitserve.router.requests.timeline.timeline import Timeline
from splitserve.simulation.twin import cluster
from splitserve.simulation.twin.cluster import TwinCluster, TwinResult, TwinSpec
from splitserve.simulation.twin.models import Calibration, CopyModel, HostModel, LinkModel
from splitserve.simulation.twin.worker import WorkerSetup
from splitserve.workloads.conversation import Conversation, Piece, Turn, Workload
from splitserve.workloads.synthetic import Chats, Exact, make

STEPS = StepModel(base=0.004, per_decode=0.0, per_context=0.0, per_token=0.0001, per_pair=0.0, num_steps=1000)
HOST = HostModel(prepare_seconds=0.001, message_seconds=0.0002, deliver_seconds=0.0001, connect_seconds=0.01)
LINK = LinkModel(read_seconds=0.0005, bytes_per_second=1e9)
LAYOUT = LayoutRecord("twin", "w", "bfloat16", 64, 2, 2, 64)  # 65,536 bytes a block


def setup(name: str, role: Role, num_blocks: int = 500, max_num_seqs: int = 64) -> WorkerSetup:
    engine = EngineConfig(model="twin", max_num_batched_tokens=1024, max_num_seqs=max_num_seqs).on("cuda")
    return WorkerSetup(name, role, engine, LAYOUT, (num_blocks,), 8192, 1000, STEPS)


PAIR = (setup("prefill-0", Role.PREFILL), setup("decode-0", Role.DECODE))
MIXED = (setup("mixed-0", Role.MIXED), setup("mixed-1", Role.MIXED))


def run(workers, workload: Workload, seed: int = 0, **options) -> TwinResult:
    spec = TwinSpec(workers, Calibration(steps={Role.MIXED: STEPS}, link=LINK, host=HOST), **options)
    return TwinCluster(spec, seed).run(workload, seed)


def single(num_input: int, num_output: int) -> Workload:
    turn = Turn((Piece("prompt", num_input),), num_output)
    return Workload("one", (Conversation("0", 0.0, (turn,)),))


def test_a_request_on_a_mixed_worker_takes_the_time_of_its_steps_and_messages() -> None:
    [turn] = run(MIXED, single(100, 3)).turns
    first = 0.001 + 0.0002 + (0.004 + 100 * 0.0001) + 0.0002 + 0.0001  # prepare, message, step, message, deliver
    assert turn.token_times == pytest.approx([first, first + 0.004, first + 0.008])
    assert turn.ended_at == pytest.approx(turn.token_times[-1])


def test_a_handover_takes_its_messages_and_its_bytes() -> None:
    [first_one] = single(100, 3).conversations
    result = run(PAIR, Workload("two", (first_one, Conversation("1", 1.0, first_one.turns))))
    turn = result.turns[1]  # the workers are connected by now; the prompt's first block is cached
    assert turn.num_cached_tokens == 64
    first, second = turn.token_times[:2]
    # Prepared; to decode; its grant to prefill; the step; to the router; to the client.
    assert first - 1.0 == pytest.approx(0.001 + 0.0002 + 0.0002 + (0.004 + 36 * 0.0001) + 0.0002 + 0.0001)
    # From prefill's step: the offer, a read of the one block that decode lacks, and a step of decode.
    assert second - first == pytest.approx(0.0002 + (0.0005 + 65_536 / 1e9) + 0.004, abs=1e-6)
    assert result.counts == {"disaggregated disaggregated ok": 2}


def test_a_second_token_at_prefill_comes_a_step_after_the_first_and_the_handover_begins_with_it() -> None:
    workers = [
        replace(each, engine=msgspec.structs.replace(each.engine, second_token_at_prefill=True)) for each in PAIR
    ]
    [one] = single(100, 4).conversations
    spec = TwinSpec(workers, Calibration(steps={Role.MIXED: STEPS}, link=LINK, host=HOST))
    twin, timelines = TwinCluster(spec), list[Timeline]()
    end = twin._performers[Ended]
    twin._performers[Ended] = lambda effect: (timelines.append(effect.request.timeline), end(effect))
    result = twin.run(Workload("two", (one, Conversation("1", 1.0, one.turns))))
    gaps = np.diff(result.turns[1].token_times)
    # The last offer, and a read of the one block that decode lacks.
    ready = 0.0002 + (0.0005 + 65_536 / 1e9)
    assert gaps == pytest.approx([0.004, ready + 0.004, 0.004], abs=1e-6)
    assert result.stages["offer"] == pytest.approx(0.0002), "without the second token's step"
    assert timelines[1].attempts[0].handover_seconds == pytest.approx(ready, abs=1e-6)


def test_a_step_that_outlasts_the_last_request_counts_as_busy_up_to_its_end() -> None:
    slow = replace(MIXED[0], model=msgspec.structs.replace(STEPS, base=70.0))
    result = run((slow,), single(2000, 9), protocol=ProtocolConfig(request_deadline_seconds=100.0))
    assert result.turns[0].error and result.num_steps == {"mixed-0": 2}
    assert result.seconds < 101
    assert 0.99 < result.busy_shares["mixed-0"] <= 1.0


@pytest.mark.parametrize("workers", [PAIR, MIXED], ids=["1P1D", "2M"])
@pytest.mark.parametrize("policy", ["least-loaded", "cost", "prefix"])
def test_every_request_gets_its_tokens_and_equal_seeds_give_equal_times(workers, policy: str) -> None:
    workload = make(Chats(num_first_tokens=200, num_output_tokens=20, think_seconds=0.5), 20.0, 60, seed=3)
    one, other = run(workers, workload, policy=policy), run(workers, workload, policy=policy)
    assert one == other
    assert [len(turn.token_times) for turn in one.turns] == [turn.num_output_tokens for turn in one.turns]
    assert not [turn.error for turn in one.turns if turn.error]
    assert all(share <= 1.0 for share in one.busy_shares.values())
    later = [turn for turn in one.turns if turn.number]
    assert later and all(turn.num_cached_tokens > 0 for turn in later)  # a conversation finds what it had


def test_workers_of_two_ranks_hand_over() -> None:
    engine = EngineConfig(model="twin", tensor_parallel_size=2, max_num_batched_tokens=1024).on("cuda")
    layout = msgspec.structs.replace(LAYOUT, tensor_parallel_size=2)
    workers = [replace(each, engine=engine, layout=layout) for each in PAIR]
    assert run(workers, make(Exact(300, 10), 5.0, 20, seed=1)).counts == {"disaggregated disaggregated ok": 20}


def test_a_host_tier_brings_back_what_the_device_lost() -> None:
    """Two conversations whose prompts don't fit the device together: the second turn of the first finds its KV in host
    memory, after a load whose time is that of its bytes."""
    long = Piece("long", 1600)
    talks = (
        Conversation("a", 0.0, (Turn((long,), 4), Turn((Piece("more", 40),), 4, think_seconds=2.0))),
        Conversation("b", 1.0, (Turn((Piece("other", 1600),), 4),)),
    )
    small = setup("mixed-0", Role.MIXED, 40)
    copies = CopyModel(copy_seconds=0.0, bytes_per_second=65_536 / 0.001)  # a millisecond a block
    results = []
    for slots in (0, 100):
        calibration = Calibration(steps={Role.MIXED: STEPS}, link=LINK, host=HOST, copies=copies)
        spec = TwinSpec([replace(small, host_slots=slots)], calibration)
        results.append(TwinCluster(spec).run(Workload("two", talks)).turns[-1])
    without, found = results
    assert without.num_cached_tokens < 1600 and found.num_cached_tokens == 1600
    ttft = found.token_times[0] - found.arrived_at
    messages = 0.001 + 0.0002 + 0.0002 + 0.0001
    num_loaded = (1600 - without.num_cached_tokens) // 64  # the rest is on the device
    assert ttft == pytest.approx(messages + 0.001 * num_loaded + 0.004 + 44 * 0.0001, abs=0.003)
    assert ttft < without.token_times[0] - without.arrived_at


def test_a_little_memory_makes_requests_wait_or_start_anew() -> None:
    """Production's preemption and grants act in the twin: all tokens come, and later than with room."""
    workload = make(Exact(500, 60), 200.0, 40, seed=1)
    cramped = (setup("prefill-0", Role.PREFILL, 40), setup("decode-0", Role.DECODE, 40))
    roomy, tight = run(PAIR, workload), run(cramped, workload)
    assert [len(turn.token_times) for turn in tight.turns] == [60] * 40
    assert tight.seconds > 1.2 * roomy.seconds


def test_an_impossible_request_is_refused_in_words() -> None:
    [turn] = run(PAIR, single(9000, 3)).turns
    assert turn.error and not turn.token_times


TIERED = tuple(replace(setup(f"m{number}", Role.MIXED, 60), host_slots=200) for number in range(2))


@pytest.mark.parametrize("workers", [PAIR, MIXED, TIERED, (setup("p", Role.PREFILL, 40), setup("d", Role.DECODE, 40))])
@pytest.mark.parametrize("policy", ["least-loaded", "cost"])
def test_leaping_over_unchanged_batches_changes_no_time(workers, policy: str) -> None:
    workload = make(Chats(num_first_tokens=200, num_output_tokens=40, think_seconds=0.2), 60.0, 80, seed=5)
    spec = TwinSpec(workers, Calibration(steps={Role.MIXED: STEPS}, link=LINK, host=HOST), policy=policy)
    leaping, stepping = (TwinCluster(spec, 1, leaps=leaps).run(workload, 1) for leaps in (True, False))
    assert leaping.num_steps == stepping.num_steps and leaping.counts == stepping.counts
    for one, other in zip(leaping.turns, stepping.turns, strict=True):
        assert (one.conversation, one.number, one.error) == (other.conversation, other.number, other.error)
        assert one.token_times == pytest.approx(other.token_times, abs=1e-6)
        assert one.num_cached_tokens == other.num_cached_tokens


def test_a_request_that_runs_when_the_simulation_is_cut_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would count as complete, with the tokens that it has got."""
    monkeypatch.setattr(cluster, "MAX_EXTRA_SECONDS", 0.05)
    result = run(MIXED, single(100, 1000))
    [turn] = result.turns
    assert turn.error == cluster.CUT
    assert result.seconds == turn.ended_at >= 0.05 and len(turn.token_times) < 1000


def test_a_pause_longer_than_the_cut_is_simulated() -> None:
    turns = (Turn((Piece("one", 50),), 3), Turn((Piece("two", 50),), 3, cluster.MAX_EXTRA_SECONDS + 9))
    result = run(MIXED, Workload("patient", (Conversation("0", 0.0, turns),)))
    assert [len(turn.token_times) for turn in result.turns] == [3, 3]
