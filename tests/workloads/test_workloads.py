"""Workloads: the same bytes for the same seed, the distributions that they promise, files of traces."""

import itertools
import math
from pathlib import Path
from statistics import fmean, median

import pytest

from splitserve.common.errors import ConfigError
from splitserve.workloads.conversation import Piece
from splitserve.workloads.named import parse_workload
from splitserve.workloads.synthetic import Chats, Exact, arrivals, make
from splitserve.workloads.traces import at_rate, read_trace

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
VOCABULARY = range(10, 1000)


def test_equal_seeds_give_equal_workloads() -> None:
    for maker in (Exact(64, 8, 16), Chats()):
        assert make(maker, 3.0, 40, 7) == make(maker, 3.0, 40, 7) != make(maker, 3.0, 40, 8)


def test_arrivals_are_a_poisson_process() -> None:
    times = arrivals(5.0, 20_001, seed=1)
    gaps = [late - early for early, late in itertools.pairwise(times)]
    assert fmean(gaps) == pytest.approx(0.2, rel=0.03)
    for at in (0.05, 0.2, 0.6):  # the exact distribution, within 4 standard deviations of a share of 20,000
        expected = 1 - math.exp(-5.0 * at)
        assert sum(gap <= at for gap in gaps) / len(gaps) == pytest.approx(expected, abs=4 * 0.5 / math.sqrt(20_000))


def test_a_rate_counts_requests_not_conversations() -> None:
    workload = make(Chats(num_turns=4), 8.0, 4000, seed=0)
    assert workload.num_requests == 4000
    assert len(workload.conversations) / workload.conversations[-1].start_seconds == pytest.approx(2.0, rel=0.1)


def test_lengths_of_chats_have_the_given_medians() -> None:
    workload = make(Chats(num_first_tokens=500, num_output_tokens=100), 8.0, 4000, seed=0)
    assert median(c.turns[0].pieces[1].num_tokens for c in workload.conversations) == pytest.approx(500, rel=0.05)
    assert median(turn.num_output_tokens for turn in workload.turns()) == pytest.approx(100, rel=0.05)
    assert all(c.turns[0].pieces[0] == Piece("chats system", 64) for c in workload.conversations)


def test_pieces_with_one_name_have_the_same_tokens() -> None:
    assert Piece("a", 20).token_ids(VOCABULARY, 0) == Piece("a", 30).token_ids(VOCABULARY, 0)[:20]
    assert Piece("a", 20).token_ids(VOCABULARY, 0) != Piece("b", 20).token_ids(VOCABULARY, 0)
    assert Piece("a", 20).token_ids(VOCABULARY, 0) != Piece("a", 20).token_ids(VOCABULARY, 1)


def test_lines_of_a_trace_share_the_blocks_that_they_name(tmp_path: Path) -> None:
    file = tmp_path / "two.jsonl"
    file.write_text(
        '{"timestamp": 500, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n\n'
        '{"timestamp": 2500, "input_length": 1024, "output_length": 7, "hash_ids": [0, 2]}\n'
    )
    first, second = read_trace(file).conversations
    assert (first.start_seconds, second.start_seconds) == (0.0, 2.0)
    assert first.turns[0].pieces == (Piece("block 0", 512), Piece("block 1", 88))
    assert second.turns[0].pieces[0] == first.turns[0].pieces[0] and second.turns[0].num_output_tokens == 7


def test_lines_of_one_session_are_turns(tmp_path: Path) -> None:
    file = tmp_path / "session.jsonl"
    file.write_text(
        '{"session_id": "x", "timestamp": 0, "input_length": 10, "output_length": 5}\n'
        '{"session_id": "y", "timestamp": 100, "input_length": 3, "output_length": 5}\n'
        '{"session_id": "x", "delay": 1500, "input_length": 4, "output_length": 6}\n'
    )
    one, other = read_trace(file).conversations
    assert [turn.num_new_tokens for turn in one.turns] == [10, 4] and one.turns[1].think_seconds == 1.5
    assert len(other.turns) == 1 and other.start_seconds == 0.1


