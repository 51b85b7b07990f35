"""GPUs of a machine: their list, the visible ones, and their assignment to workers."""

from pathlib import Path

import pytest

from splitserve.common.errors import ConfigError
from splitserve.orchestration.hosts.gpus import Gpu, GpuAssignment, check_enough_gpus, list_gpus, parse_gpus, visible
from splitserve.orchestration.spec.document import parse_spec

BASE = """\
model: {path: /models/m}
pools:
- {name: fast, role: prefill, count: 2}
- {name: slow, role: decode}
"""
NVIDIA_SMI = """\
0, GPU-aaaa1111-0000, 00000000:18:00.0, NVIDIA H200, 143771
1, GPU-bbbb2222-0000, 00000000:2A:00.0, NVIDIA H200, 143771
2, GPU-bbbb3333-0000, 00000000:3A:00.0, NVIDIA H200, 143771
"""
GPUS = parse_gpus(NVIDIA_SMI)


def test_gpus_are_listed() -> None:
    assert GPUS[1] == Gpu(1, "GPU-bbbb2222-0000", "00000000:2A:00.0", "NVIDIA H200", 143771 << 20)
    if not Path("/dev/nvidiactl").exists():
        assert list_gpus() == []


@pytest.mark.parametrize(
    ("variable", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        ("GPU-aaaa", [0]),
        ("GPU-bbbb", []),  # ambiguous
        ("1,7,0", [1]),  # nothing after an unknown one
        ("-1,0", []),
        ("1,0,1,GPU-aaaa,2", [1, 0, 2]),  # each once
    ],
)
def test_visible_gpus(variable: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in visible(GPUS, variable)] == indices


def test_too_few_gpus_are_refused() -> None:
    spec = parse_spec(BASE)
    check_enough_gpus(spec, [])  # auto: CPU
    check_enough_gpus(spec, GPUS)
    with pytest.raises(ConfigError, match=r"3 GPUs are needed \(fast 2 x 1, slow 1 x 1\) and 2 visible; use fewer"):
        check_enough_gpus(spec, GPUS[:2])
    check_enough_gpus(parse_spec(BASE + "devices: {share: true}"), GPUS[:1])
    with pytest.raises(ConfigError, match=r"1 GPUs are needed \(slow 1 x 1\) and 0 visible; use --device cpu"):
        check_enough_gpus(parse_spec(BASE.replace("decode", "decode, device: cuda")), [])


def test_each_rank_has_a_gpu_of_its_own() -> None:
    assignment = GpuAssignment(GPUS)
    assert [gpu.index for gpu in assignment.take("a", 2)] == [0, 1]
    with pytest.raises(ConfigError, match="b needs 2 GPUs; 1 of 3 are free"):
        assignment.take("b", 2)
    assert [gpu.index for gpu in assignment.take("b", 1)] == [2]
    assignment.give_back("a")
    assert [gpu.index for gpu in assignment.take("c", 1)] == [0]


def test_shared_gpus_are_given_evenly() -> None:
    assignment = GpuAssignment(GPUS[:2], share=True)
    assert [assignment.take(name, 1)[0].index for name in "abcd"] == [0, 1, 0, 1]
    assert [gpu.index for gpu in assignment.take("e", 2)] == [0, 1]
