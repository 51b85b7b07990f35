"""Options of benches: what makes no sense is refused in words, before anything is measured."""

from pathlib import Path

import pytest

from splitserve.benchmarks import awake_cores, handover, isolation, latency, router_overhead, serve, tiers
from splitserve.errors import ConfigError


@pytest.mark.parametrize(
    ("bench", "options", "message"),
    [
        (handover, ["--repeats", "0"], "--repeats: '0' isn't a whole number from 1 on"),
        (handover, ["--prompt-tokens", "128", "-5"], "-5"),
        (handover, ["--block-size", "0"], "--block-size: '0' isn't a whole number from 1 on"),
        (handover, ["--poll-us", "nan"], "--poll-us: 'nan' isn't a number from 0 on"),
        (latency, ["--repeats", "none"], "--repeats: 'none' isn't a whole number from 1 on"),
        (isolation, ["--seconds", "nan"], "--seconds: 'nan' isn't a number from 0 on"),
        (isolation, ["--seconds", "0"], "--seconds: it must be more than 0"),
        (isolation, ["--stream-rate", "inf"], "--stream-rate: 'inf' isn't a number from 0 on"),
        (awake_cores, ["--seconds", "-1"], "--seconds"),
        (serve, ["--model", "m", "--num-requests", "0"], "--num-requests: '0' isn't a whole number from 1 on"),
        (serve, ["--model", "m", "--timeout", "nan"], "--timeout: 'nan' isn't a number from 0 on"),
        (handover, ["--seed", "-5"], "--seed: '-5' isn't a whole number from 0 on"),
        (handover, ["--result-dir", "/proc"], "/proc can't be written to"),
        (tiers, ["--rounds", "0"], "--rounds: '0' isn't a whole number from 1 on"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_values_without_sense_are_refused(
    bench: object, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        bench.main(options)  # type: ignore[attr-defined]
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_a_load_without_a_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise --rate or --seconds"):
        router_overhead.main(["--rate", "100", "0.1", "--seconds", "1"])


def test_a_place_for_results_is_tried_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    for place in (file, file / "below"):
        with pytest.raises(SystemExit):
            latency.main(["--result-dir", str(place)])
        assert f"{place} can't be made" in capsys.readouterr().err


def test_a_place_for_results_means_that_they_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--shape", "tiny", "--prompt-tokens", "64", "--block-size", "16", "--repeats", "1"]
    assert handover.main([*sizes, "--device", "cpu", "--result-dir", str(tmp_path)]) == 0
    [path] = tmp_path.iterdir()
    assert f"written to {path}" in capsys.readouterr().out
