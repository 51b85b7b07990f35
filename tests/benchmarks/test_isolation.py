"""``splitserve bench isolation``, small: every arrangement gets the same requests and answers all of them."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from splitserve.benchmarks.common.stats import RequestRecord
from splitserve.benchmarks.serving.isolation import (
    HEADERS,
    Load,
    main,
    names_of,
    notes,
    parser,
    result_of,
    row_of,
    seconds_alone,
)
from splitserve.benchmarks.serving.stage_times import mean_stages_ms, stage_sums
from splitserve.common.errors import ConfigError


@pytest.mark.slow
def test_three_arrangements(tmp_path: Path) -> None:
    argv = ["--device", "cpu", "--dtype", "float32", "--kv-memory", "64MiB", "--seconds", "2", "--stream-rate", "3"]
    argv += ["--stream-output-len", "16", "--prompt-rate", "2", "--prompt-input-len", "200", "--max-num-seqs", "16"]
    argv += ["--rounds", "2", "--side-by-side", "--temperature", "0.8", "--top-p", "0.95"]
    assert main([*argv, "--save", "--result-dir", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("isolation-*.json")
    results = json.loads(file.read_text())["results"]
    rounds = ["1P1D", "mixed", "2 mixed", "mixed", "2 mixed", "1P1D"]
    assert [each["arrangement"] for each in results] == rounds
    assert [each["gpus_or_workers"] for each in results] == [2, 1, 2, 1, 2, 2]
    assert len({each["seed"] for each in results}) == 2
    for each in results:
        assert ("handover/wire" in each["mean_stages_ms"]) == (each["arrangement"] == "1P1D")
        assert each["mean_stages_ms"]["prefill"] > 0
        assert (each["streams"]["completed"], each["prompts"]["completed"]) == (6, 4)
        assert each["streams"]["output_tokens"] == 6 * 16
        assert each["prompts"]["input_tokens"] == 4 * 200
        assert each["streams"]["itl_ms"]["p99"] > 0 and each["prompts"]["ttft_ms"]["p50"] > 0
        assert each["streams"]["third_token_ms"]["count"] == 6


def test_paced_workers_show_what_a_second_token_at_prefill_gains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--paced", "H200", "--kv-memory", "64MiB", "--seconds", "2", "--stream-rate", "0", "--prompt-rate", "2"]
    argv += ["--prompt-input-len", "1000", "--prompt-output-len", "12", "--arrangements", "1P1D second token"]
    assert main([*argv, "--save", "--result-dir", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("isolation-*.json")
    [result] = json.loads(file.read_text())["results"]
    figures = result["prompts"]
    assert (figures["completed"], figures["output_tokens"]) == (4, 48)
    assert figures["ttft_ms"]["p50"] > 20, "a prompt takes a step of 25 ms by the roofline"
    assert figures["second_token_ms"]["max"] >= 3.5, "and a token one of 4 ms, unless the client reads both late"
    assert figures["third_token_ms"]["count"] == 4 and figures["third_token_ms"]["max"] > 0
    shown = capsys.readouterr().out
    header, row = (re.split(r"\s{2,}", line) for line in shown.splitlines() if re.match(r"\s+workers|1P1D.*  ", line))
    third = dict(zip(header[header.index("3rd token p50") :], row[header.index("3rd token p50") :], strict=True))
    assert third["3rd token p50"] == f"{figures['third_token_ms']['p50']:.2f}"
    num_gaps = figures["itl_ms"]["count"]  # 44, or less where tokens of several steps came in one chunk
    assert f"note: p99 of fewer than 100 values is close to their maximum: {num_gaps} of ITL, 4 of 2nd token" in shown
    with pytest.raises(ConfigError, match="leave --device out"):
        main([*argv, "--device", "cuda"])


def test_an_interrupted_run_keeps_the_rounds_that_it_has_measured(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "splitserve.orchestration.cli.main", "bench", "isolation", "--arrangements", "mixed"]
    argv += ["--device", "cpu", "--kv-memory", "32MiB", "--seconds", "1", "--rounds", "1000", "--side-by-side"]
    argv += ["--stream-output-len", "4", "--prompt-input-len", "16", "--save", "--result-dir", str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        try:
            first = next(line for line in bench.stdout if line.startswith("mixed "))
            bench.send_signal(signal.SIGTERM)
            shown = bench.stdout.read()
            assert bench.wait(60) == 130
        finally:
            bench.kill()  # no effect on one that has ended
    (file,) = tmp_path.glob("isolation-*.json")
    results = json.loads(file.read_text())["results"]
    assert 1 <= len(results) < 1000 and f"written to {file}" in shown
    assert f"{results[0]['streams']['itl_ms']['p99']:.2f}" in first


def test_who_falls_behind_is_told() -> None:
    """A slow arrangement's figures are those of another load: it must show."""
    load = Load([{}, {}], [0.0, 10.0], ["prompts", "prompts"])

    def ended(*seconds: float) -> list[RequestRecord]:
        return [
            RequestRecord(due, chunk_seconds=[end], end_seconds=end) for due, end in zip((0, 10), seconds, strict=True)
        ]

    assert result_of("mixed", load, ended(1.0, 11.0), alone=1.0)["kept_up"]
    late = result_of("mixed", load, ended(14.0, 16.0), alone=1.0)
    assert not late["kept_up"] and late["seconds_behind"] == 5.0
    assert row_of(late)[2] == "no, 5.0 s late"


