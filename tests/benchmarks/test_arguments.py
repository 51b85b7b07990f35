"""Options of benches: what makes no sense is refused in words, before anything is measured."""

from pathlib import Path

import pytest

from splitserve.benchmarks.engine import awake_cores, sampling_costs
from splitserve.benchmarks.kv import handover, tier_soak, tiers
from splitserve.benchmarks.router import observability
from splitserve.benchmarks.router import overhead as router_overhead
from splitserve.benchmarks.serving import isolation, latency, serve
from splitserve.benchmarks.twin import simulate
from splitserve.common.errors import ConfigError


@pytest.mark.parametrize(
    ("bench", "options", "message"),
    [
        (handover, ["--repeats", "0"], "--repeats: must be a whole number from 1 on, got '0'"),
        (handover, ["--prompt-tokens", "128", "-5"], "-5"),
        (handover, ["--block-size", "0"], "--block-size: must be a whole number from 1 on, got '0'"),
        (handover, ["--poll-us", "nan"], "--poll-us: must be a finite number, got 'nan'"),
        (latency, ["--repeats", "none"], "--repeats: must be a whole number from 1 on, got 'none'"),
        (isolation, ["--seconds", "nan"], "--seconds: must be a finite number, got 'nan'"),
        (isolation, ["--seconds", "0"], "--seconds: must be more than 0, got '0'"),
        (isolation, ["--stream-rate", "inf"], "--stream-rate: must be a finite number, got 'inf'"),
        (awake_cores, ["--seconds", "-1"], "--seconds: must be more than 0"),
        (isolation, ["--stream-rate", "-1"], "--stream-rate: must be 0 or more, got '-1'"),
        (serve, ["--model", "m", "--num-requests", "0"], "--num-requests: must be a whole number from 1 on, got '0'"),
        (serve, ["--model", "m", "--timeout", "nan"], "--timeout: must be a finite number, got 'nan'"),
        (handover, ["--seed", "-5"], "--seed: must be a whole number from 0 on, got '-5'"),
        (handover, ["--result-dir", "/proc"], "/proc can't be written to"),
        (tier_soak, ["--abort-share", "5"], "--abort-share: must be a share, from 0 to 1, got '5'"),
        (sampling_costs, ["--steps", "0"], "--steps: must be a whole number from 1 on, got '0'"),
        (observability, ["--rounds", "0"], "--rounds: must be a whole number from 1 on, got '0'"),
        (simulate, ["--max-model-len", "-1"], "--max-model-len: must be a whole number from 0 on, got '-1'"),
        (tiers, ["--rounds", "0"], "--rounds: must be a whole number from 1 on, got '0'"),
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--against-mixed"], "--against-mixed is for --served: without it no worker runs"),
        (["--model", "m"], "--model is for --served: without it no worker runs"),
        (["--shape", "gpt-oss-20b"], "--shape gpt-oss-20b is for --served: its KV isn't heads of one kind"),
        (["--served", "--threads", "2"], "--threads isn't for --served: workers read as in production"),
    ],
)
def test_options_of_the_other_kind_of_hand_over_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        handover.main(["--device", "cpu", *options])


def test_a_place_for_results_is_tried_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    for place in (file, file / "below"):
        with pytest.raises(SystemExit):
            latency.main(["--result-dir", str(place)])
        assert f"{place} can't be created" in capsys.readouterr().err


def test_a_place_for_results_means_that_they_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--shape", "tiny", "--prompt-tokens", "64", "--block-size", "16", "--repeats", "1"]
    assert handover.main([*sizes, "--device", "cpu", "--result-dir", str(tmp_path)]) == 0
    [path] = tmp_path.iterdir()
    assert f"written to {path}" in capsys.readouterr().out
