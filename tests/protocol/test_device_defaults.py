import pytest

from splitserve.protocol.engine_config import EngineConfig


@pytest.mark.parametrize(("device", "expected"), [("cpu", 64), ("cuda", 256)])
def test_sequences_at_once_depend_on_the_device(device: str, expected: int) -> None:
    assert EngineConfig(model="m").on(device).max_num_seqs == expected
    assert EngineConfig(model="m", max_num_seqs=7).on(device).max_num_seqs == 7


def test_a_step_has_a_token_of_each_sequence() -> None:
    small = EngineConfig(model="m", max_num_batched_tokens=100).on("cuda")
    assert (small.max_num_seqs, small.max_num_batched_tokens) == (100, 100)
    many = EngineConfig(model="m", max_num_seqs=1000).on("cpu")
    assert (many.max_num_seqs, many.max_num_batched_tokens) == (1000, 1000)