def test_an_arrangement_of_which_requests_fail_has_not_kept_up() -> None:
    """The others had a lighter load, so their figures are those of another one."""
    load = Load([{}, {}], [0.0, 10.0], ["streams", "prompts"])
    refused = RequestRecord(0.0, end_seconds=0.1, error="HTTP 503")
    result = result_of("mixed", load, [refused, RequestRecord(10.0, 10.0, 11.0, [11.0])], alone=1.0)
    assert not result["kept_up"]
    shown = dict(zip(HEADERS, row_of(result), strict=True))
    assert (shown["kept up"], shown["failed"]) == ("no, requests failed", 1)
    assert shown["2nd token p50"] == shown["3rd token p50"] == shown["ITL p50 ms"] == "-", "none has that many tokens"
    assert notes([result]) == ["p99 of fewer than 100 values is close to their maximum: 1 of TTFT"]


def test_second_tokens_at_prefill_are_in_the_arrangements_name_however_they_are_asked_for() -> None:
    """Otherwise their figures would stand among those of the arrangement without them."""
    given = ["--arrangements", "1P1D", "2 mixed", "1P1D second token"]
    assert names_of(parser().parse_args(given)) == ["1P1D", "2 mixed", "1P1D second token"]
    assert names_of(parser().parse_args([*given, "--second-token-at-prefill"])) == ["1P1D second token", "2 mixed"]


def test_requests_that_warm_up_do_not_count_as_those_without_load() -> None:
    """A first request of each kind takes seconds, by which an arrangement could fall behind unseen."""
    assert seconds_alone([RequestRecord(0.0, end_seconds=seconds) for seconds in (9.0, 4.0, 0.5, 0.75)]) == 0.75


def test_mean_stages_are_those_between_two_readings() -> None:
    """Worked out by hand: 4 requests waited 2 s before, 2 more waited 0.1 s; two transports are one stage."""

    def metrics(queue: float, count: int, wire: float) -> str:
        return (
            f'splitserve_stage_seconds_bucket{{le="1",stage="queue"}} {count}\n'
            f'splitserve_stage_seconds_sum{{stage="queue"}} {queue}\n'
            f'splitserve_stage_seconds_count{{stage="queue"}} {count}\n'
            f'splitserve_handover_stage_seconds_sum{{stage="wire",transport="cma"}} {wire}\n'
            'splitserve_handover_stage_seconds_count{stage="wire",transport="cma"} 1\n'
            'splitserve_handover_stage_seconds_sum{stage="wire",transport="tcp"} 0.5\n'
            'splitserve_handover_stage_seconds_count{stage="wire",transport="tcp"} 1\n'
        )

    before, after = stage_sums(metrics(2.0, 4, 0.25)), stage_sums(metrics(2.1, 6, 0.25))
    assert before == {"queue": (2.0, 4), "handover/wire": (0.75, 2)}
    assert mean_stages_ms(before, after) == pytest.approx({"queue": 50.0})
    assert mean_stages_ms({}, before) == pytest.approx({"queue": 500.0, "handover/wire": 375.0})
