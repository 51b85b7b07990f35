"""Resident memory of a CPU worker: bounded, whatever the sizes of its steps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from splitserve.kernels.reference import linear

MAX_GROWTH_MIB = 24.0


def growth(checkpoint: Path, dtype: str) -> float:
    """Return MiB of resident memory that the later steps of ``step_memory.py`` add."""
    script = Path(__file__).parents[1] / "support" / "step_memory.py"
    environment = {name: value for name, value in os.environ.items() if name not in linear.CACHE_SETTINGS}
    done = subprocess.run(
        [sys.executable, str(script), str(checkpoint), dtype],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_numbers_of_tokens_not_seen_before_add_no_memory(tiny_qwen3: Path, dtype: str) -> None:
    if reason := linear.onednn_unavailable_reason(torch.device("cpu"), getattr(torch, dtype)):
        pytest.skip(reason)
    grown = growth(tiny_qwen3, dtype)
    assert grown < MAX_GROWTH_MIB, f"{grown:.1f} MiB more after {linear.MAX_CACHED_PRIMITIVES} primitives were made"


def test_an_operators_own_capacity_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = linear.CACHE_SETTINGS
    monkeypatch.setenv(first, "7")
    monkeypatch.delenv(second, raising=False)
    linear.bound_primitive_caches()
    assert (os.environ[first], os.environ[second]) == ("7", str(linear.MAX_CACHED_PRIMITIVES))