def test_azures_columns_are_read(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    one, other = read_trace(file).conversations
    assert (one.turns[0].num_new_tokens, other.turns[0].num_output_tokens) == (374, 109)
    assert other.start_seconds == pytest.approx(4.314579)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no requests"),
        ('{"timestamp": "soon"}', "line 1"),
        ('{"timestamp": 0, "input_length": -1}', "line 1"),
        ('{"input_length": 600, "output_length": 1}\nnonsense', "line 2"),
        ('{"input_length": 2000, "output_length": 1, "hash_ids": [1, 2]}', "don't fit input_length 2000"),
    ],
)
def test_a_bad_trace_is_refused_by_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.jsonl") as error:
        read_trace(file)
    assert words in str(error.value)


def test_a_trace_is_sped_up_to_a_rate(tmp_path: Path) -> None:
    file = tmp_path / "even.jsonl"
    lines = (f'{{"timestamp": {1000 * n}, "input_length": {n + 1}, "output_length": 1}}' for n in range(11))
    file.write_text("\n".join(lines))
    workload = at_rate(read_trace(file), rate=5.0, num_requests=6)
    assert [c.start_seconds for c in workload.conversations] == pytest.approx([0.0, 0.24, 0.48, 0.72, 0.96, 1.2])
    again = at_rate(read_trace(file), 5.0, 6, max_tokens=3)  # two requests fit: they come three times
    assert [c.turns[0].num_new_tokens for c in again.conversations] == [1, 2] * 3
    assert len({piece.name for turn in again.turns() for piece in turn.pieces}) == 6, "each time with other tokens"
    starts = [c.start_seconds for c in again.conversations]
    assert starts == pytest.approx([0.24 * number for number in range(6)])
    with pytest.raises(ConfigError, match="fits 1 tokens"):
        at_rate(read_trace(file), 5.0, 6, max_tokens=1)


def test_rates_go_up_and_down_once() -> None:
    """From 1 to 24 and back: the mean is kept, and the tenths of the load have the rates of a cosine."""
    workload = parse_workload("80/10~1-24").at(12.5, 12_500, seed=3)
    starts = [conversation.start_seconds for conversation in workload.conversations]
    assert len(starts) == 12_500 and starts == sorted(starts)
    assert starts[-1] == pytest.approx(1000.0, rel=0.03)
    for number in range(10):
        share = sum(100 * number <= start < 100 * (number + 1) for start in starts) / 100
        begin, end = number * 0.2 * math.pi, (number + 1) * 0.2 * math.pi
        expected = 12.5 - 11.5 * (math.sin(end) - math.sin(begin)) / (0.2 * math.pi)
        assert share == pytest.approx(expected, rel=0.1, abs=0.5)


@pytest.mark.parametrize(
    "text", ["5/5~3-3", "5/5~0-2", "12", "0/5", "5/0", "5/5+6", "chat", "trace:", "trace:/no/such/file.jsonl", "9/9/9"]
)
def test_unknown_workloads_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_workload(text)


def test_workloads_by_name() -> None:
    assert parse_workload("2048/512+128").at(1.0, 3, 0).conversations[0].turns[0].num_new_tokens == 2048
    assert parse_workload("agents").at(1.0, 16, 0).num_requests == 16


@pytest.mark.skipif(not TRACES.is_dir(), reason="the traces aren't there")
@pytest.mark.parametrize(
    ("name", "number"), [("synthetic_trace.jsonl", 3993), ("AzureLLMInferenceTrace_code.csv", 8819)]
)
def test_published_traces_are_read(name: str, number: int) -> None:
    trace = parse_workload(f"trace:{TRACES / name}", max_tokens=8192)
    assert trace.trace is not None and trace.trace.num_requests == number
    assert trace.at(2.0, 50, 0).longest_context() <= 8192
