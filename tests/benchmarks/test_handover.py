"""``splitserve bench handover``, small: every pair of ranks moves the right bytes, and what it says is consistent."""

import json
from pathlib import Path

import pytest

from splitserve.benchmarks.kv.handover import are_through_mapping, devices, layout_of, main, parse_pair
from splitserve.benchmarks.kv.handover_ranks import STAGES
from splitserve.common.errors import ConfigError
from splitserve.protocol.memory_records import LayoutRecord

PAIRS = ["1:1", "1:2", "4:2"]


@pytest.mark.slow
def test_pairs_of_ranks_on_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every read's generations, and every head of every block, are checked by the bench itself."""
    argv = ["--device", "cpu", "--shape", "tiny", "--prompt-tokens", "100", "--block-size", "16", "--repeats", "2"]
    argv += ["--tp", *PAIRS, "--naive", "--save"]
    assert main([*argv, "--result-dir", str(tmp_path)]) == 0
    assert "p99 of fewer than 100 values is close to their maximum: 2 of each figure" in capsys.readouterr().out
    (file,) = tmp_path.glob("handover-*.json")
    written = json.loads(file.read_text())
    assert written["command"] == ["splitserve", "bench", "handover", *argv]
    results = written["results"]
    paths = {(each["prefill_tp"], each["decode_tp"]): each["path"] for each in results if each["path"] != "naive"}
    assert set(paths) == {parse_pair(pair) for pair in PAIRS}
    assert paths[1, 1] == "direct"
    of_ranks = {path for pair in ((1, 2), (4, 2)) for path in paths[pair].split("+")}  # each rank chooses by cost
    assert of_ranks <= {"layers", "staged"}
    assert sum(each["path"] == "naive" for each in results) == 1
    sizes = {each["decode_tp"]: each["bytes_per_rank"] for each in results}
    assert sizes[1] == 2 * sizes[2]
    for each in results:
        assert each["handover_gb_per_second"] * each["handover_ms"] * 1e6 == pytest.approx(each["bytes_per_rank"])
        assert each["handover_p99_ms"] >= each["handover_ms"] > 0
        if each["path"] != "naive":
            assert len(each["stages_us_of_ranks"]) == each["decode_tp"]
            for stages in (each["stages_us"], *each["stages_us_of_ranks"]):
                assert list(stages) == list(STAGES) and stages["verified"] > stages["copied"] > 0


def test_ranks_may_take_different_paths() -> None:
    assert are_through_mapping("mapped") and are_through_mapping("kernel+mapped")
    assert not are_through_mapping("direct") and not are_through_mapping("direct+mapped")


def test_ranks_with_fewer_heads_than_ranks_share_them() -> None:
    layout = LayoutRecord("m", "w", "float32", 16, 2, 2, 8, tensor_parallel_size=4)
    assert [list(layout.block_layout.heads(rank)) for rank in range(4)] == [[0], [0], [1], [1]]


@pytest.mark.slow
def test_whole_hand_overs_of_a_cluster(tmp_path: Path) -> None:
    argv = ["--served", "--device", "cpu", "--shape", "tiny", "--dtype", "float32", "--prompt-tokens", "150"]
    argv += ["--block-size", "16", "--chunk-tokens", "64", "--kv-memory", "64MiB", "--repeats", "3"]
    argv += ["--tp", "1:2"]
    assert main([*argv, "--save", "--result-dir", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("handover-*.json")
    whole, chunked = json.loads(file.read_text())["results"]
    assert (whole["mode"], whole["reads"]) == ("one chunk", 1)
    assert (chunked["mode"], chunked["reads"] > 1) == ("chunks", True)
    for result in (whole, chunked):
        assert (result["block_size"], result["prefill_tp"], result["decode_tp"]) == (16, 1, 2)
        assert result["transport"].startswith("nixl/")
        assert 0 <= result["handover_p50_ms"] <= result["handover_p99_ms"]
        assert 0 < result["exposed_p50_ms"] <= result["exposed_p99_ms"]
        assert result["prefill_ms"] > 0


def test_one_rank_alone_reads_between_two_gpus() -> None:
    prefill, decode = (layout_of("llama-3.2-1b", "bfloat16", 64, ranks) for ranks in (4, 2))
    assert devices("cuda", prefill, decode, one_rank=True) == (["cuda:0"] * 4, ["cuda:1"])
    with pytest.raises(ConfigError, match="not for --served"):
        main(["--device", "cpu", "--one-rank", "--served"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--served", "--naive"], "--naive isn't for --served"),
        (["--served", "--path", "layers"], "--path isn't for --served"),
        (["--served", "--split-size", "4MiB"], "--split-size isn't for --served"),
        (["--second-token-at-prefill"], "--second-token-at-prefill is for --served: without it no worker runs"),
        (["--no-late-launch"], "--no-late-launch is for --served"),
        (["--chunk-tokens", "512"], "--chunk-tokens is for --served"),
        (["--naive", "--tp", "2:1"], "--naive is measured for the pair 1:1"),
    ],
)
def test_what_would_be_ignored_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(["--device", "cpu", *arguments])
