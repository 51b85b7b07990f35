"""``splitserve bench isolation``, small: every arrangement gets the same requests and answers all of them."""

import json
from pathlib import Path

import pytest

from splitserve.benchmarks.common.stats import RequestRecord
from splitserve.benchmarks.serving.isolation import Load, main, result_of


@pytest.mark.slow
def test_three_arrangements(tmp_path: Path) -> None:
    argv = ["--device", "cpu", "--dtype", "float32", "--kv-memory", "64MiB", "--seconds", "2", "--stream-rate", "3"]
    argv += ["--stream-output-len", "16", "--prompt-rate", "2", "--prompt-input-len", "200", "--max-num-seqs", "16"]
    assert main([*argv, "--save", "--result-dir", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("isolation-*.json")
    results = {each["arrangement"]: each for each in json.loads(file.read_text())["results"]}
    assert list(results) == ["1P1D", "mixed", "2 mixed"]
    assert [each["gpus_or_workers"] for each in results.values()] == [2, 1, 2]
    for each in results.values():
        assert (each["streams"]["completed"], each["prompts"]["completed"]) == (6, 4)
        assert each["streams"]["output_tokens"] == 6 * 16
        assert each["prompts"]["input_tokens"] == 4 * 200
        assert each["streams"]["itl_ms"]["p99"] > 0 and each["prompts"]["ttft_ms"]["p50"] > 0


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
